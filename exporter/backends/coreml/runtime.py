"""An `.mlpackage` behind the `Program` interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from exporter.backends.coreml.evaluator import load_functions
from exporter.backends.coreml.evaluator.function import Function
from exporter.spec import ProgramSpec


def prepare(threads: int | None) -> int | None:
    """See `RuntimeModule.prepare`: the package is evaluated by torch."""
    return threads


def load(path: Path, program: ProgramSpec) -> MLPackageProgram:
    """See `RuntimeModule.load`."""
    return MLPackageProgram(path, program)


INPUTS = ("input_ids", "position_ids")


class MLPackageProgram:
    """The methods of one `.mlpackage`, evaluated here.

    Raises:
        BundleError: see `load_functions`; or the package has not the functions, states, inputs and one result that
            `spec` says.
    """

    def __init__(self, path: Path, spec: ProgramSpec) -> None:
        names = {method: declared.function or method for method, declared in spec.methods.items()}
        loaded = load_functions(path, sorted(set(names.values())))
        self._states = [state.name for state in spec.states]
        self._methods = {method: loaded[name] for method, name in names.items()}
        planned = {state.name: (state.dtype, state.shape()) for state in spec.states}
        for method, function in self._methods.items():
            self._check(method, function, planned)

    def run(
        self, method: str, input_ids: torch.Tensor, position_ids: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """See `Program.run`. Both inputs are handed to the package as int32."""
        inputs = dict(zip(INPUTS, (input_ids.to(torch.int32), position_ids.to(torch.int32)), strict=True))
        (logits,) = self._methods[method].run(inputs, dict(zip(self._states, states, strict=True))).values()
        return logits.float()

    @staticmethod
    def _check(method: str, function: Function, planned: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        text = function.text
        declared = {
            name: (str(state.element.carrier).removeprefix("torch."), state.shape)
            for name, state in text.states.items()
        }
        if declared != planned or text.inputs.keys() != set(INPUTS) or len(text.outputs) != 1:
            raise function.package.error(
                got=f"function {text.name}({', '.join(text.inputs)}) -> {', '.join(text.outputs)} over {declared}",
                expected=f"{method}({', '.join(INPUTS)}) with one result, over the manifest's {planned}",
            )
