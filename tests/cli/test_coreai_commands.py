"""The commands over a bundle whose program is a Core AI asset."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from conftest import CONTEXT

import runtime_ref
from exporter import optional, pipeline
from exporter.bundle import read_bundle
from exporter.cli.app import main
from runtime_ref.__main__ import main as runtime_main

pytest.importorskip("coreai_torch")


@pytest.fixture(scope="module")
def bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    return exported(tiny_checkpoint, "apple", targets=["coreai"], coreai={"weights": "float32"})


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    """The exit code of ``python -m exporter argv``."""
    monkeypatch.setattr("sys.argv", ["exporter", *[str(part) for part in argv]])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_the_bundle_is_checked_verified_and_laid_out_for_apple(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    assert [program.format for program in manifest.programs] == ["coreai"]
    assert {check.format for check in manifest.graph_checks} == {"coreai"}
    assert all(check.passed for check in manifest.graph_checks)
    of_the_model, comparison = manifest.verification
    assert (of_the_model.reference, of_the_model.format) == ("transformers", None)
    assert comparison.format == "coreai" and comparison.max_abs_difference < 1e-4
    assert comparison.max_state_difference is not None and comparison.max_state_difference < 1e-4
    assert {"model.aimodel/main.mlirb", "metadata.json", "tokenizer/tokenizer.json"} <= set(manifest.files)
    assert {"coreai-core", "coreai-torch", "coreai-opt"} <= set(manifest.versions)


def test_the_metadata_is_that_of_apples_language_bundles(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    assert json.loads((bundle / "metadata.json").read_text()) == {
        "metadata_version": "0.2",
        "kind": "llm",
        "name": "apple",
        "assets": {"main": "model.aimodel"},
        "language": {
            "tokenizer": "tokenizer",
            "embedded_tokenizer": True,
            "vocab_size": manifest.model.vocab_size,
            "max_context_length": CONTEXT,
            "function_map": {"main": ["main"], "prompt": ["prefill"]},
            "states": {
                "globalKeyCache": "kv_cache", "globalValueCache": "kv_cache",
                "slidingKeyCache": "sliding_cache", "slidingValueCache": "sliding_cache",
            },
        },
    }  # fmt: skip


def test_a_session_grows_forks_and_resumes(bundle: Path, tmp_path: Path) -> None:
    session = runtime_ref.load(bundle)
    ids = [5 + i % 60 for i in range(45)]
    session.prefill(ids)
    assert session.state.growths and session.length == 45
    twin = session.fork()
    session.save(tmp_path / "state")
    want = session.decode(7)
    assert twin.decode(7).equal(want)
    resumed = runtime_ref.load(bundle)
    resumed.load_state(tmp_path / "state")
    assert resumed.decode(7).equal(want)


def test_inspect_shows_the_bundle_and_the_asset_alone(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect", bundle) == 0
    assert "weights_stored_once" in capfd.readouterr().out
    assert run(monkeypatch, "inspect", bundle / "model.aimodel") == 0
    printed = capfd.readouterr().out
    assert "slidingKeyCache" in printed and "slice_update" in printed


def test_generate_and_verify_take_it_like_any_other(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        runtime_main(["generate", "--bundle", str(bundle), "--prompt", "Hello", "--max-new-tokens", "4"])
    assert caught.value.code == 0
    assert run(monkeypatch, "verify", bundle) == 0


def test_without_the_packages_the_extra_is_named_before_any_work(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    for module in (optional, pipeline):
        monkeypatch.setattr(module, "version", missing)
    config = shutil.copy(bundle.with_suffix(".yaml"), tmp_path / "apple.yaml")
    assert run(monkeypatch, "export", "--model", config, "--out", tmp_path / "out") == 2
    error = " ".join(capfd.readouterr().err.split())
    assert "no coreai-core" in error and "pip install 'ring-exporter[coreai]'" in error
    assert "Traceback" not in error and "tokenizer" not in error and "trace" not in error
    assert not (tmp_path / "out").exists()
