"""From a decoder to a Core AI program with two functions.

Letters: L layers of a stack, K KV heads, D head_dim.

Each method is traced by itself over the stacked states ``[L, rows, K, D]`` and decomposed by coreai-torch's own table;
both go into one program. Constants are stored by their content, so a constant of both functions is stored once, and so
is a tied embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram

from exporter.backends.coreai.library import library
from exporter.backends.coreai.weights import ROOT, converter
from exporter.errors import UnsupportedModelError
from exporter.spec import MethodSpec, Recipe


def convert(programs: dict[str, ExportedProgram], interfaces: Mapping[str, MethodSpec], recipe: Recipe) -> Any:
    """The traced methods as one ``AIProgram``, every parameter in the form that `recipe` gives it; arithmetic stays
    float32. `programs` is emptied on the way.

    Raises:
        MissingPackageError: coreai-torch or, for int4, coreai-opt is not installed.
        UnsupportedModelError: coreai-torch cannot convert an operator of the model.
    """
    reduced = {name: grid for name in recipe.names if (grid := recipe.part(name)).codes != "float32"}
    converting = converter(reduced)
    tensors = next(iter(programs.values())).state_dict
    matrices = {tensors[f"{ROOT}{name}"].data_ptr() for name in reduced}
    decompositions = library("coreai_torch").get_decomp_table()
    for method in list(programs):
        program = without_assertions(programs.pop(method).run_decompositions(decompositions))
        names = [tensor.name for tensor in interfaces[method].inputs]
        try:
            converting.add_exported_program(
                program,
                entrypoint_name=method,
                input_names=names[:2],
                state_names=names[2:],
                output_names=[tensor.name for tensor in interfaces[method].outputs],
            )
        except ValueError as error:
            raise _refusal(error) from error
    try:
        converted = converting.to_coreai()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise _refusal(error) from error
    assert set(converting.reduced) == matrices, f"{len(converting.reduced)} of {len(matrices)} matrices were met"
    return converted


def _refusal(error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        "Core AI",
        got=f"a model that coreai-torch does not convert ({error})",
        expected="operators it knows",
        repair="Take coreai out of `targets` for this model.",
    )


def without_assertions(program: ExportedProgram) -> ExportedProgram:
    """Drop run-time assertions over shapes; the format has no operator for them."""
    graph = program.graph_module.graph
    for node in reversed(list(graph.nodes)):
        target = str(node.target)
        if node.op == "call_function" and ("_assert" in target or "sym_constrain" in target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
