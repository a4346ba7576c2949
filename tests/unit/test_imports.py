"""The one direction of dependency: who may import whom."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPORTER = sorted((ROOT / "exporter").rglob("*.py"))
RUNTIME = sorted((ROOT / "runtime_ref").rglob("*.py"))
FORMATS = ("executorch", "coreml", "coreai")
VERIFICATION = "exporter/verification/"

RUNTIME_LEAFS = {
    "exporter.spec",  # manifests, states, kinds of programs
    "exporter.errors",  # what it raises
    "exporter.bundle",  # reads a bundle and compares its checksums
    "exporter.backends",  # the registry: which module runs the programs of a format
    "exporter.lengths",  # the usual contexts, and one way to ask for others
    "exporter.units",  # sizes in the same words
    "exporter.outputs",  # files that it writes
    "exporter.text.files",  # the tokenizer's files
    "exporter.text.encoder",  # and the tokens of texts and conversations
}
COMMAND_LEAFS = {
    "exporter.console": {"__main__"},  # prints and ends as elsewhere
    "exporter.machine": {"bench", "bench_report"},  # memory of this process, and which machine this is
    "exporter.english": {"bench"},  # the text that is scored
    "exporter.quality.domains": {"quality"},  # the texts that quality is judged on
    "exporter.quality.scores": {"quality"},  # and what is said of them
    "exporter.quality.table": {"__main__"},
    "exporter.quiet": {"quality"},  # Transformers writes to stderr while it loads
}
"""What the command line alone needs, and which of its modules."""
LOADER_LEAFS = {
    "exporter.spec",  # the program as the manifest describes it
    "exporter.errors",  # what it raises
    "exporter.optional",  # a package that is not installed names its extra
    "exporter.quiet",  # runtimes write to stderr while they load
    "exporter.machine",  # where the compiled kernels are kept
    "exporter.room",  # whether there is any for what a runtime unpacks
    "exporter.grids",  # options name grids
    "exporter.recipe",  # and say which parameter is on which
    "exporter.tricks.packed_weights",  # methods of a program share their packed weights
}
"""What a module that runs programs of a format may import besides its own folder."""

SPEC_PARTS = ("model", "states", "manifest", "programs", "quality", "quantization", "recipe")
SPEC = {f"exporter.spec.{part}" for part in SPEC_PARTS}
KINDS = {f"exporter.kinds{part}" for part in ("", ".attention", ".base", ".conv", ".policy")}
DATA = {"exporter.data"}
TRAITS = {"exporter.backends.base", "exporter.spec", "exporter.spec.checks"}
LEAFS: dict[str, set[str]] = {
    "data": set(),
    **{f"kinds/{path.stem}": DATA | KINDS for path in (ROOT / "exporter" / "kinds").glob("*.py")},
    "spec/model": DATA | KINDS,
    "spec/states": DATA | KINDS | SPEC | {"exporter.errors"},
    "spec/manifest": DATA | KINDS | SPEC | {"exporter.errors"},
    "spec/programs": {"exporter.errors"},
    "spec/quantization": DATA | SPEC,
    "spec/recipe": DATA,
    "spec/quality": DATA,
    "quality/__init__": set(),
    "quality/domains": {"exporter.text.encoder"},
    "quality/table": {"exporter.spec"},
    "spec/checks": KINDS,
    "spec/__init__": DATA | KINDS | SPEC,
    "console": {"exporter.errors", "exporter.quiet"},
    "outputs": {"exporter.errors"},
    "errors": set(),
    "optional": {"exporter.errors", "exporter.quiet", "exporter.backends"},  # the registry knows an extra's platforms
    "quiet": set(),
    "bundle": {"exporter.errors", "exporter.spec", "exporter.staging"},
    "staging": set(),
    "machine": {"exporter.units"},
    "units": set(),
    "yaml_text": set(),
    "lengths": {"exporter.errors"},
    "room": set(),
    "tricks/__init__": set(),
    "tricks/base": set(),
    "tricks/packed_weights": {"exporter.tricks.base"},
    "grids/__init__": set(),
    "recipe": {"exporter.errors", "exporter.grids", "exporter.spec"},
    "english": {"exporter.spec", "exporter.text.files"},
    "text/__init__": set(),
    "text/files": {"exporter.errors"},
    "text/marks": set(),
    "text/template": {"exporter.text.files", "exporter.text.marks"},
    "text/chat": {"exporter.text.files", "exporter.text.template"},
    "text/encoder": {f"exporter.text.{part}" for part in ("chat", "files", "template")} | {"exporter.spec"},
    "text/ends": {f"exporter.text.{part}" for part in ("chat", "files", "template")} | {"exporter.spec"},
    "backends/__init__": {"exporter.backends.base", "exporter.errors", "exporter.optional"},
    "backends/base": {"exporter.spec"},
    **{f"backends/{name}/options": {"exporter.spec", "exporter.grids", "exporter.recipe"} for name in FORMATS},
    **{f"backends/{name}/traits": TRAITS | {f"exporter.backends.{name}.options"} for name in FORMATS},
}
"""Every leaf, and what of the exporter it may import."""
HEAVY = {"torch", "executorch", "torchao", "transformers", "numpy", "coremltools", "coreai", "coreai_torch"}
OWN_LIBRARIES = {
    "executorch": {"executorch", "torchao", "flatbuffers"},
    "coreml": {"coremltools"},
    "coreai": {"coreai", "coreai_torch", "coreai_opt"},
}
"""What a format's folder alone imports. (`optional` imports by name.)"""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that `path` imports when it runs, at its top or inside a function, by its full name."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    open_nodes: list[ast.AST] = [tree(path)]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        open_nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from exporter import programs` imports exporter.programs; a name that is no module imports its package.
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def of_exporter(path: Path) -> set[str]:
    return {module for module in imports(path) if roots([module]) == {"exporter"}}


def roots(modules: Iterable[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os.path\nfrom exporter import errors\nfrom exporter.spec import Manifest, states\n"
        "def f():\n    from exporter.backends import coreml\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    )
    assert sorted(imports(path)) == [
        "exporter.backends.coreml", "exporter.errors", "exporter.spec", "exporter.spec.states", "os.path", "typing"
    ]  # fmt: skip


def test_the_runtime_imports_only_the_leafs_of_the_exporter() -> None:
    """And none of the list that it does not need."""
    found = {path.stem: of_exporter(path) for path in RUNTIME}
    assert set().union(*found.values()) == RUNTIME_LEAFS | COMMAND_LEAFS.keys()
    for module, users in COMMAND_LEAFS.items():
        assert {stem for stem, modules in found.items() if module in modules} == users


@pytest.mark.parametrize("format", FORMATS)
def test_what_runs_programs_imports_only_leafs(format: str) -> None:
    """The runtime module and all of its own folder that it takes along: Core ML's evaluator, ExecuTorch's kernels."""
    own = f"exporter.backends.{format}"
    seen: set[str] = set()
    open_modules = [f"{own}.runtime"]
    while open_modules:
        module = open_modules.pop()
        if module in seen:
            continue
        seen.add(module)
        found = of_exporter(file_of(module))
        within = {other for other in found if other.startswith(f"{own}.")}
        assert found - within <= LOADER_LEAFS, module
        open_modules += within
    roles = {"build", "file", "description", "checks"}
    assert not seen & {f"{own}.{role}" for role in roles}, "what writes or checks programs does not run them"
    if format == "coreml":
        evaluator = ROOT / "exporter" / "backends" / "coreml" / "evaluator"
        for path in evaluator.rglob("*.py"):
            inside = {module for module in of_exporter(path) if module.startswith(f"{own}.evaluator")}
            assert of_exporter(path) - inside <= LOADER_LEAFS, name(path)


def test_only_verification_imports_the_runtime() -> None:
    users = {name(path) for path in EXPORTER if "runtime_ref" in roots(imports(path))}
    assert users and all(user.startswith(VERIFICATION) for user in users)


def test_only_verification_builds_the_eager_model_beside_a_program() -> None:
    """Others that know the plain kernels build what is traced or calibrated of them."""
    users = {name(path).split("/")[1] for path in EXPORTER if "exporter.cache.plain" in imports(path)}
    assert users == {"verification", "cache", "model", "quantization", "backends"}
    sessions = {name(path) for path in EXPORTER if "eager_session" in defined(path)}
    assert sessions and all(user.startswith(VERIFICATION) for user in sessions)


@pytest.mark.parametrize("format", FORMATS)
def test_a_formats_modules_and_libraries_are_imported_in_its_folder_alone(format: str) -> None:
    """Everybody else asks the registry, so that a format loads without the libraries of another."""
    folder = ROOT / "exporter" / "backends" / format
    own = f"exporter.backends.{format}"
    for path in (*EXPORTER, *RUNTIME):
        if path.is_relative_to(folder) or path.parent.name == "tricks":  # a trick patches what it was made for
            continue
        assert not [module for module in imports(path) if f"{module}.".startswith(f"{own}.")], name(path)
        assert not OWN_LIBRARIES[format] & roots(imports(path)), name(path)
    libraries = set().union(*(roots(imports(path)) for path in folder.rglob("*.py")))
    assert not libraries & set().union(*(OWN_LIBRARIES[other] for other in FORMATS if other != format))


def test_the_graph_contract_asks_formats_for_their_traits_only() -> None:
    paths = [path for path in EXPORTER if path.parent.name == "graph"]
    assert {m for path in paths for m in imports(path) if m.startswith("exporter.backends")} == {"exporter.backends"}
    asked = {
        alias.name
        for path in paths
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "exporter.backends"
        for alias in node.names
    }
    assert asked == {"formats", "traits"}


def test_nobody_imports_the_benches_or_the_tests() -> None:
    outside = {file.stem for folder in ("bench", "tests") for file in (ROOT / folder).rglob("*.py")}
    outside |= {"bench", "peers", "native", "tests"}
    assert {name(path) for path in (*EXPORTER, *RUNTIME) if outside & roots(imports(path))} == set()


def defined(path: Path) -> set[str]:
    """The names at the top of a module, those that it imports among them."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_the_benches_import_what_there_is() -> None:
    """CI runs none of them: each would take minutes."""
    missing = []
    for path in sorted((ROOT / "bench").rglob("*.py")):
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ImportFrom) or roots([node.module or ""]) - {"exporter", "runtime_ref"}:
                continue
            assert node.module is not None
            for alias in node.names:
                is_module = file_of(f"{node.module}.{alias.name}").is_file()
                if not is_module and alias.name not in defined(file_of(node.module)):
                    missing.append(f"{name(path)}: {node.module}.{alias.name}")
    assert missing == []


def test_the_c_sources_have_one_user() -> None:
    """`native/` is what an app links; the Python side compiles it for the `.pte` runtime alone."""
    assert not list((ROOT / "native").rglob("*.py"))
    users = [
        name(path)
        for path in (*EXPORTER, *RUNTIME)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and node.value == "native"
    ]
    assert users == ["exporter/backends/executorch/ring_kernels.py"]


@pytest.mark.parametrize(("leaf", "allowed"), LEAFS.items(), ids=list(LEAFS))
def test_leafs_import_neither_torch_nor_other_parts(leaf: str, allowed: set[str]) -> None:
    path = ROOT / "exporter" / f"{leaf}.py"
    assert not HEAVY & roots(imports(path))
    assert of_exporter(path) <= allowed


def test_who_says_that_it_is_a_leaf_is_held_to_it() -> None:
    said = {
        path.relative_to(ROOT / "exporter").with_suffix("").as_posix()
        for path in EXPORTER
        if (ast.get_docstring(tree(path)) or "").startswith("LEAF:")
    }
    assert said <= LEAFS.keys()
