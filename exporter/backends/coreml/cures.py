"""Workarounds for faults of coremltools 9.0, each with what goes wrong without it.

A workaround is one of three things: a translation of an operator (`TRANSLATIONS`), a rewrite of the traced graph
(`REWRITES`), or a pass that is left out (`SKIPPED_PASSES`). `tests/lowering/test_coreml_cures.py` converts without each
in turn and fails when one is no longer needed.

Letters: Q query_len, rows: rows of a state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import coremltools as ct
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.torch.ops import _get_inputs
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY, register_torch_op
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic
from torch.export import ExportedProgram
from torch.fx import Node


def state_as_stored(state: torch.Tensor) -> torch.Tensor:
    """What a rewritten graph calls on each state it reads: the state itself."""
    return state


@dataclass(frozen=True)
class Translation:
    """How one operator of a traced graph becomes MIL, and the fault of coremltools' own translation, if any."""

    operator: str
    cures: str
    emit: Callable[[Any, Any, Any], None]
    """Called with the converter's context, the node, and coremltools' own translation or None."""


def _remainder(context: Any, node: Any, original: Any) -> None:
    x, y = _get_inputs(context, node, expected=2)
    context.add(mb.mod(x=x, y=y, name=node.name))


def _floor_division(context: Any, node: Any, original: Any) -> None:
    x, y = _get_inputs(context, node, expected=2)
    context.add(mb.floor_div(x=x, y=y, name=node.name))


def _quotient(context: Any, node: Any, original: Any) -> None:
    x, y = _get_inputs(context, node, expected=2)
    if x.dtype is types.fp16 and y.dtype is types.fp16:
        context.add(mb.real_div(x=x, y=y, name=node.name))
    else:
        original(context, node)


def _one_sided_clamp(context: Any, node: Any, original: Any) -> None:
    bounds = [*_get_inputs(context, node, expected=[1, 2, 3])[1:], None, None][:2]
    if (bounds[0] is None) == (bounds[1] is None):
        original(context, node)
        return
    x = context[node.inputs[0]]
    lowest, highest = bounds
    clamped = (
        mb.minimum(x=x, y=highest, name=node.name) if lowest is None else mb.maximum(x=x, y=lowest, name=node.name)
    )
    context.add(clamped)


def _where_or_zero(context: Any, node: Any, original: Any) -> None:
    visible, x, other = _get_inputs(context, node, expected=3)
    assert other.val == 0, f"{node.name} selects {other.val}"
    context.add(mb.mul(x=x, y=mb.cast(x=visible, dtype=types.builtin_to_string(x.dtype)), name=node.name))


def _slice_of_known_length(context: Any, node: Any, original: Any) -> None:
    length = node.meta["val"].shape[node.inputs[1]] if len(node.inputs) > 1 else None
    if not isinstance(length, int) or not isinstance(node.inputs[2], str):
        original(context, node)
        return
    x, start = context[node.inputs[0]], context[node.inputs[2]]
    begin: list[Any] = [0] * len(x.shape)
    size = [-1 if is_symbolic(n) else n for n in x.shape]
    begin[node.inputs[1]], size[node.inputs[1]] = start, length
    context.add(mb.slice_by_size(x=x, begin=mb.concat(values=begin, axis=0), size=size, name=node.name))


def _stored_state(context: Any, node: Any, original: Any) -> None:
    (read,) = _get_inputs(context, node, expected=1)
    assert read.op.op_type == "cast" and read.op.x.op.op_type == "read_state", f"{node.name} reads no state"
    context.add(mb.identity(x=read.op.x, name=node.name))


TRANSLATIONS = (
    Translation(
        operator.mod.__name__,
        "`offset % capacity` on lengths: 'Unsupported fx node mod, kind mod'",
        _remainder,
    ),
    Translation(
        operator.floordiv.__name__,
        "a quotient of lengths becomes a float32, and slot arithmetic goes on in floats",
        _floor_division,
    ),
    Translation(
        "div",
        "a quotient of float16 numbers is computed in float32, and so is all that follows, weights included",
        _quotient,
    ),
    Translation(
        "clamp",
        "a clamp with one bound takes float32's extreme for the other, and so is float32 with all that follows",
        _one_sided_clamp,
    ),
    Translation(
        "where.scalarother",
        "``where(condition, x, 0.0)``: 'Unsupported fx node where, kind where.scalarother'. A product, because MIL "
        "types a select by its two values alone, whatever shape the condition gives it",
        _where_or_zero,
    ),
    Translation(
        "slice",
        "a slice of two rows at a dynamic start loses its length: 'State wrapped type tensor[1,2,64,fp16] not matched "
        "with the value's sym_type' for the state of a convolution",
        _slice_of_known_length,
    ),
    Translation(
        state_as_stored.__name__,
        "a state is read as float32: every read casts all its rows up and every write casts them all down again",
        _stored_state,
    ),
)


@contextmanager
def translations() -> Iterator[None]:
    """Register `TRANSLATIONS`, and restore coremltools' own afterwards."""
    registry = _TORCH_OPS_REGISTRY.name_to_func_mapping
    before = dict(registry)
    try:
        for translation in TRANSLATIONS:
            emit = _named(translation, before.get(translation.operator))
            register_torch_op(torch_alias=[translation.operator], override=True)(emit)
        yield
    finally:
        registry.clear()
        registry.update(before)


def _named(translation: Translation, original: Any) -> Callable[[Any, Any], None]:
    def emit(context: Any, node: Any) -> None:
        translation.emit(context, node, original)

    # The registry also files a translation under its function's name, which must not be that of an operator.
    emit.__name__ = f"ring_exporter_{translation.operator}"
    return emit


def erase_assertions(program: ExportedProgram) -> None:
    """Run-time assertions and what they compare have no MIL: 'Unsupported fx node sym_min'. The declared ranges say the
    same."""
    for node in list(program.graph.nodes):
        if node.op == "call_function" and ("_assert" in str(node.target) or "sym_constrain" in str(node.target)):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()


def drop_copies(program: ExportedProgram) -> None:
    """A write through a slice is traced as ``copy(slice, rows)``: the old rows are read, only to give their shape to a
    ``tile`` of the new ones."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.copy.default:
            node.replace_all_uses_with(node.args[1])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()


def read_states_as_stored(program: ExportedProgram) -> None:
    """Put `state_as_stored` behind every state, for the translation of that name."""
    states = set(program.graph_signature.buffers_to_mutate.values())
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.target in states}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if node.name in inputs:
            with program.graph.inserting_after(placeholders[-1]):
                stored = program.graph.call_function(state_as_stored, (node,))
            stored.meta = dict(node.meta)
            node.replace_all_uses_with(stored, delete_user_cb=lambda user, stored=stored: user is not stored)


def round_numbers(program: ExportedProgram) -> None:
    """Numbers beside float16 tensors become float16 constants: as float32 they would make the operation, and all that
    follows, float32."""
    for node in list(program.graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype is torch.float16:
            node.args = tuple(
                _constant(program, node, index, number) if isinstance(number, float) else number
                for index, number in enumerate(node.args)
            )


def _constant(program: ExportedProgram, node: Node, index: int, number: float) -> Node:
    name = f"number_{index}_of_{node.name}"
    program.graph_module.register_buffer(name, torch.tensor(number, dtype=torch.float16))
    with program.graph.inserting_before(node):
        return program.graph.get_attr(name)


Rewrite = Callable[[ExportedProgram], None]
REWRITES: tuple[Rewrite, ...] = (erase_assertions, drop_copies, read_states_as_stored, round_numbers)


@dataclass(frozen=True)
class SkippedPass:
    """A pass of the converter's default pipeline that is left out, and why."""

    name: str
    why: str


SKIPPED_PASSES = (
    SkippedPass(
        "common::guard_negative_gather_indices",
        "puts a comparison, an addition and a select before every gather; no index of ours is negative",
    ),
)


def rewrite(program: ExportedProgram) -> ExportedProgram:
    """`program`, as ``torch.export.export`` returned it, decomposed and rewritten."""
    program = program.run_decompositions({})
    for step in REWRITES:
        step(program)
    program.graph_module.recompile()
    return program


def pass_pipeline() -> ct.PassPipeline:
    """The default pipeline without `SKIPPED_PASSES`."""
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes({skipped.name for skipped in SKIPPED_PASSES})
    return pipeline
