"""A `.pte` over float16 caches against its eager model and the float one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_programs import (
    assert_another_cache_is_refused,
    assert_rewinds_forks_and_is_saved,
    clean_and_poisoned,
    compared_with_eager,
    eager_over,
    ids_of,
)
from conftest import WINDOW
from tiny_models import GLOBAL, SLIDING, SPECS, decoder_of, model

import runtime_ref
from exporter.backends.executorch.build import graph_contracts
from exporter.backends.executorch.checks import check_lowered, runtime_registry
from exporter.backends.executorch.kernels import ExecutorchKernels
from exporter.backends.executorch.lower import lower
from exporter.bundle import read_bundle
from exporter.cache.interface import Extras, States
from exporter.inspection import inspect
from exporter.model.decoder import Decoder
from exporter.programs import Limits, trace
from exporter.spec import PROGRAMS, CheckResult


def test_the_bundle_says_what_it_is(half_cache_bundle: Path) -> None:
    manifest = read_bundle(half_cache_bundle).manifest
    kinds = [("ring", WINDOW + 3), ("full", 16), ("ring", WINDOW + 3)]
    assert [(s.name, s.kind, s.rows, s.dtype, s.bytes(1)) for s in manifest.states] == [
        (f"layer_{layer}_{role}", kind, rows, "float16", 2 * 2 * 16)
        for layer, (kind, rows) in enumerate(kinds)
        for role in ("keys", "values")
    ]
    for method in manifest.programs[0].methods.values():
        assert [t.dtype for t in method.inputs[2:]] == ["float16"] * 6
    assert manifest.is_quantized and not manifest.program.rounded


def test_every_check_holds_on_the_traced_programs_and_on_the_file(half_cache_bundle: Path) -> None:
    recorded = read_bundle(half_cache_bundle).manifest.graph_checks
    assert [c for c in (*recorded, *inspect(half_cache_bundle).lowered) if not c.passed] == []


class Widening(ExecutorchKernels):
    """A mutant: attention over a float32 copy of everything allocated."""

    def attend_causal(self, query: torch.Tensor, rows: States, offset: int, extras: Extras) -> torch.Tensor:
        return super().attend_causal(query, self.storage(rows).decode(rows), offset, extras)


def lowered_checks(decoder: Decoder, path: Path) -> list[CheckResult]:
    limits = Limits(max_context_length=64, max_prefill_chunk=16)
    lower({name: trace(decoder, kind, limits) for name, kind in PROGRAMS.items()}, path)
    return check_lowered(path.read_bytes(), graph_contracts(decoder, limits), runtime_registry()[1])


@pytest.mark.parametrize("kernels", [ExecutorchKernels(), Widening()])
def test_a_file_that_widens_whole_states_is_refused(kernels: ExecutorchKernels, tmp_path: Path) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), context=64, dtype="float16").with_kernels(kernels)
    checks = lowered_checks(decoder, tmp_path / "model.pte")
    copies = [c.passed for c in checks if c.name == "no_whole_state_copy"]
    assert copies == [not isinstance(kernels, Widening)] * 2


@pytest.mark.parametrize("name", ["gemma", "sinks and experts", "softcap"])
def test_attention_that_the_operator_lacks_works_over_float16_too(name: str, tmp_path: Path) -> None:
    decoder = decoder_of(SPECS[name], context=64, dtype="float16", kernels="executorch")
    failed = {c.name for c in lowered_checks(decoder, tmp_path / "model.pte") if not c.passed}
    assert failed <= {"delegated_share"}  # what these models delegate is not the point


def test_the_program_is_its_eager_model_up_to_rounding(half_cache_bundle: Path) -> None:
    """Measured: KL divergence of eager from the float model 1e-7; of the program from either 1e-7 where chunks are
    multiplied in float32, 4e-6 in bfloat16."""
    ours, floats, baseline = compared_with_eager(half_cache_bundle)
    assert 0 < baseline.mean_kl_divergence < 5e-7
    assert ours.mean_kl_divergence < 1e-5 and floats.mean_kl_divergence < 1e-5
    assert ours.max_abs_difference < 3e-2  # 1.7e-2 in bfloat16


def test_the_first_layers_rows_are_eagers(half_cache_bundle: Path) -> None:
    """Layer 0 hears no earlier layer: its rows are eager's but for a last bit where float32's own last bit decides."""
    session = runtime_ref.load(half_cache_bundle)
    eager = eager_over(session.manifest, half_cache_bundle)
    session.prefill(ids_of(50), 20)
    eager.prefill(ids_of(50), 20)
    for ours, theirs in zip(session.state.tensors[:2], eager.state.tensors[:2], strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=1e-6)
        assert (ours != theirs).float().mean() < 0.01


def test_verification_refuses_a_config_with_another_cache(half_cache_bundle: Path) -> None:
    assert_another_cache_is_refused(half_cache_bundle, "float16")


def test_what_was_never_written_is_never_read(half_cache_bundle: Path) -> None:
    for clean, poisoned in clean_and_poisoned(half_cache_bundle, integer=0):
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)


def test_a_conversation_rewinds_forks_and_is_saved(half_cache_bundle: Path, tmp_path: Path) -> None:
    assert_rewinds_forks_and_is_saved(half_cache_bundle, tmp_path)
