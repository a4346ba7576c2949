"""The exporter's command line: what it prints, what it leaves behind, and how it refuses."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import write_config

from exporter import pipeline
from exporter.backends.executorch import build as pte_build
from exporter.bundle import read_bundle
from exporter.cli.app import main


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    """The exit code of ``python -m exporter argv``."""
    monkeypatch.setattr("sys.argv", ["exporter", *[str(part) for part in argv]])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *argv: object) -> str:
    """The message of a run that must exit with 2 and print no traceback."""
    assert run(monkeypatch, *argv) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert error.count("error:") == 1
    return " ".join(error.split())


def test_a_dry_run_prints_config_layers_and_memory_and_traces_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    config = write_config(tmp_path / "dry.yaml", tiny_checkpoint, coreml={"weights": "int4"})
    monkeypatch.setattr(pipeline, "build_module", None)
    assert run(monkeypatch, "export", "--model", config, "--dry-run", "--out", tmp_path / "out") == 0
    printed = capfd.readouterr().out
    assert "'max_context_length': 160" in printed
    assert printed.count("'keep_int8': [") == 3 and "'down_proj'" in printed  # what was left out is filled in
    # Kind, window, heads, KV heads, head_dim, RoPE base of the two kinds of layer.
    rows = [line.replace("│", " ").split() for line in printed.splitlines() if line.startswith("│")]
    assert ["0", "sliding", "8", "4", "2", "16", "10000", "96"] in rows
    assert ["1", "global", "all", "4", "2", "16", "1e+06", "96"] in rows
    # 160 tokens: two sliding layers of 8 rows and a global one of 160, K and V, 2 KV heads x 16 x 4 bytes.
    sliding, glob, full = 2 * 2 * 8 * 128, 2 * 160 * 128, 3 * 2 * 160 * 128
    want = [f"{size / 2**20:.2f}" for size in (sliding, glob, 0, sliding + glob, full)]
    assert ["160", *want, f"{full / (sliding + glob):.2f}x"] in rows
    assert not (tmp_path / "out").exists()


def test_inspect_prints_every_check(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path
) -> None:
    assert run(monkeypatch, "inspect", tiny_bundle) == 0
    printed = capfd.readouterr().out
    for check in ("ring_write_index_from_shapes", "ring_reads_before_write", "no_whole_state_copy",
                  "mutated_inputs_exactly_states", "dynamic_ranges", "operators_in_registry"):  # fmt: skip
        assert check in printed
    assert "FAILED" not in printed


def test_verify_without_a_checkpoint_uses_what_was_recorded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path
) -> None:
    assert run(monkeypatch, "verify", tiny_bundle) == 0
    assert "as recorded" in capfd.readouterr().out


def test_verify_with_the_checkpoint_compares_with_transformers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path
) -> None:
    assert run(monkeypatch, "verify", tiny_bundle, "--model", tiny_bundle.with_suffix(".yaml")) == 0
    printed = capfd.readouterr().out
    for chunk in (1, 7, 40):
        assert f"transformers, chunks of {chunk}" in printed
    assert printed.count("64 of 64") == 3


def test_verify_refuses_another_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path, tmp_path: Path,
    tiny_checkpoint: Path,
) -> None:  # fmt: skip
    config = write_config(tmp_path / "other.yaml", tiny_checkpoint, executorch={"quantization": {"linear": "int8"}})
    message = refused(monkeypatch, capfd, "verify", tiny_bundle, "--model", config)
    assert "as the manifest records" in message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"checkpoint": {"path": "nowhere"}}, "nowhere"),
        ({"max_context_length": 161}, "at most 160"),
        ({"sliding": True}, "unknown key 'sliding'"),
        ({"cache": {"rows": 4}}, "in cache one of dtype, global_dtype, growth, initial_rows, ring_slack"),
        ({"executorch": {"quantization": {"linear": "int4", "group_size": 96}}}, "96"),
    ],
)
def test_bad_configs_leave_no_bundle(
    *, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_checkpoint: Path,
    changes: dict[str, Any], complaint: str,
) -> None:  # fmt: skip
    config = write_config(tmp_path / "bad.yaml", tiny_checkpoint, **changes)
    assert complaint in refused(monkeypatch, capfd, "export", "--model", config, "--out", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"]


def test_a_missing_config_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no.yaml" in refused(monkeypatch, capfd, "export", "--model", tmp_path / "no.yaml")


def test_a_malformed_override_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", tiny_checkpoint)
    assert "KEY=VALUE" in refused(monkeypatch, capfd, "export", "--model", config, "--set", "name")


@pytest.mark.parametrize("damage", ["truncated", "checksum"])
def test_a_damaged_checkpoint_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_checkpoint: Path,
    damage: str,
) -> None:  # fmt: skip
    copy = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, copy)
    weights = copy / "model.safetensors"
    checkpoint: dict[str, Any] = {"path": str(copy)}
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        checkpoint["sha256"] = "0" * 64
    config = write_config(tmp_path / "bad.yaml", copy, checkpoint=checkpoint)
    message = refused(monkeypatch, capfd, "export", "--model", config, "--out", tmp_path / "out")
    assert "model.safetensors" in message
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_bundle(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    config = write_config(tmp_path / "full.yaml", tiny_checkpoint)

    def no_space(programs: object, path: Path) -> None:
        path.write_bytes(b"half a program")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(pte_build, "lower", no_space)
    assert "disk full" in refused(monkeypatch, capfd, "export", "--model", config, "--out", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.yaml"]


def test_an_export_that_is_interrupted_leaves_the_old_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_bundle: Path, tiny_checkpoint: Path
) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "out")
    config = write_config(tmp_path / "again.yaml", tiny_checkpoint)

    def interrupt(programs: object, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pte_build, "lower", interrupt)
    monkeypatch.setattr("sys.argv", ["exporter", "export", "--model", str(config), "--out", str(tmp_path / "out")])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main()
    assert read_bundle(tmp_path / "out").manifest == read_bundle(tiny_bundle).manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.yaml", "out"]
