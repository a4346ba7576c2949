"""From a decoder to a Core AI program with two functions.

Letters: L layers of a stack, K KV heads, D head_dim.

Each method is traced by itself over the stacked states ``[L, rows, K, D]`` and decomposed by coreai-torch's own table;
both go into one program. Constants are stored by their content, so what both functions hold is stored once, a tied
embedding and head too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram

from exporter.backends.coreai.library import library
from exporter.backends.coreai.weights import Weights, store
from exporter.errors import UnsupportedModelError
from exporter.programs import Method
from exporter.spec import MethodSpec


def convert(
    programs: Mapping[Method, ExportedProgram], interfaces: Mapping[Method, MethodSpec], weights: Weights
) -> Any:
    """The traced methods as one ``AIProgram``, their weights stored as `weights` says; arithmetic stays float32.

    Raises:
        MissingPackageError: coreai-torch or, for integer weights, coreai-opt is not installed.
        UnsupportedModelError: coreai-torch cannot convert an operator of the model.
    """
    coreai_torch = library("coreai_torch")
    converter = coreai_torch.TorchConverter(mode=coreai_torch.TorchConverter.Mode.RELEASE)
    for method in programs:
        program = without_assertions(programs[method].run_decompositions(coreai_torch.get_decomp_table()))
        names = [tensor.name for tensor in interfaces[method].inputs]
        try:
            converter.add_exported_program(
                program,
                entrypoint_name=method,
                input_names=names[:2],
                state_names=names[2:],
                output_names=[tensor.name for tensor in interfaces[method].outputs],
            )
        except ValueError as error:
            raise _refusal(error) from error
    try:
        converted = converter.to_coreai()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise _refusal(error) from error
    return store(converted, weights)


def _refusal(error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        "Core AI",
        got=f"a model that coreai-torch does not convert ({error})",
        expected="operators it knows",
        repair="Take coreai out of `targets` for this model.",
    )


def without_assertions(program: ExportedProgram) -> ExportedProgram:
    """Drop the run-time assertions over shapes, for which the format has no operator."""
    graph = program.graph_module.graph
    for node in reversed(list(graph.nodes)):
        target = str(node.target)
        if node.op == "call_function" and ("_assert" in target or "sym_constrain" in target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
