"""A bundle with a Core ML package, by the commands everybody uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conftest import CHUNK, CONTEXT, WINDOW
from toy import VOCAB
from typer.testing import CliRunner

import runtime_ref
from exporter.backends import traits
from exporter.bundle import read_bundle
from exporter.cli.app import app
from exporter.errors import ConfigError


@pytest.fixture(scope="module")
def bundle(coreml_bundle: Path) -> Path:
    return coreml_bundle


def inspect(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    return result.exit_code, result.output


def test_the_manifest_says_what_was_built(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    program = manifest.program
    assert (program.format, program.file, program.weights) == ("coreml", "model.mlpackage", "int8")
    assert {check.name for check in manifest.graph_checks} == set(traits("coreml").checks)
    assert {check.format for check in manifest.graph_checks} == {"coreml"}
    assert manifest.versions["coremltools"] == "9.0"
    assert [state.shape() for state in program.states if state.kind == "full"] == [(1, CONTEXT, 2, 16)] * 2
    # Every comparison was made before the bundle was there, with the file that is in it.
    of_the_model, *comparisons = manifest.verification
    assert of_the_model.format is None and {one.format for one in comparisons} == {"coreml"}


def test_every_file_and_directory_has_the_mode_of_a_new_one(bundle: Path, tmp_path: Path) -> None:
    """safetensors and coremltools leave some that are their owner's alone."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    assert {"reference.safetensors", "model.mlmodel", "weights"} <= {path.name for path in bundle.rglob("*")}
    for path in (bundle, *bundle.rglob("*")):
        new = tmp_path / ("directory" if path.is_dir() else "file")
        assert path.stat().st_mode == new.stat().st_mode, path


def test_the_package_runs_in_a_session(bundle: Path) -> None:
    session = runtime_ref.load(bundle)
    logits = session.prefill(list(range(3, 3 + CHUNK + WINDOW + 1)))
    assert logits.shape == (VOCAB + 1,) and session.length == CHUNK + WINDOW + 1


def test_inspect_shows_the_bundle_and_the_package_alone(bundle: Path) -> None:
    code, text = inspect(str(bundle), "--format", "json")
    found = json.loads(text)
    assert code == 0 and found["passed"] and [check["form"] for check in found["checks"]] == ["file"] * (2 * 13 + 1)
    code, text = inspect(str(bundle / "model.mlpackage"), "--format", "json")
    (file,) = json.loads(text)["files"]
    assert code == 0 and file["format"] == "coreml"
    assert {"int8", "float16", "float32", "scales"} <= file["weight_bytes"].keys()
    code, text = inspect(str(bundle / "model.mlpackage"))
    assert code == 0
    for shown in ("prefill", "main", f"1, 2..{CHUNK}", f"1, 1..{CONTEXT}", "layer_0_keys", "write_state", "int8"):
        assert shown in text, shown


def test_a_package_holds_what_its_manifest_lists_and_inspecting_writes_nothing(bundle: Path) -> None:
    package = bundle / "model.mlpackage"
    files = {file.relative_to(package).as_posix(): file.stat().st_mtime_ns for file in package.rglob("*.*")}
    assert files.keys() - {"Data/com.apple.CoreML"} == {
        "Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"
    }  # fmt: skip
    assert inspect(str(package))[0] == 0
    assert {file: (package / file).stat().st_mtime_ns for file in files} == files


def test_a_contract_holds_for_the_package_alone(bundle: Path, tmp_path: Path) -> None:
    ring = {"kind": "ring", "rows": WINDOW, "row_shape": [2, 16]}
    program = {
        "max_context_length": CONTEXT, "max_prefill_chunk": CHUNK, "vocab_size": VOCAB + 1,
        "layers": [ring, {"kind": "full", "row_shape": [2, 16]}, ring],
    }  # fmt: skip
    contract = tmp_path / "contract.yaml"
    contract.write_text(yaml.safe_dump({"checks": ["exact_index_arithmetic", "dynamic_ranges"], "program": program}))
    code, text = inspect(str(bundle / "model.mlpackage"), "--check", str(contract))
    assert code == 0, text
    contract.write_text(yaml.safe_dump({"program": program | {"max_prefill_chunk": CHUNK - 1}}))
    code, text = inspect(str(bundle / "model.mlpackage"), "--check", str(contract), "--format", "json")
    bad = {(check["program"], check["name"]) for check in json.loads(text)["checks"] if not check["passed"]}
    assert code == 1 and bad == {("prefill", "dynamic_ranges")}
    # A limit that nothing here would read is refused, whether the package comes alone or in its bundle.
    for file in (bundle / "model.mlpackage", bundle):
        for limit in ({"max_file_bytes": 10}, {"max_duplicate_share": 0.5}, {"min_delegated_share": {"main": 0.5}}):
            contract.write_text(yaml.safe_dump({"program": program} | limit))
            result = CliRunner().invoke(app, ["inspect", str(file), "--check", str(contract)])
            (key,) = limit
            assert isinstance(result.exception, ConfigError) and f"a contract with {key}" in str(result.exception)
