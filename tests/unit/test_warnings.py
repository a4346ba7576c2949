"""What costs time and is right: shown, and never refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy import toy_manifest
from typer.testing import CliRunner

from exporter import pipeline
from exporter.bundle import Bundle
from exporter.cli import app as cli
from exporter.cli import tables
from exporter.errors import GraphContractError
from exporter.graph import refuse_failed
from exporter.inspection import Inspection
from exporter.spec import CheckResult


def result(name: str, passed: bool, severity: Any = "error") -> CheckResult:
    return CheckResult(
        format="executorch", name=name, program="main", passed=passed, evidence="41 of 100", severity=severity
    )


GOOD, SLOW = result("dynamic_ranges", True), result("delegated_share", False, "warning")
DEMANDED, WRONG = result("delegated_share", False), result("main_writes_before_read", False)


def test_a_warning_is_no_failure() -> None:
    refuse_failed([GOOD, SLOW])
    assert Inspection("toy", None, (), (GOOD, SLOW)).passed
    assert not Inspection("toy", None, (), (GOOD, DEMANDED)).passed


def test_a_program_that_is_slow_is_not_said_to_be_wrong() -> None:
    with pytest.raises(GraphContractError, match=r"main: delegated_share failed \(41 of 100\).* right and costs more"):
        refuse_failed([GOOD, DEMANDED])
    with pytest.raises(GraphContractError, match=r"main_writes_before_read failed .*generates wrong text or crashes"):
        refuse_failed([GOOD, DEMANDED, WRONG])


def test_the_table_tells_warnings_from_failures() -> None:
    outcomes = list(tables.checks_table([GOOD, SLOW, DEMANDED]).columns[3].cells)
    assert outcomes == ["ok", "warning", "FAILED"]


def test_an_export_prints_a_line_for_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manifest = toy_manifest().model_copy(update={"graph_checks": (GOOD, SLOW), "not_compared": "it has no class"})
    config = tmp_path / "toy.yaml"
    config.write_text("{name: toy, checkpoint: {path: toy}}")
    monkeypatch.setattr(pipeline, "export", lambda *_: Bundle(tmp_path, manifest))
    ran = CliRunner().invoke(cli.app, ["export", "--model", str(config)])
    assert ran.exit_code == 0
    said = [line for line in ran.stderr.splitlines() if "warning" in line]
    assert said == [
        "warning: executorch, main: delegated_share: 41 of 100",
        "warning: not compared with Transformers: it has no class",
    ]
