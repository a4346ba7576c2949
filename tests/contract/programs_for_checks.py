"""A small decoder (one sliding, one global layer) with a switch for each fault the graph checks must find."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass, ToOutVarPass
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from exporter.graph import ProgramContract
from exporter.spec import PROGRAMS, MethodSpec, StateSpec, TensorSpec

VOCAB, HIDDEN, HEADS, HEAD_DIM, WINDOW, MAX_CHUNK, MAX_LEN = 97, 32, 2, 16, 8, 24, 64

Rows = tuple[Tensor, ...]
ROLES: tuple[Literal["keys", "values"], ...] = ("keys", "values")

STATES = tuple(
    StateSpec(
        name=f"layer_{layer}_{role}", layers=(layer,), role=role, kind="full" if layer else "ring",
        rows=16 if layer else WINDOW, max_rows=MAX_LEN if layer else WINDOW, window=None if layer else WINDOW,
        row_shape=(HEADS, HEAD_DIM), dtype="float32",
    )
    for layer in range(2)
    for role in ROLES
)  # fmt: skip


def contract_of(method: str) -> ProgramContract:
    prefill = method == "prefill"
    dims = {"S": (2 if prefill else 1, MAX_LEN), "C": (2, MAX_LEN)} | ({"Q": (2, MAX_CHUNK)} if prefill else {})
    inputs: list[tuple[str, tuple[int | str, ...], str]] = [("input_ids", (1, "Q" if prefill else 1), "int64")]
    inputs.append(("position_ids", (1, "S"), "int64"))
    inputs += [(s.name, (1, "C" if s.kind == "full" else s.rows, *s.row_shape), "float32") for s in STATES]
    interface = MethodSpec(
        write_first=PROGRAMS[method].write_first,
        logits=PROGRAMS[method].logits,
        inputs=tuple(TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape, dtype in inputs),
        outputs=(TensorSpec(name="logits", shape=(1, VOCAB), dtype="float32"),),
        dims=dims,
        mutates=tuple(s.name for s in STATES),
    )
    return ProgramContract(method, interface, STATES)


CONTRACTS = {method: contract_of(method) for method in PROGRAMS}


@dataclasses.dataclass(frozen=True)
class Form:
    """How to build a program: its method, `custom` operators or plain aten, and the faults to put in."""

    method: str
    custom: bool = True
    faults: frozenset[str] = frozenset()


class Decoder(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.ModuleList(nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if "infinite_weight" in form.faults:
            self.head.weight.data[0, 0] = float("inf")
        if "two_heads" in form.faults:
            # XNNPACK packs `head`, the portable embedding keeps its own copy of the same bytes.
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, input_ids: Tensor, position_ids: Tensor, *states: Tensor) -> Tensor | Rows:
        faults = self.form.faults
        query_len, seq_len = input_ids.shape[1], position_ids.shape[1]
        offset = seq_len - query_len
        torch._check(offset >= 0)
        torch._check(seq_len <= states[2].shape[1])
        if "even_lengths" in faults:
            torch._check(seq_len % 2 == 0)
        x = self.embed(input_ids)
        if "item_on_data" in faults:
            x = x * input_ids[0, 0].item()
        if "item_on_weight" in faults:
            x = x * self.embed.weight[0, 0].item()
        for layer in range(2):
            qkv = self.mix[layer](x).view(1, query_len, 3 * HEADS, HEAD_DIM).split(HEADS, dim=2)
            own = states[2 * layer : 2 * layer + 2]
            if layer == 0:
                attended = self.ring(qkv, own, offset, position_ids)
            else:
                attended = self.full(qkv, own, offset, position_ids)
            x = x + self.out[layer](attended.reshape(1, query_len, HEADS * HEAD_DIM))
        if "extra_mutation" in faults:
            position_ids.add_(1)
        if "returned_state" in faults:
            return self.head(x[:, -1]), states[0].view(1, -1)
        if "all_logits" in faults:
            return self.head(x)
        if "late_slice" in faults:
            return self.head(x)[:, -1]
        return self.head(x[:, -1])

    def slots(self, query_len: int, offset: int, position_ids: Tensor) -> Tensor:
        """Each token's row of the ring."""
        faults = self.form.faults
        if "data_index" in faults:
            first = position_ids[0, :query_len]
            return torch.where(first >= WINDOW, first - WINDOW, first).clamp(0, WINDOW - 1)
        if "tensor_remainder" in faults:
            return (torch.arange(query_len) + offset) % WINDOW
        shift = 1 if "wrong_slot" in faults else 0
        # A chunk of at most MAX_CHUNK wraps MAX_CHUNK // WINDOW + 1 times, each taken off by a comparison.
        slots = torch.arange(query_len) + (offset + shift) % WINDOW
        for _ in range(MAX_CHUNK // WINDOW + 1):
            slots = torch.where(slots >= WINDOW, slots - WINDOW, slots)
        return slots

    def ring(self, qkv: Rows, states: Rows, offset: int, position_ids: Tensor) -> Tensor:
        (q, k, v), (keys, values) = qkv, states
        custom, faults, query_len = self.form.custom, self.form.faults, q.shape[1]

        def write() -> None:
            if self.form.method == "main" and custom and "data_index" not in faults:
                start = (offset + (1 if "wrong_slot" in faults else 0)) % WINDOW
                torch.ops.llama.update_cache(k, keys, start)
                torch.ops.llama.update_cache(v, values, start)
                return
            slots = self.slots(query_len, offset, position_ids)
            if custom:
                start = offset % WINDOW
                torch.ops.llama.update_cache_with_indices(k, keys, start, slots.view(1, query_len))
                torch.ops.llama.update_cache_with_indices(v, values, start, slots.view(1, query_len))
            else:
                keys.index_copy_(1, slots, k)
                values.index_copy_(1, slots, v)

        if self.form.method == "main":
            if "read_first" in faults:
                out = self.attend(q, keys, values, WINDOW - 1, None)
                write()
                return out
            write()
            last = (torch.arange(1) + offset).clamp(max=WINDOW - 1)[0].item()
            torch._check(last >= 0)
            torch._check(last < WINDOW)
            return self.attend(q, keys, values, last, None)
        positions = torch.arange(query_len) + offset
        slot, newest = torch.arange(WINDOW), (offset + WINDOW - 1) % WINDOW
        held = offset - 1 - torch.where(newest >= slot, newest - slot, newest - slot + WINDOW)
        key_pos = torch.cat([held, positions])[None, :]
        visible = (key_pos <= positions[:, None]) & (key_pos > positions[:, None] - WINDOW) & (key_pos >= 0)
        mask = torch.where(visible, 0.0, float("-inf") if "infinite_mask" in faults else -1e30)
        if "write_first" in faults:
            write()
        attended = self.attend(q, torch.cat([keys, k], 1), torch.cat([values, v], 1), 0, mask)
        if "write_first" not in faults:
            write()
        return attended

    def full(self, qkv: Rows, states: Rows, offset: int, position_ids: Tensor) -> Tensor:
        (q, k, v), (keys, values) = qkv, states
        custom, faults, query_len = self.form.custom, self.form.faults, q.shape[1]

        def write() -> None:
            if "data_index_full" in faults:
                slots = position_ids[:, -query_len:]
                torch.ops.llama.update_cache_with_indices(k, keys, 0, slots)
                torch.ops.llama.update_cache_with_indices(v, values, 0, slots)
            elif custom:
                torch.ops.llama.update_cache(k, keys, offset)
                if "unwritten" not in faults:
                    torch.ops.llama.update_cache(v, values, offset)
            else:
                keys.index_copy_(1, torch.arange(query_len) + offset, k)
                values.index_copy_(1, torch.arange(query_len) + offset, v)

        def attend() -> Tensor:
            if custom:
                return torch.ops.llama.custom_sdpa(q, keys, values, offset, None, 0.0, True, HEAD_DIM**-0.5)
            positions = torch.arange(query_len) + offset
            visible = torch.arange(keys.shape[1])[None, :] <= positions[:, None]
            return self.attend(q, keys, values, 0, torch.where(visible, 0.0, -1e30))

        if "full_read_first" in faults:
            attended = attend()
            write()
            return attended
        write()
        return attend()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, last: float, mask: Tensor | None) -> Tensor:
        if self.form.custom:
            return torch.ops.llama.custom_sdpa(q, keys, values, last, mask, 0.0, mask is None, HEAD_DIM**-0.5)
        scores = torch.matmul(q.transpose(1, 2), keys.permute(0, 2, 3, 1)) * HEAD_DIM**-0.5
        scores = scores + (torch.where(torch.arange(WINDOW) <= last, 0.0, -1e30) if mask is None else mask)
        return torch.matmul(scores.softmax(-1), values.transpose(1, 2)).transpose(1, 2)


def trace(method: str, *faults: str, custom: bool = True) -> ExportedProgram:
    """The exported program of one method."""
    form = Form(method, custom, frozenset(faults))
    query_len = 1 if method == "main" else 6
    states = tuple(torch.zeros(spec.shape(32 if spec.kind == "full" else None)) for spec in STATES)
    args = (torch.zeros(1, query_len, dtype=torch.long), torch.zeros(1, 12, dtype=torch.long), *states)
    low, high = (2 if method == "prefill" else 1), MAX_LEN
    query = {} if method == "main" else {1: Dim("Q", min=2, max=MAX_CHUNK)}
    if "fixed_query" in faults:
        low, query = query_len, {}
    if "short_sequence" in faults:
        high, query = MAX_CHUNK, {1: Dim("Q", min=2, max=MAX_CHUNK)}
    if "fixed_rows" in faults:
        high = 32
    sequence, rows = {1: Dim("S", min=low, max=high)}, Dim("C", min=max(2, low), max=MAX_LEN)
    full: dict[int, object] = {} if "fixed_rows" in faults else {1: rows}
    shapes: tuple[object, ...] = (query, sequence, ({}, {}, full, full))
    with torch.no_grad():
        return export(
            Decoder(form).eval(), args, dynamic_shapes=shapes, strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip


class InPlaceStatePass(ToOutVarPass):
    """Out-variant conversion that leaves mutated inputs in the caller's memory (see the lowering proper)."""

    def call(self, graph_module: torch.fx.GraphModule):  # type: ignore[no-untyped-def]
        result = super().call(graph_module)
        graph = result.graph_module.graph

        def origin(node: torch.fx.Node) -> torch.fx.Node:
            while node.op == "call_function" and "copy" in str(node.target) and len(node.args) >= 2:
                node = node.args[1]  # type: ignore[assignment]
            return node

        for node in list(graph.nodes):
            if str(node.target) == "aten.copy_.default" and origin(node.args[1]) is node.args[0]:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        output = next(n for n in graph.nodes if n.op == "output")
        output.args = (tuple(n for n in output.args[0] if n.op != "placeholder"),)
        erased = True
        while erased:
            dead = [
                n for n in reversed(graph.nodes)
                if n.op == "call_function" and not n.users
                and (str(n.target) == "aten.copy.out" or "alloc" in str(n.target))
            ]  # fmt: skip
            erased = bool(dead)
            for node in dead:
                graph.erase_node(node)
        result.graph_module.recompile()
        return result


def lower(programs: dict[str, ExportedProgram], *, in_place: bool = True, delegate: bool = True) -> bytes:
    """The bytes of one .pte with these methods."""
    edge = to_edge_transform_and_lower(
        programs, partitioner={name: [XnnpackPartitioner()] if delegate else [] for name in programs}
    )
    config = ExecutorchBackendConfig(
        to_out_var_pass=InPlaceStatePass() if in_place else ToOutVarPass(),
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
    )
    return bytes(edge.to_executorch(config).buffer)
