"""The decoder with its caches as buffers, which Core ML needs; traced once for each method.

Letters: Q query_len, S seq_len, V vocab_size.
"""

from __future__ import annotations

import torch
from torch.export import Dim, ExportedProgram

from exporter.model.decoder import Decoder
from exporter.programs import run_kind
from exporter.spec import MethodSpec, ProgramKind


class StatefulDecoder(torch.nn.Module):
    """A decoder whose states are buffers, which Core ML turns into states of the same names and shapes.

    Input ids int32 ``[1, Q]`` and position ids int32 ``[1, S]``, of which only the length counts; logits float32
    ``[1, V]`` of the last token, or ``[1, Q, V]`` of all.
    """

    def __init__(self, decoder: Decoder, kind: ProgramKind) -> None:
        super().__init__()
        self.decoder = decoder
        self.kind = kind
        for state in decoder.states:
            self.register_buffer(state.name, torch.zeros(state.shape(), dtype=torch.float16))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        states = [self.get_buffer(state.name) for state in self.decoder.states]
        return run_kind(self.decoder, self.kind, input_ids, position_ids, states)


def trace_stateful(decoder: Decoder, kind: ProgramKind, interface: MethodSpec) -> ExportedProgram:
    """Export one program of `decoder`, which is on Core ML's caches, with the dynamic lengths of its `interface`."""
    dims = {name: Dim(name, min=low, max=high) for name, (low, high) in interface.dims.items() if low < high}
    query_high = interface.dims.get("query_len", (1, 1))[1]
    example = {"query_len": min(8, query_high)}
    example["seq_len"] = min(example["query_len"] + 3, interface.dims["seq_len"][1])
    arguments, dynamic = [], []
    for tensor in interface.inputs[:2]:
        shape = [example[n] if isinstance(n, str) else n for n in tensor.shape]
        arguments.append(torch.zeros(shape, dtype=torch.int32))
        dynamic.append({axis: dims[n] for axis, n in enumerate(tensor.shape) if n in dims})
    with torch.no_grad():
        return torch.export.export(
            StatefulDecoder(decoder, kind).eval(),
            tuple(arguments),
            dynamic_shapes=tuple(dynamic),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
