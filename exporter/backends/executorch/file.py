"""Read a `.pte`: its plans, instruction by instruction, and the places of its data in the file.

The file is read with ExecuTorch's own schema code. Segments are read in place, never copied: they are mostly weights.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import flatbuffers.number_types
import flatbuffers.table
from executorch.exir import schema
from executorch.exir._serialize._program import _flatbuffer_to_program, _get_extended_header
from executorch.exir.scalar_type import ScalarType

from exporter.errors import BundleError, GraphContractError

_SCALAR_BYTES = {
    ScalarType.BYTE: 1, ScalarType.CHAR: 1, ScalarType.BOOL: 1, ScalarType.SHORT: 2, ScalarType.HALF: 2,
    ScalarType.BFLOAT16: 2, ScalarType.INT: 4, ScalarType.FLOAT: 4, ScalarType.LONG: 8, ScalarType.DOUBLE: 8,
}  # fmt: skip

HEADER_BYTES = 64  # of a `.pte`, its extended header among them; ExecuTorch's reader copies what it is given
# XNNPACK's payload: a header with the magic at byte 4 and the flatbuffer's offset at byte 10. Of the graph's table
# these are the vectors of its nodes and of its external inputs.
_XNNPACK_MAGIC, _XNNPACK_NODES, _XNNPACK_INPUTS = b"XH00", 6, 12


@dataclass(frozen=True)
class Blob:
    """Data in the file: `offset` and `size` in bytes from the file's start, and everything that refers to it."""

    names: tuple[str, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Delegate:
    """A call target of a plan: the operators inside and its inputs, counted where the payload's format is known."""

    backend: str
    nodes: int | None
    inputs: int | None


@dataclass(frozen=True)
class Plan:
    """One method's execution plan. `instructions` are those of its only chain."""

    name: str
    values: tuple[schema.KernelTypes, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[str, ...]
    delegates: tuple[Delegate, ...]
    instructions: tuple[schema.InstructionArguments, ...]
    planned_bytes: int

    @property
    def kernel_calls(self) -> tuple[schema.KernelCall, ...]:
        return tuple(i for i in self.instructions if isinstance(i, schema.KernelCall))

    @property
    def delegate_calls(self) -> tuple[schema.DelegateCall, ...]:
        return tuple(i for i in self.instructions if isinstance(i, schema.DelegateCall))

    def operators_called(self) -> tuple[str, ...]:
        """The kernels the runtime must bring, sorted, named as its registry names them."""
        return tuple(sorted({self.operators[call.op_index] for call in self.kernel_calls}))

    def tensor(self, value: int) -> schema.Tensor | None:
        found = self.values[value]
        return found if isinstance(found, schema.Tensor) else None

    def place(self, value: int) -> tuple[int, int] | None:
        """The place of a tensor in planned memory: arena and offset."""
        tensor = self.tensor(value)
        if tensor is None or tensor.allocation_info is None:
            return None
        return tensor.allocation_info.memory_id, tensor.allocation_info.memory_offset

    def scalar_type(self, value: int) -> ScalarType | None:
        tensor = self.tensor(value)
        return None if tensor is None else tensor.scalar_type

    def shape(self, value: int) -> tuple[int, ...] | None:
        """A tensor's sizes, the upper bounds where they are dynamic."""
        tensor = self.tensor(value)
        return None if tensor is None else tuple(tensor.sizes)


@dataclass(frozen=True)
class PteFile:
    """A program file. `constants` are indexed as tensors refer to them; `named` are blobs back ends look up by key."""

    plans: dict[str, Plan]
    constants: dict[int, Blob]
    named: tuple[Blob, ...]
    payloads: tuple[Blob, ...]
    size: int

    @property
    def constant_bytes(self) -> int:
        return sum(blob.size for blob in self.constants.values())

    @property
    def named_bytes(self) -> int:
        return sum(blob.size for blob in self.named)

    def blobs(self) -> Iterator[Blob]:
        """Everything stored in segments."""
        yield from self.constants.values()
        yield from self.named
        yield from self.payloads


@dataclass(frozen=True)
class PteBytes:
    """A whole file and what was read in it."""

    name: str
    data: bytes
    parsed: PteFile


def read_file(path: Path) -> PteBytes:
    """See `FileModule.read_file`. Raises GraphContractError where the bytes are no program, as `read_pte`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"program {path.name}", got=str(error), expected="a readable file", repair="Check the path."
        ) from error
    return PteBytes(path.name, data, read_pte(data))


def read_pte(data: bytes | mmap.mmap) -> PteFile:
    """Read a program file.

    Raises:
        GraphContractError: `data` is no ExecuTorch program with segments, is damaged, or has a method that is not one
            straight line.
    """
    header = _get_extended_header(data[:HEADER_BYTES])
    if header is None or data[4:6] != b"ET":
        raise GraphContractError(
            "pte reader",
            got=f"{len(data)} bytes that begin with {data[:8]!r}",
            expected="an ExecuTorch program with an extended header",
            repair="Pass the whole .pte file as written by the exporter.",
        )
    try:
        file = _parse(data, header.program_size, header.segment_base_offset)
    except GraphContractError:
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise _damaged(f"a program that does not parse ({type(error).__name__})") from error
    beyond = next((blob for blob in file.blobs() if blob.offset + blob.size > len(data)), None)
    if beyond is not None:
        raise _damaged(f"{len(data)} bytes, while {beyond.names[0]} ends at {beyond.offset + beyond.size}")
    return file


def _damaged(got: str) -> GraphContractError:
    return GraphContractError(
        "pte reader", got=got, expected="a whole .pte file", repair="The file was truncated or altered: copy it again."
    )


def _parse(data: bytes | mmap.mmap, program_size: int, base: int) -> PteFile:
    program = _flatbuffer_to_program(data[:program_size])

    def segment(index: int) -> tuple[int, int]:
        return base + program.segments[index].offset, program.segments[index].size

    named: dict[int, list[str]] = {}
    for entry in program.named_data or []:
        named.setdefault(entry.segment_index, []).append(entry.key)
    payloads: dict[int, list[str]] = {}
    for plan in program.execution_plan:
        for i, delegate in enumerate(plan.delegates):
            if delegate.processed.location == schema.DataLocation.SEGMENT:
                payloads.setdefault(delegate.processed.index, []).append(f"{plan.name} delegate {i} ({delegate.id})")

    def payload_of(delegate: schema.BackendDelegate) -> bytes:
        index = delegate.processed.index
        if delegate.processed.location == schema.DataLocation.INLINE:
            return bytes(program.backend_delegate_data[index].data)
        offset, size = segment(index)
        return data[offset : offset + size]

    return PteFile(
        plans={plan.name: _plan(plan, payload_of) for plan in program.execution_plan},
        constants=_constants(program, segment),
        named=tuple(Blob(tuple(keys), *segment(i)) for i, keys in named.items()),
        payloads=tuple(Blob(tuple(names), *segment(i)) for i, names in payloads.items()),
        size=len(data),
    )


def tensor_bytes(tensor: schema.Tensor) -> int:
    """The bytes of a tensor at its (upper bound) sizes."""
    return math.prod(tensor.sizes) * _SCALAR_BYTES[tensor.scalar_type]


def _plan(plan: schema.ExecutionPlan, payload_of: Callable[[schema.BackendDelegate], bytes]) -> Plan:
    instructions = [i.instr_args for chain in plan.chains for i in chain.instructions]
    if len(plan.chains) != 1 or any(isinstance(i, schema.JumpFalseCall) for i in instructions):
        raise GraphContractError(
            "pte reader",
            got=f"method {plan.name} with {len(plan.chains)} chains and jumps",
            expected="one straight line of instructions",
            repair="Control flow in a program is not checked: express it as arithmetic.",
        )
    return Plan(
        name=plan.name,
        values=tuple(value.val for value in plan.values),
        inputs=tuple(plan.inputs),
        outputs=tuple(plan.outputs),
        operators=tuple(f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators),
        delegates=tuple(_delegate(d.id, payload_of(d)) for d in plan.delegates),
        instructions=tuple(instructions),
        # Entry 0 stands for the constants.
        planned_bytes=sum(plan.non_const_buffer_sizes[1:]),
    )


def _constants(program: schema.Program, segment: Callable[[int], tuple[int, int]]) -> dict[int, Blob]:
    offsets = program.constant_segment.offsets
    if not offsets:
        return {}
    users: dict[int, int] = {}
    for plan in program.execution_plan:
        for value in plan.values:
            if isinstance(value.val, schema.Tensor) and value.val.data_buffer_idx > 0:
                index = value.val.data_buffer_idx
                users[index] = max(users.get(index, 0), tensor_bytes(value.val))
    start, _ = segment(program.constant_segment.segment_index)
    return {i: Blob((f"constant {i}",), start + offsets[i], size) for i, size in users.items()}


def _delegate(backend: str, payload: bytes) -> Delegate:
    if payload[4:8] != _XNNPACK_MAGIC:
        return Delegate(backend, None, None)
    (start,) = struct.unpack_from("<I", payload, 10)
    (root,) = struct.unpack_from("<I", payload, start)
    table = flatbuffers.table.Table(payload, start + root)

    def count(slot: int) -> int:
        field = flatbuffers.number_types.UOffsetTFlags.py_type(table.Offset(slot))
        return int(table.VectorLen(field)) if field else 0

    return Delegate(backend, count(_XNNPACK_NODES), count(_XNNPACK_INPUTS))
