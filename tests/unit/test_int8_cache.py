"""The int8 cache beyond what `test_cache` holds both forms to: its quantiser, its error, its bytes, its sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import int8_rows
from recipes import recipe_of
from tiny_models import (
    CONV,
    GLOBAL,
    KERNELS,
    SLIDING,
    SPECS,
    CacheDType,
    attention,
    decoder_of,
    kernels_named,
    model,
    one_thread,  # noqa: F401
    play,
    states_of,
    token_ids,
)
from toy import toy_manifest

from exporter import runs, verify
from exporter.cache.storage import quantize_rows
from exporter.config import CONFIG, CheckpointConfig
from exporter.errors import BundleError, VerificationError
from exporter.plan import growths, model_states
from exporter.spec import CachePolicy, Comparison, ModelSpec, QuantizationSpec, state_specs
from runtime_ref.session import Session

CONTEXT = 192
MIXED = model(SLIDING, GLOBAL)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 2**20), width=st.sampled_from([1, 8, 64]), size=st.sampled_from([1e-40, 1e-6, 1.0, 1e30]))
def test_the_quantiser_is_its_definition(seed: int, width: int, size: float) -> None:
    rows = torch.randn(1, 5, 3, width, generator=torch.Generator().manual_seed(seed)) * size
    rows[0, 0, 0] = 0.0
    integers, scales = quantize_rows(rows)
    want, want_scales = int8_rows(rows)
    assert integers.dtype == torch.int8 and torch.equal(integers, want)
    assert scales.dtype == torch.float32 and torch.equal(scales, want_scales)
    assert not integers[0, 0, 0].any() and integers.abs().max() <= 127
    # A quotient just short of a half may round up: a few float32 roundings of 127 beyond half a step.
    assert bool(((integers * scales - rows).abs() <= scales * (0.5 + 127 * 2e-7)).all())


@pytest.mark.parametrize("kernels", KERNELS)
def test_decoding_is_integer_times_scale(kernels: str) -> None:
    keys, values = torch.randn(2, 1, 9, 2, 16)
    full = kernels_named(kernels).full([torch.zeros(1, 9, 2, 16, dtype=torch.int8), torch.zeros(1, 9, 2, 1)] * 2)
    encoded = full.encode(keys, values)
    kept = [tensor.clone() for tensor in encoded]
    decoded = (
        kernels_named(kernels).storage(kept).decode(kernels_named(kernels).full(kept).update_and_fetch(encoded, 0))
    )
    assert all(torch.equal(rows, kept[2 * i] * kept[2 * i + 1]) for i, rows in enumerate(decoded))


def test_the_plan_of_an_int8_cache() -> None:
    """Scales stand behind what they scale, and everything of a layer has its kind, rows and window."""
    spec = model(SLIDING, attention(None, num_key_value_heads=1), CONV)
    states = state_specs(spec, CachePolicy(dtype="int8", ring_slack=2), CONTEXT)
    assert [(s.name, s.role, s.dtype, s.row_shape, s.row_bytes, s.scales) for s in states] == [
        ("layer_0_keys", "keys", "int8", (2, 16), 32, "layer_0_key_scales"),
        ("layer_0_key_scales", "key_scales", "float32", (2, 1), 8, None),
        ("layer_0_values", "values", "int8", (2, 16), 32, "layer_0_value_scales"),
        ("layer_0_value_scales", "value_scales", "float32", (2, 1), 8, None),
        ("layer_1_keys", "keys", "int8", (1, 16), 16, "layer_1_key_scales"),
        ("layer_1_key_scales", "key_scales", "float32", (1, 1), 4, None),
        ("layer_1_values", "values", "int8", (1, 16), 16, "layer_1_value_scales"),
        ("layer_1_value_scales", "value_scales", "float32", (1, 1), 4, None),
        ("layer_2_inputs", "inputs", "float32", (64,), 256, None),
    ]
    assert {(s.kind, s.rows, s.max_rows, s.window) for s in states[:4]} == {("ring", 10, 10, 8)}
    assert {(s.kind, s.rows, s.max_rows, s.window) for s in states[4:8]} == {("full", 64, CONTEXT, None)}
    tokens = {grown.kind: grown.full for grown in growths(model_states(spec, CachePolicy(dtype="int8")))}
    assert tokens == {"sliding": 2 * 2 * (16 + 4), "global": 2 * 1 * (16 + 4), "conv": 0}


def test_global_layers_may_have_a_dtype_of_their_own() -> None:
    spec = model(SLIDING, GLOBAL, CONV)
    states = state_specs(spec, CachePolicy(dtype="float16", global_dtype="int8"), CONTEXT)
    by_layer = [[s.dtype for s in states if s.layers == (layer,)] for layer in range(3)]
    assert by_layer == [["float16"] * 2, ["int8", "float32"] * 2, ["float32"]]
    reverse = state_specs(spec, CachePolicy(dtype="int8", global_dtype="float32"), CONTEXT)
    assert [s.dtype for s in reverse] == ["int8", "float32"] * 2 + ["float32"] * 3
    assert {s.dtype for s in state_specs(spec, CachePolicy(global_dtype="int8"), CONTEXT, "static", "float16")} == {
        "float16"
    }


# Measured with these seeds, token by token over 60 tokens, seven turns of a ring of 8: the largest and the mean
# difference of logits from a float32 cache, in units of the largest logit, and the mean KL divergence.
ERRORS = {
    "all sliding": (3.08e-2, 4.13e-3, 6.19e-4),
    "all global": (3.10e-2, 3.95e-3, 5.60e-4),
    "config T": (7.31e-2, 7.86e-3, 3.32e-3),
    "gemma": (6.69e-3, 1.19e-3, 1.62e-5),
    "sinks and experts": (1.79e-2, 2.75e-3, 2.02e-4),
    "own heads for each kind": (2.25e-2, 3.23e-3, 3.98e-4),
}


def logits_of(spec: ModelSpec, dtype: CacheDType, kernels: str, splits: list[int]) -> torch.Tensor:
    decoder = decoder_of(spec, kernels=kernels, dtype=dtype)
    return torch.stack(list(play(decoder, token_ids(sum(splits)), splits, states_of(decoder, float("nan"))).values()))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ERRORS)
def test_the_error_is_the_measured_one_past_three_turns_of_the_ring(name: str, kernels: str) -> None:
    got, want = (logits_of(SPECS[name], dtype, kernels, [1] * 60) for dtype in ("int8", "float32"))
    differences = verify.Differences("float", "executorch")
    for row, other in zip(got[24:], want[24:], strict=True):
        differences.add(row, other)
    seen, size = differences.comparison(), float(want.abs().max())
    measured = (seen.max_abs_difference / size, seen.mean_abs_difference / size, seen.mean_kl_divergence)
    print(f"{name}, {kernels}: " + ", ".join(f"{value:.2e}" for value in measured))
    assert all(0 < value <= 1.5 * bound for value, bound in zip(measured, ERRORS[name], strict=True)), measured


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("splits", [[60], [5, 7, 1, 20, 1, 1, 9, 8, 2, 6], [2, 3, 40, 1, 14], [8, 8, 8, 1, 16, 19]])
def test_chunks_change_nothing_beyond_float_rounding(splits: list[int], kernels: str) -> None:
    """One layer of each kind, so that no rounding of an integer is met by noise of the layer before."""
    for spec in (model(SLIDING), model(GLOBAL)):
        stepped = logits_of(spec, "int8", kernels, [1] * 60)
        ends = torch.tensor(splits).cumsum(0) - 1
        torch.testing.assert_close(
            logits_of(spec, "int8", kernels, splits), stepped[ends], rtol=0, atol=6e-6 * float(stepped.abs().max())
        )


def session_of(
    spec: ModelSpec = MIXED, dtype: CacheDType = "int8", global_dtype: CacheDType | None = None, slack: int = 3
) -> Session:
    policy = CachePolicy(dtype=dtype, global_dtype=global_dtype, initial_rows=4, ring_slack=slack)
    manifest = (
        toy_manifest(context=CONTEXT, chunk=64)
        .model_copy(update={"model": spec, "cache": policy})
        .with_states(state_specs(spec, policy, CONTEXT))
    )
    return runs.eager_session(
        manifest, decoder_of(spec, slack=slack, initial_rows=4, dtype=dtype, global_dtype=global_dtype)
    )


@pytest.mark.parametrize(("dtype", "global_dtype"), [("int8", None), ("float16", "int8")])
def test_a_session_grows_rewinds_forks_and_comes_back_from_a_file(
    dtype: CacheDType, global_dtype: CacheDType | None, tmp_path: Path
) -> None:
    """Over rings that wrapped seven times; every way of going on gives the very same logits."""
    ids, more = token_ids(60), token_ids(6, seed=2)
    plain = session_of(dtype=dtype, global_dtype=global_dtype)
    first = plain.state.tensors[-4]
    assert first.shape[1] == 4 and first.dtype == torch.int8
    for start in range(0, 60, 20):
        plain.prefill(ids[start : start + 20])
    assert [t.shape[1] for t in plain.state.tensors] == [11] * (4 if dtype == "int8" else 2) + [64] * 4
    plain.save(tmp_path / "talk")
    fork = plain.fork()
    expected = [plain.decode(token) for token in more]

    loaded = session_of(dtype=dtype, global_dtype=global_dtype)
    loaded.load_state(tmp_path / "talk")
    rewound = plain.fork()
    rewound.rewind(3)
    for session, tail in ((fork, more), (loaded, more), (rewound, more[3:])):
        got = [session.decode(token) for token in tail]
        assert all(torch.equal(a, b) for a, b in zip(got, expected[-len(tail) :], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(session.state.tensors, plain.state.tensors, strict=True))
    assert sum(t.nbytes for t in plain.state.tensors) == sum(kind.allocated_bytes for kind in plain.state.memory())


def test_states_are_compared_as_what_they_stand_for() -> None:
    """By name, over float rows: an int8 session with itself, with one whose row differs, and with a float one."""
    ids = token_ids(30)
    first, second, floats = session_of(), session_of(), session_of(dtype="float32")
    for session in (first, second, floats):
        session.prefill(ids, 10)
    assert verify.state_difference(first.state, second.state) == 0.0
    scale = float(second.state.tensors[1][0, 4, 1, 0])
    second.state.tensors[0][0, 4, 1, 3] -= 3
    assert verify.state_difference(first.state, second.state) == pytest.approx(3 * scale, rel=1e-5)
    steps = max(float(first.state.tensors[i].max()) for i in (1, 3, 5, 7))
    assert 0 < verify.state_difference(first.state, floats.state) < 4 * steps


@pytest.mark.parametrize("dtypes", [("int8", None), ("float32", "int8")])
def test_a_manifest_over_float_caches_is_the_same_model(dtypes: tuple[CacheDType, CacheDType | None]) -> None:
    manifest = session_of(MIXED, *dtypes).manifest
    floats = manifest.with_float_caches()
    assert floats.states == session_of(dtype="float32").manifest.states and floats.cache.ring_slack == 3
    assert floats.with_float_caches() == floats
    assert manifest.is_quantized and not floats.is_quantized
    recipe = recipe_of(manifest.model, QuantizationSpec(linear="int8"))
    rounded = floats.program.model_copy(update={"recipe": recipe})
    assert floats.model_copy(update={"programs": (rounded,)}).is_quantized


def test_a_program_over_an_int8_cache_is_judged_by_its_distribution() -> None:
    manifest = session_of().manifest
    far = Comparison(
        format="executorch", reference=verify.EAGER, positions=1, max_abs_difference=9.0, mean_abs_difference=1.0,
        mean_kl_divergence=1.0, argmax_agreement=0.5,
    )  # fmt: skip
    near = far.model_copy(update={"reference": verify.FLOAT, "mean_kl_divergence": 0.03})
    verify.judge([far, near], manifest, 0.01)
    with pytest.raises(VerificationError, match=r"KL divergence <= 0\.02"):
        verify.judge([far, near], manifest, 0.0)
    with pytest.raises(VerificationError, match=r"mean <= 0\.001"):
        verify.judge([near], manifest.with_float_caches(), 0.01)


def test_a_bundle_is_not_compared_with_another_kind_of_cache() -> None:
    manifest = session_of().manifest
    checkpoint = CheckpointConfig(path=Path("toy"))
    same = CONFIG(name="toy", checkpoint=checkpoint, cache=CachePolicy(dtype="int8"))
    verify.check_same_source(manifest, manifest.source, same)
    with pytest.raises(BundleError, match=r"cache.dtype float32 in the config; expected int8"):
        verify.check_same_source(manifest, manifest.source, CONFIG(name="toy", checkpoint=checkpoint))
    mixed = same.model_copy(update={"cache": CachePolicy(dtype="float16", global_dtype="int8")})
    with pytest.raises(BundleError, match=r"cache.dtype float16 \(global layers int8\) in the config; expected int8"):
        verify.check_same_source(manifest, manifest.source, mixed)
