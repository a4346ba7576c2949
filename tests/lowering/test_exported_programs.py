"""The `.pte` that ships against the eager model it came from, on every kind of bundle."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CHUNK, CONTEXT, WINDOW
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime

import runtime_ref
from exporter import pipeline, verification
from exporter.backends.executorch import build as pte_build
from exporter.backends.executorch.file import read_pte
from exporter.backends.executorch.share import share_equal_bytes
from exporter.bundle import Bundle, read_bundle
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.errors import RuntimeLimitError, VerificationError
from exporter.grids.base import Stored
from exporter.model.decoder import Decoder
from exporter.model.mlp import gelu_tanh
from exporter.programs import trace
from exporter.progress import Progress
from exporter.quantization.gptq import Gptq
from exporter.source import open_source, program_decoder, target_decoder
from exporter.spec import PROGRAMS, Comparison, GridSpec
from exporter.verification import judge
from runtime_ref.session import Session

FLOAT_BUNDLES = ("tiny_bundle", "slack_bundle", "llama_bundle")
QUANTIZED_BUNDLES = ("int8_bundle", "int4_bundle", "mixed_bundle")
# Measured on these models: logits up to 30 differ by 2e-5 at most, states by 1e-5.
LOGITS, STATES = 1e-4, 5e-5
# Chunks of every length, longer than the window too, that straddle the ring's end, over 19 windows.
PIECES = [1, 1, 2, 7, 8, 9, 20, CHUNK, 1, 1, 3, 17, 1, 5, 11, 1, 13, 2, 1, 16]


def sessions(bundle: Path) -> tuple[Session, Session]:
    """The shipped program, and the eager decoder it was traced from on plain caches."""
    source = open_source(load_config(bundle.with_suffix(".yaml")))
    manifest = read_bundle(bundle).manifest
    decoder = program_decoder(source, "executorch", bundle, manifest.tokenizer, Progress.silent())
    return runtime_ref.load(bundle), verification.eager_session(manifest, decoder.with_kernels(PlainKernels()))


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


CALLS = verification.Calls(random_ids(CONTEXT), PIECES)


@pytest.mark.parametrize("name", FLOAT_BUNDLES)
def test_every_call_and_every_row_of_state_is_eagers(request: pytest.FixtureRequest, name: str) -> None:
    session, eager = sessions(request.getfixturevalue(name))
    assert sum(PIECES) == CONTEXT == 20 * WINDOW  # the declared maximum runs
    program, plain = (verification.run(one, CALLS) for one in (session, eager))
    (result,) = verification.compare_with_eager(program, plain, plain)
    assert result.max_abs_difference < LOGITS
    assert result.max_state_difference is not None and result.max_state_difference < STATES
    assert result.argmax_agreement == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_random_splits_give_token_by_token_logits(tiny_bundle: Path, seed: int) -> None:
    ids, rng = random_ids(90, seed), random.Random(seed)
    stepped, split = runtime_ref.load(tiny_bundle), runtime_ref.load(tiny_bundle)
    want: dict[int, torch.Tensor] = {}
    stepped.observer = want.__setitem__
    stepped.prefill(ids, 1)
    got: dict[int, torch.Tensor] = {}
    split.observer = got.__setitem__
    start = 0
    while start < len(ids):
        size = rng.randint(1, CHUNK)
        split.prefill(ids[start : start + size], min(size, CHUNK))
        start += size
    assert got
    for position, logits in got.items():
        torch.testing.assert_close(logits, want[position], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("name", FLOAT_BUNDLES)
def test_what_was_never_written_is_never_read(request: pytest.FixtureRequest, name: str) -> None:
    """NaN in every row of a fresh state, as in memory nobody cleared."""
    bundle = request.getfixturevalue(name)
    clean, poisoned = runtime_ref.load(bundle), runtime_ref.load(bundle)
    poisoned.state.ensure_rows(60)
    clean.state.ensure_rows(60)
    for tensor in poisoned.state.tensors:
        tensor.fill_(torch.nan)
    ids = random_ids(60)
    start = 0
    for size in (1, 1, 2, 3, 1, 20, 1, 30, 1):
        part = ids[start : start + size]
        start += size
        assert torch.equal(poisoned.prefill(part, size), clean.prefill(part, size))


def test_the_program_of_main_refuses_a_chunk_and_prefill_a_single_token(tiny_bundle: Path) -> None:
    session = runtime_ref.load(tiny_bundle)
    positions = torch.arange(5)[None]
    for method, count in (("main", 2), ("prefill", 1)):
        with pytest.raises(RuntimeLimitError, match=r"through `(prefill|main)`"):
            session.program.run(method, torch.zeros(1, count, dtype=torch.int64), positions, session.state.tensors)


@pytest.mark.parametrize("name", QUANTIZED_BUNDLES)
def test_quantised_programs_equal_eager_until_a_rounding_differs(request: pytest.FixtureRequest, name: str) -> None:
    """These tokens meet no borderline value: the same integers on both sides, so float accuracy."""
    session, eager = sessions(request.getfixturevalue(name))
    for token in range(4, 256, 16):
        session.reset()
        eager.reset()
        torch.testing.assert_close(session.decode(token), eager.decode(token), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("name", QUANTIZED_BUNDLES)
def test_quantised_programs_lose_no_more_than_quantised_eager(request: pytest.FixtureRequest, name: str) -> None:
    bundle = request.getfixturevalue(name)
    recorded = {c.reference: c for c in read_bundle(bundle).manifest.verification}
    assert set(recorded) == {
        verification.TRANSFORMERS, verification.EAGER, verification.FLOAT, verification.BASELINE, verification.LAYERS
    }  # fmt: skip
    baseline, floats = (recorded[one].mean_kl_divergence for one in (verification.BASELINE, verification.FLOAT))
    assert 0 < baseline < 0.05 and floats < 1.1 * baseline  # measured: 0.0355, and equal to two digits
    state = recorded[verification.EAGER].max_state_error
    assert state is not None and state < 0.02  # borderline values are rounded apart: one step of a row, 0.0091


@pytest.mark.parametrize("name", (*FLOAT_BUNDLES, *QUANTIZED_BUNDLES))
def test_nothing_is_left_to_share(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    path = request.getfixturevalue(name) / "model.pte"
    data = path.read_bytes()
    share_equal_bytes(path, tmp_path / "model.pte")
    assert (tmp_path / "model.pte").read_bytes() == data


def test_a_tied_matrix_is_one_place_in_the_file(tiny_bundle: Path) -> None:
    data = (tiny_bundle / "model.pte").read_bytes()
    file = read_pte(data)
    table = 260 * 64 * 4
    embedding = [blob for blob in file.constants.values() if blob.size == table]
    head = [blob for blob in file.named if blob.size == table]
    assert len(embedding) == len(head) == 1
    assert embedding[0].offset == head[0].offset


def test_a_tied_table_of_eight_bits_stands_beside_the_head_of_four(mixed_bundle: Path) -> None:
    """The embedding's rows, which are the exact ones too, once; the head's nibbles, which XNNPACK packs."""
    manifest = read_bundle(mixed_bundle).manifest
    assert manifest.program.options["quantization"]["head_exact_rows"] == 8
    assert "head int4 with 8 exact rows" in manifest.program.weights
    file = read_pte((mixed_bundle / "model.pte").read_bytes())
    sizes = [blob.size for blob in file.constants.values()]
    assert sizes.count(260 * 64) == 1 and sizes.count(260 * 2 * 2) == 1, "codes, and float16 scales of two groups a row"
    assert [blob.size for blob in file.named].count(260 * 32) == 1


def test_the_manifest_says_what_the_bundle_is(slack_bundle: Path) -> None:
    manifest = read_bundle(slack_bundle).manifest
    assert [(s.name, s.kind, s.rows, s.max_rows, s.window) for s in manifest.states] == [
        ("layer_0_keys", "ring", WINDOW + 3, WINDOW + 3, WINDOW),
        ("layer_0_values", "ring", WINDOW + 3, WINDOW + 3, WINDOW),
        ("layer_1_keys", "full", 16, CONTEXT, None),
        ("layer_1_values", "full", 16, CONTEXT, None),
        ("layer_2_keys", "ring", WINDOW + 3, WINDOW + 3, WINDOW),
        ("layer_2_values", "ring", WINDOW + 3, WINDOW + 3, WINDOW),
    ]
    methods = manifest.programs[0].methods
    assert methods["prefill"].dims == {"query_len": (2, CHUNK), "seq_len": (2, CONTEXT), "rows": (2, CONTEXT)}
    assert methods["main"].dims == {"seq_len": (1, CONTEXT), "rows": (2, CONTEXT)}
    assert methods["main"].inputs[0].shape == (1, 1)
    assert methods["prefill"].inputs[4].shape == (1, "rows", 2, 16)
    assert {check.program for check in manifest.graph_checks} == {"prefill", "main", "main+prefill"}
    assert manifest.versions["executorch"] == "1.5.1"
    assert set(manifest.files) >= {"model.pte", "reference.safetensors", "tokenizer/tokenizer.json"}


def test_global_layers_grow_by_the_named_policy_and_rings_never(slack_bundle: Path) -> None:
    session = runtime_ref.load(slack_bundle)
    rows = []
    for _ in range(50):
        session.decode(65)
        rows.append(session.state.tensors[2].shape[1])
        assert session.state.tensors[0].shape[1] == WINDOW + 3
    assert sorted(set(rows)) == [16, 24, 36, 54]


@pytest.mark.parametrize("name", FLOAT_BUNDLES)
def test_growing_changes_no_bit(request: pytest.FixtureRequest, name: str) -> None:
    """Global layers that start small and grow, beside the whole context allocated at once."""
    bundle = request.getfixturevalue(name)
    growing, whole = runtime_ref.load(bundle), runtime_ref.load(bundle)
    whole.state.ensure_rows(CONTEXT)
    for token in random_ids(80):
        assert torch.equal(growing.decode(token), whole.decode(token))
    assert growing.state.growths and growing.state.tensors[2].shape[1] < CONTEXT == whole.state.tensors[2].shape[1]
    for spec, ours, theirs in zip(growing.manifest.states, growing.state.tensors, whole.state.tensors, strict=True):
        rows = min(80, ours.shape[1])
        assert torch.equal(ours[:, :rows], theirs[:, :rows]), spec.name


@pytest.mark.parametrize("name", FLOAT_BUNDLES)
def test_no_memory_is_planned_for_a_state(request: pytest.FixtureRequest, name: str) -> None:
    """They are the caller's: a method's own memory is smaller than any one global layer's rows."""
    bundle = request.getfixturevalue(name)
    manifest = read_bundle(bundle).manifest
    smallest = min(state.bytes(state.max_rows) for state in manifest.states if state.kind == "full")
    assert read_pte((bundle / "model.pte").read_bytes()).plans["main"].planned_bytes < smallest / 2


def test_a_program_with_other_weights_is_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verification fails the export, and nothing is left of it."""
    original = pte_build.lower

    def with_another_norm(programs: object, path: Path) -> None:
        source = open_source(load_config(tiny_bundle.with_suffix(".yaml")))
        decoder = target_decoder(source, "executorch", Progress.silent())
        decoder.norm.weight.mul_(1.01)
        original({name: trace(decoder, kind, source.limits) for name, kind in PROGRAMS.items()}, path)

    monkeypatch.setattr(pte_build, "lower", with_another_norm)
    with pytest.raises(VerificationError, match="eager"):
        pipeline.export(load_config(tiny_bundle.with_suffix(".yaml")), tmp_path / "out", Progress.silent())
    assert not list(tmp_path.iterdir())


def test_a_broken_quantiser_is_refused_though_the_program_is_its_eager_model(
    int8_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scales half as large again: a bound that follows from the eager model's own divergence would be met."""
    rounded, compare, seen = Gptq.store, verification.compare_with_eager, []

    def scaled(self: Gptq, weight: torch.Tensor, kept: GridSpec) -> Stored:
        stored = rounded(self, weight, kept)
        assert stored.scales is not None
        return replace(stored, scales=1.5 * stored.scales)

    def spy(*runs: verification.Run) -> list[Comparison]:
        seen.extend(compare(*runs))
        return seen

    monkeypatch.setattr(Gptq, "store", scaled)
    monkeypatch.setattr(verification, "compare_with_eager", spy)
    with pytest.raises(VerificationError, match=r"against float eager: got mean KL divergence"):
        pipeline.export(load_config(int8_bundle.with_suffix(".yaml")), tmp_path / "out", Progress.silent())
    assert not list(tmp_path.iterdir())
    named = {comparison.reference: comparison for comparison in seen}
    judge([named[verification.EAGER]], read_bundle(int8_bundle).manifest)
    baseline, floats = (named[one].mean_kl_divergence for one in (verification.BASELINE, verification.FLOAT))
    assert floats <= 2 * baseline + 0.02


@pytest.fixture(scope="module")
def int8_eager(int8_bundle: Path) -> tuple[Decoder, verification.Run, verification.Run]:
    """The decoder of that bundle, and what it and the float model make of CALLS."""
    source = open_source(load_config(int8_bundle.with_suffix(".yaml")))
    manifest = read_bundle(int8_bundle).manifest
    decoder = program_decoder(source, "executorch", int8_bundle, manifest.tokenizer, Progress.silent())
    plain = decoder.with_kernels(PlainKernels())
    eager = verification.run_by_layers(manifest, plain, CALLS)
    return decoder, *verification.eager_runs(manifest, eager, source.checkpoint, CALLS, Progress.silent())


@pytest.mark.parametrize("fault", [None, "swapped", "mixer.v_proj", "feed_forward.gate_proj"])
def test_a_file_with_other_bytes_in_one_layer_is_refused(
    int8_bundle: Path, int8_eager: tuple[Decoder, verification.Run, verification.Run], tmp_path: Path, fault: str | None
) -> None:
    """Scales of one linear three times as large, or the integers of two layers in each other's place. (Scales of the
    others of a layer change nothing: a norm follows.)"""
    decoder, eager, original = int8_eager
    data, manifest = (int8_bundle / "model.pte").read_bytes(), read_bundle(int8_bundle).manifest

    def replaced(data: bytes, old: torch.Tensor, new: torch.Tensor) -> bytes:
        assert data.count(old.numpy().tobytes()) == 1
        return data.replace(old.numpy().tobytes(), new.numpy().tobytes())

    if fault == "swapped":
        first, other = (decoder.get_submodule(f"layers.{n}.feed_forward.gate_proj").weight for n in (0, 1))
        data = replaced(replaced(replaced(data, first, -first), other, first), -first, other)
    elif fault is not None:
        scales = decoder.get_submodule(f"layers.1.{fault}").scales
        data = replaced(data, scales, 3 * scales)
    (tmp_path / "model.pte").write_bytes(data)
    session = verification.open_session(Bundle(tmp_path, manifest))
    comparisons = verification.compare_with_eager(verification.run(session, CALLS), eager, original)
    if fault is None:
        judge(comparisons, manifest)
        return
    with pytest.raises(VerificationError, match=r"against eager: got (mean KL divergence|error of a row of state)"):
        judge(comparisons, manifest)


def test_gelus_tanh_form_is_lowered_as_itself() -> None:
    """ExecuTorch 1.5.1's XNNPACK partitioner computes the erf form of ``aten.gelu(approximate="tanh")``."""
    x = torch.linspace(-6, 6, 1001)[None]
    want = x.double() / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)))

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gelu_tanh(x)

    program = torch.export.export(Module(), (x,))
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    method = loaded.load_method("forward")
    assert method is not None
    torch.testing.assert_close(method.execute([x])[0].double(), want, atol=2e-6, rtol=0)
    assert (torch.nn.functional.gelu(x).double() - want).abs().max() > 4e-4  # the forms do differ
