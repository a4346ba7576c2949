"""The YAML file of a contract: what it refuses, and what it makes of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from programs_for_checks import CONTRACTS
from tiny_models import CONV, GLOBAL, SLIDING, decoder_of, model

from exporter.backends import traits
from exporter.backends.executorch.build import graph_contracts
from exporter.errors import ConfigError
from exporter.graph.contract import MIN_DELEGATED_SHARE
from exporter.graph.contract_file import ContractFile, ProgramForm, load_contract
from exporter.programs import Limits, interface, method_spec
from exporter.spec import PROGRAMS, CachePolicy, CheckResult, state_specs
from exporter.spec.checks import TRACED_CHECKS

RING = {"kind": "ring", "rows": 8, "row_shape": [2, 16]}
FULL = {"kind": "full", "row_shape": [2, 16]}
CONV_FORM = {"kind": "conv", "rows": 2, "row_shape": [64]}
PROGRAM: dict[str, Any] = {"max_context_length": 160, "max_prefill_chunk": 40, "vocab_size": 97, "layers": [RING, FULL]}


def with_layers(*layers: object) -> dict[str, Any]:
    return {"program": PROGRAM | {"layers": list(layers)}}


def load(tmp_path: Path, content: object) -> ContractFile:
    path = tmp_path / "contract.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_contract(path)


TOGETHER = "its keys and values together"


@pytest.mark.parametrize(
    ("content", "got", "expected"),
    [
        ({"max_bytes": 1}, "unknown key 'max_bytes' in the top level", "max_file_bytes"),
        ({"program": PROGRAM | {"window": 8}}, "unknown key 'window' in program", "max_context_length"),
        (with_layers(FULL, RING | {"heads": 2}), "'heads' in program.layers.1", "row_shape, rows"),
        ({"checks": ["weights_stored_once", "ring_ordr"]}, "checks = ", "writes_land_on_their_rows, not ring_ordr"),
        ({"checks": []}, "checks = []", "at least one check"),
        ({"min_delegated_share": {"main": 1.5}}, "min_delegated_share.main = 1.5", "less than or equal to 1"),
        ({"max_planned_bytes": {"main": "1"}}, "max_planned_bytes.main = '1'", "valid integer"),
        ({"checks": ["dynamic_ranges"], "max_file_bytes": 9}, TOGETHER, "max_file_bytes needs the check file_bytes"),
        ({"max_file_bytes": 0}, "max_file_bytes = 0", "greater than or equal to 1"),
        ({"max_duplicate_share": -1}, "max_duplicate_share = -1", "greater than or equal to 0"),
        ({"runtime": "r", "allowed_operators": ["a"]}, TOGETHER, "at most one of runtime and allowed_operators"),
        ({"program": {k: v for k, v in PROGRAM.items() if k != "vocab_size"}}, "no program.vocab_size", "a value"),
        (with_layers(), "program.layers = []", "at least 1 item"),
        (with_layers(FULL | {"rows": 8}), "program.layers.0 = ", "none for full"),
        (with_layers({"kind": "ring", "row_shape": [2, 16]}), "layers.0 = ", "rows for kind ring"),
        (with_layers(RING | {"row_shape": [16]}), "layers.0 = ", "row_shape of 2 for kind ring"),
        (with_layers(RING | {"kind": "conv"}), "layers.0 = ", "row_shape of 1 for kind conv"),
        (with_layers(RING | {"kind": "sliding"}), "kind = 'sliding'", "'ring', 'full' or 'conv'"),
        ("- a list", "a list", "a mapping with the keys checks, min_delegated_share"),
        ("checks: [a\n", "invalid YAML", "valid YAML"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_what_is_allowed(tmp_path: Path, content: object, got: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content)
    assert got in caught.value.got and expected in caught.value.expected
    assert caught.value.owner == "config contract.yaml"


def test_unknown_checks_are_answered_with_every_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"checks": ["no_such"]})
    assert all(name in caught.value.expected for name in (*TRACED_CHECKS, *traits("executorch").checks))


def test_layers_are_the_states_the_exporter_makes(tmp_path: Path) -> None:
    """Names, order, shapes and the whole interface, of every kind of layer and with counts."""
    spec = model(SLIDING, SLIDING, GLOBAL, CONV, SLIDING)
    layers = [RING | {"rows": 11, "count": 2}, FULL, CONV_FORM, RING | {"rows": 11}]
    form = load(tmp_path, {"program": PROGRAM | {"layers": layers}}).program
    assert isinstance(form, ProgramForm)
    ours, limits = form.states("executorch"), Limits(max_context_length=160, max_prefill_chunk=40)
    theirs = state_specs(spec, CachePolicy(ring_slack=3), 160)
    assert [(s.name, s.kind, s.role, s.max_rows, s.row_shape) for s in ours] == [
        (s.name, s.kind, s.role, s.max_rows, s.row_shape) for s in theirs
    ]
    decoder = decoder_of(spec, slack=3, context=160)
    for kind in PROGRAMS.values():
        assert interface(ours, 97, kind, limits) == method_spec(decoder, kind, limits)


def test_floors_and_ceilings_reach_their_method(tmp_path: Path) -> None:
    contracts = list(CONTRACTS.values())
    plain = ContractFile().bind(contracts)
    assert {c.method: c.min_delegated_share for c in plain} == MIN_DELEGATED_SHARE
    assert all(c.max_planned_bytes is None for c in plain)
    limits = {"min_delegated_share": {"prefill": 0.9}, "max_planned_bytes": {"main": 7}, "max_file_bytes": 9}
    file = load(tmp_path, limits)
    by_method = {c.method: c for c in file.bind(contracts)}
    assert (by_method["prefill"].min_delegated_share, by_method["prefill"].max_planned_bytes) == (0.9, None)
    assert (by_method["main"].min_delegated_share, by_method["main"].max_planned_bytes) == (
        MIN_DELEGATED_SHARE["main"], 7
    )  # fmt: skip
    assert (file.limits.max_file_bytes, file.limits.max_duplicate_share) == (9, 0.05)


@pytest.mark.parametrize("key", ["min_delegated_share", "max_planned_bytes"])
def test_a_limit_for_a_method_the_file_lacks_is_refused(key: str) -> None:
    file = ContractFile.model_validate({key: {"prefil": 1}})
    with pytest.raises(ConfigError, match=f"{key} for prefil; expected methods among prefill, main"):
        file.bind(list(CONTRACTS.values()))


def test_the_allowed_kernels(tmp_path: Path) -> None:
    registry = frozenset({"a", "b"})
    assert ContractFile().operators("wheel-1", registry) == registry
    assert load(tmp_path, {"runtime": "wheel-1"}).operators("wheel-1", registry) == registry
    assert load(tmp_path, {"allowed_operators": ["c"]}).operators("wheel-1", registry) == {"c"}
    with pytest.raises(ConfigError, match="runtime 'wheel-2'; expected wheel-1, the installed one"):
        load(tmp_path, {"runtime": "wheel-2"}).operators("wheel-1", registry)


def test_required_checks_are_kept_and_must_have_run(tmp_path: Path) -> None:
    def result(name: str) -> CheckResult:
        return CheckResult(name=name, program="main", passed=True, evidence="")

    exported, lowered = [result("writes_land_on_their_rows")], [result("file_bytes"), result("dynamic_ranges")]
    assert ContractFile().required(exported, lowered) == (exported, lowered)
    file = load(tmp_path, {"checks": ["writes_land_on_their_rows", "file_bytes"]})
    assert file.required(exported, lowered) == (exported, lowered[:1])
    with pytest.raises(ConfigError, match="writes_land_on_their_rows, which did not run"):
        file.required([], lowered)


def test_every_export_is_held_to_the_recorded_floor() -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL))
    contracts = graph_contracts(decoder, Limits(max_context_length=64, max_prefill_chunk=8))
    assert {c.method: c.min_delegated_share for c in contracts} == MIN_DELEGATED_SHARE
    assert set(MIN_DELEGATED_SHARE) == set(PROGRAMS) and min(MIN_DELEGATED_SHARE.values()) > 0.4
