"""docs/graph-contract.md says what there is: every check, its forms, mutants that fail it, an example that loads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import test_graph_exported
import test_graph_lowered

from exporter.backends import traits
from exporter.graph.contract_file import load_contract
from exporter.programs import Limits, interface
from exporter.spec import PROGRAMS
from exporter.spec.checks import TRACED_CHECKS

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "graph-contract.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")
]  # fmt: skip
TESTS = {
    node.name
    for path in HERE.glob("test_*.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}
FAULTS = {(fault, check) for _, fault, _, check in test_graph_exported.MUTANTS}
FAULTS |= {(fault, check) for _, faults, checks in test_graph_lowered.MUTANTS for fault in faults for check in checks}


def test_every_check_stands_in_the_table_with_its_forms() -> None:
    documented = {name.strip("`"): form for name, form, *_ in ROWS}
    assert len(documented) == len(ROWS) == 20 and "Twenty properties" in TEXT
    forms = {name: [] for name in (*TRACED_CHECKS, *traits("executorch").checks)}  # type: dict[str, list[str]]
    for form, names in (("exported", TRACED_CHECKS), ("file", traits("executorch").checks)):
        assert len(set(names)) == len(names)
        for name in names:
            forms[name].append(form)
    assert documented == {name: ", ".join(found) for name, found in forms.items()}


def test_every_check_has_a_mutant_that_fails_it() -> None:
    for name, _, _, mutants in ROWS:
        found = re.findall(r"`(\w+)`", mutants)
        assert found, name
        for mutant in found:
            assert mutant in TESTS or (mutant, name.strip("`")) in FAULTS, (name, mutant)


def test_the_example_loads_and_is_a_program(tmp_path: Path) -> None:
    example = next(block for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.S) if "program:" in block)
    (tmp_path / "contract.yaml").write_text(example)
    contract = load_contract(tmp_path / "contract.yaml")
    assert contract.program is not None and len(contract.program.states()) == 2 * 18
    limits = Limits(max_context_length=32768, max_prefill_chunk=512)
    for method in PROGRAMS:
        shapes = [tensor.shape for tensor in interface(contract.program.states(), 262144, method, limits).inputs]
        assert shapes.count((1, 512, 1, 256)) == 30 and shapes.count((1, "rows", 1, 256)) == 6
