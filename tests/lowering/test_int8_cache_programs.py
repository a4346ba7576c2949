"""A `.pte` over int8 caches against its eager model and the float one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_programs import (
    PIECES,
    assert_another_cache_is_refused,
    assert_rewinds_forks_and_is_saved,
    clean_and_poisoned,
    compared_with_eager,
    eager_over,
    ids_of,
)
from conftest import CHUNK, CONTEXT, WINDOW

import runtime_ref
from exporter import pipeline, verification
from exporter.bundle import read_bundle
from exporter.graph.contract_file import ContractFile, LayerForm, ProgramForm
from exporter.inspection import inspect
from exporter.progress import Progress

INT8_BUNDLES = ("int8_cache_bundle", "int8_global_cache_bundle")


def test_the_bundle_says_what_it_is(int8_cache_bundle: Path) -> None:
    manifest = read_bundle(int8_cache_bundle).manifest
    parts = [("keys", "int8", 16), ("key_scales", "float32", 1), ("values", "int8", 16), ("value_scales", "float32", 1)]
    kinds = [("ring", WINDOW + 3), ("full", 16), ("ring", WINDOW + 3)]
    assert [(s.name, s.kind, s.rows, s.dtype, s.row_shape) for s in manifest.states] == [
        (f"layer_{layer}_{role}", kind, rows, dtype, (2, width))
        for layer, (kind, rows) in enumerate(kinds)
        for role, dtype, width in parts
    ]
    for method in manifest.programs[0].methods.values():
        assert [t.dtype for t in method.inputs[2:]] == [s.dtype for s in manifest.states]
        assert list(method.mutates) == [s.name for s in manifest.states]
    assert "llama::custom_quantized_sdpa.out" in manifest.programs[0].operators
    assert "quantized_decomposed::dequantize_per_token.out" not in manifest.programs[0].operators
    assert manifest.cache.dtype == "int8" and manifest.is_quantized and not manifest.program.rounded


def test_the_file_is_what_its_manifest_says(int8_cache_bundle: Path) -> None:
    recorded = read_bundle(int8_cache_bundle).manifest.graph_checks
    again = inspect(int8_cache_bundle).lowered
    assert [c for c in again if not c.passed] == []
    rows = [c.evidence for c in recorded if c.name == "writes_land_on_their_rows"]
    assert len(rows) == 2 and all(line.startswith("12 states played") for line in rows)


def test_a_bare_file_is_held_to_a_contract_with_int8_layers(int8_cache_bundle: Path) -> None:
    ring = LayerForm(kind="ring", row_shape=(2, 16), rows=WINDOW + 3, dtype="int8")
    full = LayerForm(kind="full", row_shape=(2, 16), dtype="int8")
    form = ProgramForm(
        max_context_length=CONTEXT, max_prefill_chunk=CHUNK, vocab_size=260, layers=(ring, full, ring)
    )  # fmt: skip
    assert inspect(int8_cache_bundle / "model.pte", ContractFile(program=form)).passed


def test_a_program_plans_no_copy_of_the_rows(int8_cache_bundle: Path) -> None:
    """Keys or values of one layer in float, of all the context's rows, would be ten times what `main` plans."""
    (description,) = inspect(int8_cache_bundle).descriptions
    planned = next(function.planned_bytes for function in description.functions if function.name == "main")
    copy = 2 * CONTEXT * 2 * 16 * 4
    assert planned is not None
    document = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    assert planned < copy / 10
    assert f"`main` of the tests' tiny Gemma plans {planned:,} bytes" in document


def test_the_program_is_its_eager_model_up_to_borderline_roundings(int8_cache_bundle: Path) -> None:
    """Measured over 14 turns of the rings: KL divergence 1e-6 where chunks are multiplied in float32, 8e-6 in bfloat16;
    int8 itself costs 4e-5."""
    ours, floats, baseline = compared_with_eager(int8_cache_bundle)
    assert 0 < baseline.mean_kl_divergence < 1e-4
    assert ours.mean_kl_divergence < 0.2 * baseline.mean_kl_divergence + 1e-5
    assert floats.mean_kl_divergence < 1.5 * baseline.mean_kl_divergence
    assert ours.max_state_difference is not None and floats.max_state_difference is not None


def test_the_first_rows_are_eagers_to_the_bit(int8_cache_bundle: Path) -> None:
    """Layer 0 hears no earlier layer: its integers are those of eager wherever no value is borderline."""
    session = runtime_ref.load(int8_cache_bundle)
    eager = eager_over(session.manifest, int8_cache_bundle)
    start = 0
    for piece in PIECES:
        part = ids_of(CONTEXT)[start : start + piece]
        start += piece
        session.prefill(part, piece)
        eager.prefill(part, piece)
        for ours, theirs in zip(session.state.tensors[:4], eager.state.tensors[:4], strict=True):
            if ours.dtype == torch.int8:
                difference = (ours.int() - theirs.int()).abs()
                assert difference.max() <= 1 and difference.count_nonzero() <= 2
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_the_export_recorded_what_int8_costs(int8_cache_bundle: Path) -> None:
    recorded = {c.reference: c for c in read_bundle(int8_cache_bundle).manifest.verification}
    assert set(recorded) == {
        verification.TRANSFORMERS, verification.EAGER, verification.FLOAT, verification.BASELINE, verification.LAYERS
    }  # fmt: skip
    assert 0 < recorded[verification.BASELINE].mean_kl_divergence < 1e-4
    (again,) = pipeline.verify_bundle(int8_cache_bundle, None, Progress.silent())
    assert again.reference == verification.RECORDED and again.mean_kl_divergence > 0


def test_verification_refuses_a_config_with_another_cache(int8_cache_bundle: Path) -> None:
    assert_another_cache_is_refused(int8_cache_bundle, "int8")


@pytest.mark.parametrize("name", INT8_BUNDLES)
def test_what_was_never_written_is_never_read(request: pytest.FixtureRequest, name: str) -> None:
    """NaN for every scale of a fresh state, and integers that no row holds."""
    for clean, poisoned in clean_and_poisoned(request.getfixturevalue(name), integer=-128):
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=1e-2)  # a borderline integer at most
        assert torch.isfinite(poisoned).all()


@pytest.mark.parametrize("name", INT8_BUNDLES)
def test_a_conversation_rewinds_forks_and_is_saved(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    assert_rewinds_forks_and_is_saved(request.getfixturevalue(name), tmp_path)
