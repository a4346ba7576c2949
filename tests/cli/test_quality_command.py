"""Promises at export, what `inspect` says of them, and `runtime_ref quality` beside a bundle without quantisation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import write_config
from typer.testing import CliRunner

from exporter import pipeline
from exporter.bundle import read_bundle
from exporter.cli.app import app as exporter_app
from exporter.config import load_config
from exporter.errors import ConfigError, VerificationError
from exporter.progress import Progress
from exporter.quality.domains import DOMAINS
from exporter.spec import QualityPromise
from exporter.verification import promise
from runtime_ref.__main__ import app as runtime_app

TEXTS = [domain.name for domain in DOMAINS if domain.name != "dialogue"]  # the tiny model has no chat template
SMALL = {"executorch": {"quantization": "small"}}
# Of the tiny model: `small` is worst at 0.024, `balanced` at 0.006.
BETWEEN = {
    "accurate": QualityPromise(nll=1.0, kl=0.0098), "balanced": QualityPromise(nll=1.0, kl=0.0099),
    "small": QualityPromise(nll=1.0, kl=0.01),
}  # fmt: skip


def test_an_export_records_what_it_saw_on_every_text(int8_bundle: Path) -> None:
    quality = read_bundle(int8_bundle).manifest.program.quality
    assert quality is not None and quality.preset == "accurate" and not quality.accepted
    assert [one.domain for one in quality.domains] == TEXTS
    assert all(one.positions == 32 and 0 < one.kl < 0.02 and one.nll > 3 for one in quality.domains)
    assert quality.own_text is None and quality.calibration_sha256 is None


def test_floats_promise_nothing(tiny_bundle: Path, half_cache_bundle: Path) -> None:
    for bundle in (tiny_bundle, half_cache_bundle):
        assert read_bundle(bundle).manifest.program.quality is None


def test_a_broken_promise_is_refused_and_says_what_keeps_its_own(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise, "QUALITY_PROMISES", BETWEEN)
    config = write_config(tmp_path / "tiny.yaml", tiny_checkpoint, **SMALL)
    with pytest.raises(VerificationError) as caught:
        pipeline.export(load_config(config), tmp_path / "out", Progress.silent())
    error = caught.value
    assert error.owner == "quality of small" and "mean KL divergence 0.0" in error.got and " nats in " in error.got
    assert any(text in error.got for text in TEXTS)
    assert "up to 0.01" in error.expected and "Take balanced, which keeps its promise here" in error.repair
    assert "`quality: accept`" in error.repair
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_where_no_preset_keeps_its_promise_that_is_said(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        promise, "QUALITY_PROMISES", {name: QualityPromise(nll=1.0, kl=own.kl * 1e-3) for name, own in BETWEEN.items()}
    )
    config = write_config(tmp_path / "tiny.yaml", tiny_checkpoint, executorch={"quantization": "balanced"})
    with pytest.raises(VerificationError, match="No preset keeps its promise here: take none"):
        pipeline.export(load_config(config), tmp_path / "out", Progress.silent())


def test_what_is_accepted_ships_and_says_so(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise, "QUALITY_PROMISES", BETWEEN)
    own = tmp_path / "own.txt"
    own.write_text("The harbour master kept two ledgers, and neither of them was wrong. " * 200)
    changes = {**SMALL, "quality": "accept", "calibration": "own.txt"}
    config = write_config(tmp_path / "tiny.yaml", tiny_checkpoint, **changes)
    done = CliRunner().invoke(exporter_app, ["export", "--model", str(config), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "broken, and accepted" in said and "breaks the promise of small: mean KL divergence" in said
    quality = read_bundle(tmp_path / "out").manifest.program.quality
    assert quality is not None and quality.accepted and len(quality.broken) == 1
    assert quality.own_text is not None and quality.own_text.positions == 128
    assert quality.calibration_sha256 is not None and len(quality.calibration_sha256) == 64
    shown = CliRunner().invoke(exporter_app, ["inspect", str(tmp_path / "out")])
    assert shown.exit_code == 0 and "broken, and accepted" in " ".join(shown.output.split())
    assert "calibration file" in shown.output


def test_a_calibration_file_that_is_not_there_is_a_mistake(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", tiny_checkpoint, **SMALL, calibration="no.txt")
    with pytest.raises(ConfigError, match=r"calibration: got no\.txt"):
        pipeline.export(load_config(config), tmp_path / "out", Progress.silent())


def quality_of(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(runtime_app, ["quality", *map(str, arguments)])
    return done.exit_code, done.output


def test_beside_a_bundle_of_floats(int8_bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    code, said = quality_of(
        "--bundle", int8_bundle, "--reference", tiny_bundle, "--positions", 32, "--json", tmp_path / "q.json"
    )  # fmt: skip
    assert code == 0 and "French" in said
    written = json.loads((tmp_path / "q.json").read_text())
    recorded = read_bundle(int8_bundle).manifest.program.quality
    assert recorded is not None
    for got, want in zip(written["domains"], recorded.domains, strict=True):
        assert (got["domain"], got["positions"]) == (want.domain, want.positions)
        for key in ("nll", "nll_gap", "kl"):
            assert got[key] == pytest.approx(getattr(want, key), abs=1e-4)


def test_beside_the_checkpoint_through_transformers(int8_bundle: Path, tiny_checkpoint: Path) -> None:
    code, said = quality_of(
        "--bundle", int8_bundle, "--reference", tiny_checkpoint, "--positions", 20, "--domains", "French; C source"
    )  # fmt: skip
    assert code == 0 and "French" in said and "C source" in said and "Hindi" not in said


def test_without_a_reference_what_was_recorded(int8_bundle: Path, tiny_bundle: Path) -> None:
    code, said = quality_of("--bundle", int8_bundle)
    assert code == 0 and "accurate promises" in " ".join(said.split())
    code, _ = quality_of("--bundle", tiny_bundle)
    assert code != 0


def test_a_reference_that_is_none_is_refused(int8_bundle: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        runtime_app, ["quality", "--bundle", str(int8_bundle), "--reference", str(tmp_path / "nothing")]
    )
    assert isinstance(done.exception, ConfigError) and "--reference nothing" in str(done.exception)
