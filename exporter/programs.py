"""Trace a decoder into its programs, each on its own.

Letters: Q query_len, S seq_len, rows: rows allocated to every global layer, V vocab_size.

Every program takes ``input_ids [1, Q]``, ``position_ids [1, S]`` and the states; its `ProgramKind` says how many
tokens, whether rings are written before they are read, and whose logits it gives. No program is made from the graph of
another one: it would inherit the other's order of reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.export import Dim, ExportedProgram

from exporter.errors import GraphContractError
from exporter.index_arithmetic import merge_index_arithmetic
from exporter.model.decoder import Decoder
from exporter.spec import MethodSpec, ProgramKind, StateSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The inclusive maxima every program declares."""

    max_context_length: int
    max_prefill_chunk: int


class ProgramModule(torch.nn.Module):
    """A decoder with its access order fixed, in the calling convention of the exported programs."""

    def __init__(self, decoder: Decoder, kind: ProgramKind) -> None:
        super().__init__()
        self.decoder = decoder
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        return run_kind(self.decoder, self.kind, input_ids, position_ids, states)


def run_kind(
    decoder: Decoder, kind: ProgramKind, input_ids: torch.Tensor, position_ids: torch.Tensor,
    states: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """What a program of `kind` gives: logits ``[1, V]`` of the last token, or ``[1, Q, V]`` of all."""
    hidden = decoder.hidden_states(input_ids, position_ids, states, kind.write_first)
    if kind.logits == "all":
        return decoder.logits(hidden)
    return decoder.logits(hidden[:, -1:, :])[:, 0]


def method_spec(decoder: Decoder, kind: ProgramKind, limits: Limits, ids_dtype: str = "int64") -> MethodSpec:
    """The interface of a program of `decoder`."""
    return interface(decoder.states, decoder.spec.vocab_size, kind, limits, ids_dtype)


def interface(
    states: Sequence[StateSpec], vocab_size: int, kind: ProgramKind, limits: Limits, ids_dtype: str = "int64"
) -> MethodSpec:
    """The interface of a program: the one place where its dynamic dimensions and their ranges are decided.

    A full state that is allocated whole from the start has no dynamic dimension. `ids_dtype` is that of the first two
    inputs.
    """
    context = limits.max_context_length
    low, high = kind.query_range(limits.max_prefill_chunk, context)
    query_len: int | str = low if kind.max_query_len == low else "query_len"
    dims = {"seq_len": (low, context)}
    if isinstance(query_len, str):
        dims[query_len] = (low, high)
    tensors = []
    for state in states:
        shape: tuple[int | str, ...] = state.shape()
        if state.grows:
            dims["rows"] = (min(2, context), context)
            shape = (len(state.layers), "rows", *state.row_shape)
        tensors.append(TensorSpec(name=state.name, shape=shape, dtype=state.dtype))
    logits: tuple[int | str, ...] = (1, vocab_size) if kind.logits == "last" else (1, query_len, vocab_size)
    return MethodSpec(
        write_first=kind.write_first,
        logits=kind.logits,
        inputs=(
            TensorSpec(name="input_ids", shape=(1, query_len), dtype=ids_dtype),
            TensorSpec(name="position_ids", shape=(1, "seq_len"), dtype=ids_dtype),
            *tensors,
        ),
        outputs=(TensorSpec(name="logits", shape=logits, dtype="float32"),),
        dims=dims,
        mutates=tuple(state.name for state in states),
    )


def trace(decoder: Decoder, kind: ProgramKind, limits: Limits, ids_dtype: str = "int64") -> ExportedProgram:
    """Export one program with its declared dynamic shapes; a dimension whose range is one number is static.

    Raises:
        GraphContractError: `decoder` is a graph that was traced already.
    """
    if isinstance(decoder, ExportedProgram | torch.fx.GraphModule):
        raise GraphContractError(
            "trace",
            got=f"a traced graph ({type(decoder).__name__})",
            expected="a Decoder",
            repair="Trace each program from the decoder by itself: the order of reads and writes is fixed in a graph, "
            "and prefill derived from main's would write rings first, over rows that its own early tokens still need.",
        )
    spec = method_spec(decoder, kind, limits, ids_dtype)
    dims = {name: Dim(name, min=low, max=high) for name, (low, high) in spec.dims.items() if low < high}
    example = {"query_len": min(8, dims_high(spec, "query_len")), "rows": min(64, dims_high(spec, "rows"))}
    example["seq_len"] = min(example["query_len"] + 3, dims_high(spec, "seq_len"))
    arguments, dynamic = [], []
    for tensor in spec.inputs:
        shape = [example[n] if isinstance(n, str) else n for n in tensor.shape]
        arguments.append(torch.zeros(shape, dtype=getattr(torch, tensor.dtype)))
        dynamic.append({axis: dims[n] for axis, n in enumerate(tensor.shape) if n in dims})
    with torch.no_grad():
        program = torch.export.export(
            ProgramModule(decoder, kind).eval(),
            tuple(arguments),
            dynamic_shapes=(dynamic[0], dynamic[1], tuple(dynamic[2:])),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    merge_index_arithmetic(program)
    return program


def dims_high(spec: MethodSpec, name: str) -> int:
    return spec.dims.get(name, (1, 1))[1]
