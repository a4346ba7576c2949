"""Formats: every folder has the same modules, and none needs the libraries of another."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from exporter import backends
from exporter.backends import base, format_of_suffix, formats, traits
from exporter.errors import ConfigError
from exporter.graph.contract_file import LIMIT_CHECKS
from exporter.spec import FormatOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "exporter" / "backends"
ROLES = {
    "build": base.BuildModule, "file": base.FileModule, "description": base.DescriptionModule,
    "checks": base.ChecksModule, "runtime": base.RuntimeModule,
}  # fmt: skip
ASKED = (
    backends.build_module, backends.file_module, backends.description_module, backends.checks_module,
    backends.runtime_module, backends.traits,
)  # fmt: skip


def functions(path: Path) -> dict[str, list[str]]:
    """The functions that a module defines, and the names of their arguments."""
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_a_format_is_a_folder() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert set(formats()) == folders == {"executorch", "coreml", "coreai"}
    assert formats()[0] == backends.FIRST and len(formats()) == 3


@pytest.mark.parametrize("name", formats())
def test_every_folder_has_the_same_modules(name: str) -> None:
    """With the functions of their role, whose arguments have the same names."""
    modules = {path.stem for path in (FOLDER / name).glob("*.py")}
    assert modules >= {"traits", "options", *ROLES}
    for role, protocol in ROLES.items():
        wanted = {
            method: list(inspect.signature(function).parameters)[1:]
            for method, function in vars(protocol).items()
            if not method.startswith("_") and inspect.isfunction(function)
        }
        assert wanted, role
        own = functions(FOLDER / name / f"{role}.py")
        assert {method: own.get(method) for method in wanted} == wanted


@pytest.mark.parametrize("name", formats())
def test_traits_say_what_can_be(name: str) -> None:
    own = traits(name)
    assert own.name == name and own.extra in (None, name)
    assert format_of_suffix(own.suffix) == name and own.file == f"model{own.suffix}"
    assert issubclass(own.options, FormatOptions) and own.options() == own.options.model_validate({})
    assert own.limits <= LIMIT_CHECKS.keys()
    assert {LIMIT_CHECKS[limit] for limit in own.limits} <= set(own.checks)
    assert len(set(own.checks)) == len(own.checks) and len(own.distributions) > 0
    if own.state_dtype is None:
        assert "float32" in own.cache_dtypes


@pytest.mark.parametrize("name", formats())
def test_options_are_recorded_in_json_and_read_back(name: str) -> None:
    options = traits(name).options()
    assert isinstance(options, FormatOptions)
    assert traits(name).options.model_validate_json(options.model_dump_json()) == options
    assert options.decoder.is_quantized <= options.rounds


def test_no_two_formats_have_one_suffix() -> None:
    assert len({traits(name).suffix for name in formats()}) == len(formats())
    assert format_of_suffix(".gguf") is None


@pytest.mark.parametrize("ask", ASKED, ids=lambda ask: ask.__name__)
def test_an_unknown_format_is_refused_with_the_known_ones(ask: object) -> None:
    with pytest.raises(ConfigError, match="got 'tflite'; expected one of executorch, coreai, coreml"):
        ask("tflite")  # type: ignore[operator]


def run(program: str, *argv: str) -> str:
    """What a Python process of its own prints that runs `program`."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


TRAITS_ALONE = """
import importlib, sys
import exporter.backends
for name in exporter.backends.formats():
    importlib.import_module(f"exporter.backends.{name}.options").__name__
    exporter.backends.traits(name).options()
import exporter.config, exporter.spec
print(*sorted({module.partition(".")[0] for module in sys.modules}))
"""


def test_traits_options_and_the_config_load_no_library() -> None:
    """A wrong YAML is refused, and a runtime chosen, before torch is imported."""
    loaded = set(run(TRAITS_ALONE).split())
    assert {"exporter", "pydantic"} <= loaded
    assert not loaded & {"torch", "numpy", "executorch", "torchao", "coremltools", "coreai", "coreai_torch"}


APART = """
import importlib, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "executorch":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Absent())
try:
    importlib.import_module("executorch.exir")
except ImportError:
    pass
else:
    raise AssertionError("executorch is there")

from exporter import backends, inspection, pipeline
from exporter.graph import ProgramContract
from exporter.graph.contract_file import ContractFile
from exporter.model.decoder import Decoder
from exporter.progress import Progress
from exporter.programs import Limits
from exporter.spec import CachePolicy, state_specs
from runtime_ref.programs import choose, load_program, prepare_runtime
import runtime_ref.bench, tiny_models, torch

name, folder = sys.argv[1], Path(sys.argv[2])
own, back_end = backends.traits(name), backends.build_module(name)
spec, options = tiny_models.model(tiny_models.SLIDING), own.options()
states = state_specs(spec, CachePolicy(), 32, own.layout, own.state_dtype)
decoder = tiny_models.randomize(Decoder(spec, states, back_end.kernels(options)))
limits = Limits(max_context_length=32, max_prefill_chunk=8)
program = back_end.build(decoder, limits, options, folder, Progress.silent().step).program
file = backends.file_module(name).read_file(folder / own.file)
contracts = [ProgramContract(method, form, program.states) for method, form in program.methods.items()]
checks = backends.checks_module(name).check_file(file, contracts, ContractFile(), program)
assert {check.name for check in checks} == set(own.checks) and all(check.passed for check in checks)
description = backends.description_module(name).describe(file)
assert (description.format, len(description.functions)) == (name, 2)
prepare_runtime(name)
loaded = backends.runtime_module(name).load(folder / own.file, program)
tensors = [torch.zeros(state.shape(), dtype=getattr(torch, state.dtype)) for state in states]
logits = loaded.run("prefill", torch.tensor([[1, 2, 3]]), torch.arange(3)[None], tensors)
assert logits.shape == (1, spec.vocab_size) and bool(logits.isfinite().all())
print(*sorted({module.partition(".")[0] for module in sys.modules}))
"""


@pytest.mark.parametrize(("name", "library"), [("coreml", "coremltools"), ("coreai", "coreai_torch")])
def test_a_program_is_written_checked_and_run_without_executorch(name: str, library: str, tmp_path: Path) -> None:
    """It is not even installed in that process: nothing imports it on the way, at the top of a module or later."""
    pytest.importorskip(library)
    loaded = set(run(f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n{APART}", name, str(tmp_path)).split())
    assert library in loaded and "executorch" not in loaded
