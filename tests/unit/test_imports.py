"""The one direction of dependency: who may import whom."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPORTER = sorted((ROOT / "exporter").rglob("*.py"))
RUNTIME = sorted((ROOT / "runtime_ref").rglob("*.py"))
SPEC = {f"exporter.spec.{part}" for part in ("base", "model", "states", "manifest")}
VERIFICATION = {path for path in EXPORTER if path.parent == ROOT / "exporter" / "verification"}
LEAFS = {f"exporter.{leaf}" for leaf in ("spec", "bundle", "errors", "optional", "quiet", "machine", "english")}


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, at its top or inside a function, by its full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from exporter import programs` imports exporter.programs.
            yield from (f"{node.module}.{a.name}" for a in node.names) if node.module == "exporter" else (node.module,)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", RUNTIME, ids=name)
def test_the_runtime_imports_only_the_leafs_of_the_exporter(path: Path) -> None:
    assert {module for module in imports(path) if module.split(".")[0] == "exporter"} <= LEAFS


@pytest.mark.parametrize("path", [path for path in EXPORTER if path not in VERIFICATION], ids=name)
def test_only_verification_imports_the_runtime(path: Path) -> None:
    assert not [module for module in imports(path) if module.split(".")[0] == "runtime_ref"]


@pytest.mark.parametrize(
    ("leaf", "allowed"),
    [
        ("spec/base", set()),
        ("spec/model", SPEC),
        ("spec/states", SPEC | {"exporter.errors"}),
        ("spec/manifest", SPEC | {"exporter.errors"}),
        ("spec/__init__", SPEC),
        ("errors", set()),
        ("optional", {"exporter.errors", "exporter.quiet"}),
        ("bundle", {"exporter.errors", "exporter.spec"}),
        ("machine", set()),
        ("english", {"exporter.spec"}),
    ],
)
def test_leafs_import_neither_torch_nor_other_parts(leaf: str, allowed: set[str]) -> None:
    heavy = {"torch", "executorch", "transformers", "numpy"}
    found = set(imports(ROOT / "exporter" / f"{leaf}.py"))
    assert not heavy & {module.split(".")[0] for module in found}
    assert {module for module in found if module.split(".")[0] == "exporter"} <= allowed
