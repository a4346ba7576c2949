"""A `.pte` over float16 rings and int8 caches of global layers; int8 programs of either layout on either kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_programs import assert_another_cache_is_refused, compared_with_eager
from conftest import WINDOW
from test_ring_shapes import CONTEXT, SPLITS, Lowered
from tiny_models import GLOBAL, SLIDING, CacheDType, attention, decoder_of, model, states_of, token_ids

from exporter.backends.executorch.options import AttentionKernels
from exporter.backends.executorch.runtime import PteProgram
from exporter.bundle import read_bundle
from exporter.cache.plain import PlainKernels
from exporter.inspection import inspect

OPERATOR = "llama::custom_quantized_sdpa.out"
DECODING = "quantized_decomposed::dequantize_per_token.out"


def test_the_bundle_says_what_it_is(int8_global_cache_bundle: Path) -> None:
    manifest = read_bundle(int8_global_cache_bundle).manifest
    assert (manifest.cache.dtype, manifest.cache.global_dtype) == ("float16", "int8")
    ring, full = [("ring", WINDOW + 3, "float16")] * 2, [("full", 16, "int8"), ("full", 16, "float32")] * 2
    assert [(s.kind, s.rows, s.dtype) for s in manifest.states] == [*ring, *full, *ring]
    assert {OPERATOR, "llama::custom_sdpa.out"} <= set(manifest.programs[0].operators)
    assert DECODING not in manifest.programs[0].operators


def test_the_file_is_what_its_manifest_says(int8_global_cache_bundle: Path) -> None:
    assert [check for check in inspect(int8_global_cache_bundle).lowered if not check.passed] == []


def test_the_program_is_its_eager_model_up_to_borderline_roundings(int8_global_cache_bundle: Path) -> None:
    """Measured: KL divergence 7e-6 where chunks are multiplied in bfloat16; the caches' own rounding costs as much."""
    ours, floats, baseline = compared_with_eager(int8_global_cache_bundle)
    assert 0 < baseline.mean_kl_divergence < 1e-4
    assert ours.mean_kl_divergence < 0.2 * baseline.mean_kl_divergence + 1e-5
    assert floats.mean_kl_divergence < 1.5 * baseline.mean_kl_divergence + 1e-5


def test_verification_refuses_a_config_with_another_cache(int8_global_cache_bundle: Path) -> None:
    assert_another_cache_is_refused(int8_global_cache_bundle, r"float16 \(global layers int8\)")


@pytest.mark.parametrize(
    ("layout", "dtype", "global_dtype"),
    [("ring", "int8", None), ("stock", "int8", None), ("ring", "float16", "int8"), ("stock", "int8", "float32")],
)
def test_either_layout_is_eager_on_either_kernels_over_windows_around_the_ring(
    layout: AttentionKernels, dtype: CacheDType, global_dtype: CacheDType | None, tmp_path: Path
) -> None:
    """From states of NaN to the last token of the context; a borderline integer may fall the other way."""
    decoder = decoder_of(
        model(SLIDING, attention(1), GLOBAL), kernels="executorch" if layout == "ring" else layout, slack=3,
        context=CONTEXT, dtype=dtype, global_dtype=global_dtype,
    )  # fmt: skip
    lowered = Lowered(decoder, tmp_path, layout)
    assert lowered.failed == []
    reads, decodes = (name.removesuffix(".out").encode() in lowered.file.read_bytes() for name in (OPERATOR, DECODING))
    assert (reads, decodes) == (layout == "ring", layout == "stock")
    plain, ids = decoder.with_kernels(PlainKernels()), token_ids(CONTEXT)
    for kernels in ("ring", "stock"):
        lowered.program = PteProgram(lowered.file, kernels)
        states = states_of(decoder, torch.nan)
        for splits in SPLITS[:2]:
            for length, offset, ours, eager in lowered.beside(plain, ids, splits, states, states_of(decoder)):
                error = float((ours - eager).abs().max() / eager.abs().max())
                print(f"{layout} {kernels} {dtype} {length}: {error:.1e}")
                assert error < 2e-2, (kernels, length, offset)
