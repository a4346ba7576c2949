"""``runtime_ref bench`` on a bundle: what it says is what a stopwatch and the files say."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import GEMMA, write_checkpoint
from executorch.extension.pybindings import portable_lib

import runtime_ref
from exporter.bundle import read_bundle
from exporter.errors import BundleError, ConfigError, RuntimeLimitError
from runtime_ref.__main__ import main
from runtime_ref.bench import DECODED, bandwidth, bench, english_tokens, token_bytes
from runtime_ref.tokenizer import Tokenizer


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(scope="module", autouse=True)
def pools_as_they_were() -> Iterator[None]:
    """`bench` sizes the pools of the whole process."""
    before, pool = torch.get_num_threads(), portable_lib._threadpool_get_thread_count()
    yield
    torch.set_num_threads(before)
    portable_lib._unsafe_reset_threadpool(pool)


@pytest.fixture(scope="module")
def measured(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    argv = ("--bundle", tiny_bundle, "--threads", 1, "--prefills", "100,20", "--contexts", "50,20", "--json", file)
    assert run("bench", *argv) == 0
    return json.loads(file.read_text())


def test_every_length_has_its_prefill_and_those_asked_for_decode(measured: dict) -> None:
    assert [length["tokens"] for length in measured["lengths"]] == [20, 50, 100]
    assert [length["decode"] is not None for length in measured["lengths"]] == [True, True, False]
    assert all(length["prefill"] > 0 for length in measured["lengths"])
    assert 0 < measured["load_seconds"] < measured["first_token_seconds"] < 60


def test_bytes_are_those_of_the_file_and_of_the_rows_in_use(measured: dict, tiny_bundle: Path) -> None:
    assert measured["program_bytes"] == (tiny_bundle / "model.pte").stat().st_size == measured["token_bytes"]
    session = runtime_ref.load(tiny_bundle)
    row = {spec.name: spec.bytes(1) for spec in session.manifest.states}
    for length in measured["lengths"]:
        rows = {s.name: min(length["tokens"], s.rows if s.kind == "ring" else 10**9) for s in session.manifest.states}
        assert length["live_bytes"] == sum(rows[name] * row[name] for name in row)
        moved = measured["token_bytes"] + length["live_bytes"]
        assert length["limit"] == pytest.approx(measured["bandwidth"] / moved)
    assert 0 < measured["bare_bytes"] < measured["peak_bytes"]
    peaks = [length["peak_bytes"] for length in measured["lengths"]]
    assert peaks == sorted(peaks) and peaks[-1] <= measured["peak_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the parts")
def test_what_was_written_is_told_from_pages_of_files(
    measured: dict, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for parts, most in [(measured["bare"], measured["bare_bytes"])] + [
        (length["resident"], length["peak_bytes"]) for length in measured["lengths"]
    ]:
        assert parts["anonymous"] > 0 and parts["file"] > 0
        assert parts["anonymous"] + parts["file"] <= most + 2**20
    assert run("bench", "--bundle", tiny_bundle, "--no-nll", "--prefills", 20, "--contexts", 20) == 0
    out = capsys.readouterr().out
    assert "anonymous" in out and "file pages" in out


def test_the_likelihood_is_that_of_the_text_one_token_at_a_time(measured: dict, tiny_bundle: Path) -> None:
    session = runtime_ref.load(tiny_bundle)
    limit = session.manifest.max_context_length - DECODED
    ids = english_tokens(read_bundle(tiny_bundle))[:limit]
    logits, total = session.prefill(ids[: limit // 2]), 0.0
    for token in ids[limit // 2 :]:
        total -= float(torch.log_softmax(logits.double(), 0)[token])
        logits = session.decode(token)
    assert measured["scored"] == limit - limit // 2
    assert measured["nll"] == pytest.approx(total / measured["scored"], abs=1e-5)


def test_what_the_export_recorded_is_said_as_recorded(
    measured: dict, tiny_bundle: Path, int8_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A float program is held to its eager model alone.
    (own,) = read_bundle(tiny_bundle).manifest.of("executorch").verification
    assert (measured["export_kl"], measured["export_positions"]) == (own.mean_kl_divergence, own.positions)
    assert run("bench", "--bundle", int8_bundle, "--no-nll", "--prefills", 20, "--contexts", 20) == 0
    (recorded,) = [c for c in read_bundle(int8_bundle).manifest.verification if c.reference == "float eager"]
    said = next(line for line in capsys.readouterr().out.splitlines() if "recorded at export" in line)
    assert f"{recorded.mean_kl_divergence:.4f} over {recorded.positions} tokens" in said


def test_who_watches_sees_the_row_of_every_scored_token(tiny_bundle: Path, measured: dict) -> None:
    bundle = read_bundle(tiny_bundle)
    ids = english_tokens(bundle)
    rows: list[torch.Tensor] = []
    bench(bundle, ids, threads=1, prefills=[20], contexts=[20], watch=lambda row: rows.append(row.clone()))
    limit = bundle.manifest.max_context_length - DECODED
    true = torch.tensor(ids[limit // 2 : limit])
    loss = torch.nn.functional.cross_entropy(torch.stack(rows).double(), true)
    assert measured["nll"] == pytest.approx(float(loss), abs=1e-5)


def test_an_untied_head_does_not_read_its_embedding(llama_bundle: Path) -> None:
    bundle = read_bundle(llama_bundle)
    model = bundle.manifest.model
    expected = (llama_bundle / "model.pte").stat().st_size - 4 * model.vocab_size * model.hidden_size
    assert token_bytes(bundle) == expected


ONE_LAYER = {**GEMMA, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("name", "grids", "unread"),
    [
        # A row of 64: a byte each and two groups' float16 scales; 8 rows are multiplied.
        ("exact", {"embedding": "int8_grouped", "head": "int4", "head_exact_rows": 99}, (260 - 8) * 68),
        ("beside", {"embedding": "int8"}, 260 * (64 + 4)),
    ],
)
def test_of_a_tied_table_what_only_the_embedding_gathers_is_not_read(
    exported: Callable[..., Path], once: Callable[..., Path], name: str, grids: dict, unread: int
) -> None:
    checkpoint = once("one_layer", lambda folder: write_checkpoint(folder, ONE_LAYER))
    directory = exported(checkpoint, f"bytes_{name}", executorch={"quantization": grids})
    bundle = read_bundle(directory)
    assert (bundle.manifest.model.vocab_size, bundle.manifest.model.hidden_size) == (260, 64)
    assert token_bytes(bundle) == (directory / "model.pte").stat().st_size - unread


def test_a_package_of_several_files_is_measured_whole(coreml_bundle: Path) -> None:
    found = bench(read_bundle(coreml_bundle), [5, 6, 7], threads=1, prefills=[20], contexts=[20], scoring=False)
    files = [file for file in (coreml_bundle / "model.mlpackage").rglob("*") if file.is_file()]
    assert len(files) > 1 and found.program_bytes == sum(file.stat().st_size for file in files)
    assert (found.format, found.weights, found.nll) == ("coreml", "int8", None)


def test_by_default_the_usual_lengths_that_fit(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--bundle", tiny_bundle, "--no-nll") == 0
    assert "not measured" in (out := capsys.readouterr().out)
    assert " 128 " in out and " 512 " not in out  # the context is 160


def test_the_bandwidth_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    assert bandwidth(before + 1) > 1e8
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        ({"threads": 0}, ConfigError, "expected 1 to "),
        ({"contexts": []}, ConfigError, "positive"),
        ({"prefills": [0]}, ConfigError, "positive"),
        ({"contexts": [129]}, RuntimeLimitError, "at most 128"),
    ],
)
def test_mistakes_are_said_before_the_program_is_loaded(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, mistake: dict, error: type, said: str
) -> None:
    monkeypatch.setattr("runtime_ref.bench.load_program", lambda bundle: pytest.fail("loaded"))
    arguments = {"threads": 1, "contexts": [20], "prefills": [20]} | mistake
    with pytest.raises(error, match=said):
        bench(read_bundle(tiny_bundle), [1, 2, 3], **arguments)


def test_a_json_file_that_cannot_be_is_refused_at_once(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime_ref.bench.bench", lambda *a, **k: pytest.fail("measured"))
    assert run("bench", "--bundle", tiny_bundle, "--json", tmp_path / "none" / "b.json") == 2
    assert "--json" in capsys.readouterr().err


def test_a_broken_tokenizer_is_named_from_the_other_process(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = read_bundle(tiny_bundle)
    elsewhere = type(bundle)(tmp_path, bundle.manifest)
    with pytest.raises(BundleError, match=r"tokenizer\.json") as caught:
        english_tokens(elsewhere)
    with pytest.raises(BundleError) as here:
        Tokenizer(elsewhere)
    assert str(caught.value) == str(here.value)
