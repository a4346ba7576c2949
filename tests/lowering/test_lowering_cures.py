"""What the lowering changes on the way to XNNPACK, and that it changes nothing else."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

import pytest
import torch
from recipes import quantize_by
from tiny_models import GLOBAL, SLIDING, decoder_of, model, states_of
from torch.export import Dim, export

from exporter.backends.executorch.file import read_pte
from exporter.backends.executorch.inputs import quantized_inputs_shared
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.means import means_as_products
from exporter.backends.executorch.runtime import PteProgram
from exporter.programs import Limits, trace
from exporter.spec import PROGRAMS, QuantizationSpec

LIMITS = Limits(max_context_length=64, max_prefill_chunk=32)


class Means(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        squares = x * x
        return squares.mean(-1, keepdim=True), squares.mean(2, keepdim=True), x.mean(-1), x.mean((1, 2), keepdim=True)


def test_a_mean_over_the_last_axis_becomes_a_product_and_others_stay() -> None:
    x = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    program = export(Means(), (x,), dynamic_shapes=({1: Dim("q", min=2, max=8)},))
    means_as_products(program)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.linear.default") == 2 and targets.count("aten.mean.dim") == 2
    assert [name for name in program.constants if "mean_of" in name] == ["mean_of_20"]
    for length in (2, 8):
        x = torch.randn(1, length, 20, generator=torch.Generator().manual_seed(length))
        for got, wanted in zip(program.module()(x), Means()(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=3e-7)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        twice = (x * 5).mean(-1, keepdim=True)
        return (
            x.mean(-1, keepdim=True) + 0.5, (x * 2).mean(-1, keepdim=True) + 0.5, (x * 3).mean(-1, keepdim=True) + 2,
            torch.add((x * 4).mean(-1, keepdim=True), 1.0, alpha=3), twice + 0.25, twice * 2,
            (x * 6).mean(-1, keepdim=True) + x,
        )  # fmt: skip


def test_a_number_added_to_a_mean_is_the_products_bias() -> None:
    """Numbers alone, and of a mean that nothing else reads."""
    x = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    program = export(Sums(), (x,))
    means_as_products(program)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.linear.default") == 6 and targets.count("aten.add.Tensor") == 3
    assert [float(program.constants[name]) for name in program.constants if "added" in name] == [0.5, 2.0]
    for got, wanted in zip(program.module()(x), Sums()(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_linears_of_one_input_round_it_once_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels="executorch", context=64)
    quantize_by(QuantizationSpec(linear="int8"), decoder)
    module = importlib.import_module("exporter.backends.executorch.lower")
    delegates, results = [], []
    for name, context in (("shared", quantized_inputs_shared), ("each", contextlib.nullcontext)):
        monkeypatch.setattr(module, "quantized_inputs_shared", context)
        path = tmp_path / f"{name}.pte"
        lower({method: trace(decoder, PROGRAMS[method], LIMITS) for method in PROGRAMS}, path)
        plans = read_pte(path.read_bytes()).plans
        delegates.append({method: [d.nodes or 0 for d in plans[method].delegates] for method in PROGRAMS})
        states = states_of(decoder, rows=64)
        program, ids = PteProgram(path), torch.arange(12)[None]
        logits = [
            program.run("prefill", ids, ids, states),
            program.run("main", ids[:, :1], torch.arange(13)[None], states),
        ]
        results.append([*logits, *states])
        del program
    shared, each = delegates
    assert {method: len(found) for method, found in shared.items()} == {m: len(found) for m, found in each.items()}
    # Of two layers' q, k, v, gate and up, where they are in one delegate; in prefill a chunk's rows come between.
    assert sum(each["main"]) - sum(shared["main"]) == 2 * (2 + 1)
    assert 2 <= sum(each["prefill"]) - sum(shared["prefill"]) <= 2 * (2 + 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_no_mean_is_left_to_cut_the_file(tmp_path: Path) -> None:
    decoder = decoder_of(model(*[SLIDING] * 3, GLOBAL), kernels="executorch", context=64)
    lower({method: trace(decoder, PROGRAMS[method], LIMITS) for method in PROGRAMS}, tmp_path / "model.pte")
    for plan in read_pte((tmp_path / "model.pte").read_bytes()).plans.values():
        assert "aten::mean.out" not in plan.operators_called()
