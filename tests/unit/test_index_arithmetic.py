"""What is computed from sizes alone is computed once; what reads a tensor stays where it is."""

from __future__ import annotations

from collections import Counter

import torch
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from torch.export import Dim, ExportedProgram, export

from exporter.backends.executorch.kernels import ExecutorchKernels
from exporter.index_arithmetic import merge_index_arithmetic
from exporter.programs import Limits, trace
from exporter.spec import PREFILL


class TwoMasks(torch.nn.Module):
    """The same mask twice, and a state that is read, written and read again."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = state.narrow(0, 0, 2) * 2
        first = torch.where(torch.arange(x.shape[0]) >= 1, 1.0, 0.0)
        state.copy_(torch.ones(4) * 5)
        second = torch.where(torch.arange(x.shape[0]) >= 1, 1.0, 0.0)
        return x * first + x.sum() * second, before - state.narrow(0, 0, 2) * 2


def program() -> ExportedProgram:
    return export(TwoMasks(), (torch.ones(3), torch.zeros(4)), dynamic_shapes=({0: Dim("n", min=2, max=9)}, None))


def operators(own: ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in own.graph.nodes if node.op == "call_function")


def test_equal_masks_become_one_and_reads_of_a_state_stay() -> None:
    own = program()
    before = operators(own)
    merge_index_arithmetic(own)
    after = operators(own)
    assert before["aten.arange.default"] == 2 and after["aten.arange.default"] == 1
    assert before["aten.ge.Scalar"] == 2 and after["aten.ge.Scalar"] == 1
    assert before["aten.narrow.default"] == after["aten.narrow.default"] == 2
    assert before["aten.copy_.default"] == after["aten.copy_.default"] == 1


def test_the_merged_program_says_the_same() -> None:
    own = program()
    merge_index_arithmetic(own)
    x, state = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([7.0, 8.0, 9.0, 9.0])
    out, difference = own.module()(x, state)
    assert out.tolist() == [0.0, 12.0, 13.0, 14.0]
    assert difference.tolist() == [4.0, 6.0] and state.tolist() == [5.0] * 4


def test_a_model_builds_one_mask_for_all_its_sliding_layers() -> None:
    decoder = decoder_of(model(*[SLIDING] * 4, GLOBAL), kernels="executorch", context=64)
    assert isinstance(decoder.layers[0].mixer.kernels, ExecutorchKernels)
    own = trace(decoder, PREFILL, Limits(max_context_length=64, max_prefill_chunk=32))
    counts = operators(own)
    assert counts["aten.logical_and.default"] == 2  # one mask: age below 0, age of the window, never written
    assert counts["aten.div.Tensor_mode"] == 1  # one set of slots
    assert counts["llama.update_cache_with_indices.default"] == 8
