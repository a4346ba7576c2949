"""Weights of a converted program on grids of integers or palettes.

Every matrix is compressed once, however many functions and operators read it. Each function expands it with a
``constexpr_`` operator. A tied embedding and head stay one matrix.

Letters: N output channels (rows), K input channels, E entries of a palette.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types
from coremltools.converters.mil.mil.scope import ScopeInfo

from exporter.backends.coreml.convert import memory_of
from exporter.grids.base import store
from exporter.spec import GridSpec, Recipe

_MATRICES = {("linear", "weight"), ("gather", "x")}

Emit = Callable[..., Any]


def compress(program: Program, twin: torch.nn.Module, recipe: Recipe) -> int:
    """Put the matrices of every function of `program` on their grids; returns the number of different matrices.

    Args:
        program: converted over the memory of `twin`, by which its constants are known.
        twin: the decoder as it was traced.
        recipe: in which form to keep each parameter of the decoder; floats are there already.
    """
    rounded = set(recipe.rounded)
    named = ((name, parameter) for name, parameter in _named_as_decoder(twin) if name in rounded)
    by_memory = {parameter.data_ptr(): recipe.part(name) for name, parameter in named}
    known: dict[tuple[Any, ...], Emit] = {}
    for function in program.functions.values():
        with function:
            for op in [op for op in function.operations if _is_matrix(op)]:
                key = memory_of(op.outputs[0].val)
                kept = by_memory.get(key[0])
                if kept is None:
                    continue
                if key not in known:
                    known[key] = _compressed(torch.from_numpy(np.array(op.outputs[0].val, dtype=np.float32)), kept)
                with mb.scope(*(ScopeInfo(source=source, data=data) for source, data in op.scopes.items())):
                    expanded = known[key](before_op=op, name=f"{op.name}_{kept.grid}")
                function.replace_uses_of_var_after_op(
                    anchor_op=op, old_var=op.outputs[0], new_var=expanded, force_replace=True
                )
                function.remove_ops([op])
    assert len(known) == len(by_memory), f"{len(known)} of {len(by_memory)} matrices are in the program"
    return len(known)


def _named_as_decoder(twin: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters by their names without the casts around their modules."""
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        yield name.replace(".inner.", "."), parameter


def _is_matrix(op: Any) -> bool:
    if op.op_type != "const" or not isinstance(op.outputs[0].val, np.ndarray):
        return False
    value = op.outputs[0].val
    uses = {(user.op_type, name) for user in op.outputs[0].child_ops for name, v in user.inputs.items()
            if v is op.outputs[0]}  # fmt: skip
    return value.ndim == 2 and value.dtype == np.float16 and bool(uses & _MATRICES)


def _compressed(weight: torch.Tensor, kept: GridSpec) -> Emit:
    """float32 ``[N, K]`` to what emits its operator; the arrays are shared by all it emits."""
    stored = store(weight, kept)
    codes = stored.codes.numpy()
    data = codes if kept.codes == "int8" else codes.astype(getattr(types, f"np_{kept.codes}_dtype"))
    if stored.palettes is not None:
        table = stored.palettes.half().reshape(len(stored.palettes), 1, -1, 1).numpy()
        return lambda **where: mb.constexpr_lut_to_dense(indices=data, lut=table, **where)
    assert stored.scales is not None and stored.zero_points is None, f"{kept.grid} is not symmetric"
    steps = stored.scales.half().numpy()
    return lambda **where: mb.constexpr_blockwise_shift_scale(data=data, scale=steps, **where)
