"""A `.pte` over float16 caches against its eager model and the float one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conftest import CHUNK, CONTEXT, WINDOW
from tiny_models import GLOBAL, SLIDING, SPECS, decoder_of, model

import runtime_ref
from exporter import pipeline, runs, verify
from exporter.backends.executorch import program
from exporter.backends.executorch.cache import ExecutorchKernels
from exporter.backends.executorch.lower import lower
from exporter.bundle import read_bundle
from exporter.cache import storage
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.errors import BundleError
from exporter.graph import check_lowered, runtime_registry
from exporter.inspection import inspect
from exporter.programs import METHODS, Limits, trace
from exporter.progress import Progress
from exporter.spec import Manifest
from runtime_ref.session import Session

# Chunks of every kind, over rings of 11 rows, to the end of the context.
PIECES = [1, 1, 2, 7, 8, 9, 20, CHUNK, 1, 1, 3, 17, 1, 5, 11, 1, 13, 2, 1, 16]


def ids_of(count: int) -> list[int]:
    return random.Random(0).choices(range(256), k=count)


def eager_over(manifest: Manifest, bundle: Path) -> Session:
    source = pipeline.open_source(load_config(bundle.with_suffix(".yaml")))
    return runs.eager_session(
        manifest, pipeline.read_decoder(source, manifest.states, PlainKernels(), Progress.silent())
    )


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
    assert manifest.is_quantized and not manifest.quantization.is_quantized


def test_every_check_holds_on_the_traced_programs_and_on_the_file(half_cache_bundle: Path) -> None:
    recorded = read_bundle(half_cache_bundle).manifest.graph_checks
    assert [c for c in (*recorded, *inspect(half_cache_bundle).lowered) if not c.passed] == []


class Widening(ExecutorchKernels):
    """A mutant: attention over a float32 copy of everything allocated."""

    half_rows = storage.HalfRows()


@pytest.mark.parametrize("kernels", [ExecutorchKernels(), Widening()])
def test_a_file_that_widens_whole_states_is_refused(kernels: ExecutorchKernels, tmp_path: Path) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), context=64, dtype="float16").with_kernels(kernels)
    limits = Limits(max_context_length=64, max_prefill_chunk=16)
    path = tmp_path / "model.pte"
    lower({method: trace(decoder, method, limits) for method in METHODS}, path)
    checks = check_lowered(path.read_bytes(), program.graph_contracts(decoder, limits), runtime_registry()[1])
    copies = [c.passed for c in checks if c.name == "no_whole_state_copy"]
    assert copies == [not isinstance(kernels, Widening)] * 2


@pytest.mark.parametrize("name", ["gemma", "sinks and experts", "softcap"])
def test_attention_that_the_operator_lacks_works_over_float16_too(name: str, tmp_path: Path) -> None:
    decoder = decoder_of(SPECS[name], context=64, dtype="float16", kernels="executorch")
    limits = Limits(max_context_length=64, max_prefill_chunk=16)
    path = tmp_path / "model.pte"
    lower({method: trace(decoder, method, limits) for method in METHODS}, path)
    checks = check_lowered(path.read_bytes(), program.graph_contracts(decoder, limits), runtime_registry()[1])
    assert {c.name for c in checks if not c.passed} <= {
        "delegated_share"
    }  # what these models delegate is not the point


def test_the_program_is_its_eager_model_up_to_rounding(half_cache_bundle: Path) -> None:
    """Measured: KL divergence from eager 6e-8, and from the float model what eager's own is, 1e-7."""
    manifest = read_bundle(half_cache_bundle).manifest
    session, eager = runtime_ref.load(half_cache_bundle), eager_over(manifest, half_cache_bundle)
    original = eager_over(manifest.with_float_caches(), half_cache_bundle)
    assert sum(PIECES) == CONTEXT
    calls = runs.Calls(ids_of(CONTEXT), PIECES)
    ours, floats, baseline = verify.compare_with_eager(*(runs.run(one, calls) for one in (session, eager, original)))
    print(ours, floats, baseline)
    assert 0 < baseline.mean_kl_divergence < 5e-7
    assert ours.mean_kl_divergence < 5e-7 and floats.mean_kl_divergence < 5e-7
    assert ours.max_abs_difference < 1e-2


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
    config = load_config(half_cache_bundle.with_suffix(".yaml"), {"cache.dtype": "float32"})
    with pytest.raises(BundleError, match=r"cache\.dtype float32 in the config; expected float16"):
        pipeline.verify_bundle(half_cache_bundle, config, Progress.silent())


def test_what_was_never_written_is_never_read(half_cache_bundle: Path) -> None:
    clean, poisoned = runtime_ref.load(half_cache_bundle), runtime_ref.load(half_cache_bundle)
    for session in (clean, poisoned):
        session.state.ensure_rows(60)
    for tensor in poisoned.state.tensors:
        tensor.fill_(torch.nan)
    ids, start = ids_of(60), 0
    for size in (1, 1, 2, 3, 1, 20, 1, 30, 1):
        part = ids[start : start + size]
        start += size
        torch.testing.assert_close(poisoned.prefill(part, size), clean.prefill(part, size), rtol=0, atol=0)


def test_a_conversation_rewinds_forks_and_is_saved(half_cache_bundle: Path, tmp_path: Path) -> None:
    session = runtime_ref.load(half_cache_bundle)
    session.prefill(ids_of(50), 20)
    session.save(tmp_path / "talk")
    fork, loaded = session.fork(), runtime_ref.load(half_cache_bundle)
    loaded.load_state(tmp_path / "talk")
    expected = [session.decode(token) for token in (1, 2, 3, 4)]
    rewound = session.fork()
    rewound.rewind(2)
    for other, tail in ((fork, (1, 2, 3, 4)), (loaded, (1, 2, 3, 4)), (rewound, (3, 4))):
        for token, want in zip(tail, expected[-len(tail) :], strict=True):
            torch.testing.assert_close(other.decode(token), want, rtol=0, atol=1e-5)
    assert sum(t.nbytes for t in session.state.tensors) == sum(k.allocated_bytes for k in session.state.memory())
