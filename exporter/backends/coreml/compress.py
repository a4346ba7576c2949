"""Weights of a converted program in 8 or 4 bits.

Every matrix is compressed once, however many functions and operators read it, and stands in each function behind the
``constexpr_`` operator that expands it; a tied embedding and head stay one matrix.

Letters: N output channels (rows), K input channels, E entries of a palette.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types
from coremltools.converters.mil.mil.scope import ScopeInfo

from exporter.backends.coreml.convert import memory_of
from exporter.quantization.grids import int4_per_group, int8_per_row
from exporter.quantization.palettes import palettize
from exporter.quantization.rounding import BLOCK, LEAST_SIZE

COMPRESSED = frozenset({"int8", "int4", "palettized4"})
"""The options of `CoreMLOptions` that are made here."""
_MATRICES = {("linear", "weight"), ("gather", "x")}

Emit = Callable[..., Any]


def compress(program: Program, weights: str) -> int:
    """Replace the matrices of every function of `program`; returns how many different ones there were.

    `int8` is symmetric per row, `int4` symmetric per block of 32 columns (rows of other lengths become int8),
    `palettized4` 16 values for every row.
    """
    assert weights in COMPRESSED, f"{weights} is made elsewhere"
    known: dict[tuple[Any, ...], Emit] = {}
    for function in program.functions.values():
        with function:
            for op in [op for op in function.operations if _is_matrix(op)]:
                key = memory_of(op.outputs[0].val)
                if key not in known:
                    known[key] = _compressed(torch.from_numpy(np.array(op.outputs[0].val, dtype=np.float32)), weights)
                with mb.scope(*(ScopeInfo(source=source, data=data) for source, data in op.scopes.items())):
                    expanded = known[key](before_op=op, name=f"{op.name}_{weights}")
                function.replace_uses_of_var_after_op(
                    anchor_op=op, old_var=op.outputs[0], new_var=expanded, force_replace=True
                )
                function.remove_ops([op])
    return len(known)


def _is_matrix(op: Any) -> bool:
    if op.op_type != "const" or not isinstance(op.outputs[0].val, np.ndarray):
        return False
    value = op.outputs[0].val
    uses = {(user.op_type, name) for user in op.outputs[0].child_ops for name, v in user.inputs.items()
            if v is op.outputs[0]}  # fmt: skip
    return value.ndim == 2 and value.dtype == np.float16 and value.size >= LEAST_SIZE and bool(uses & _MATRICES)


def _compressed(weight: torch.Tensor, weights: str) -> Emit:
    """float32 ``[N, K]`` to what emits its operator; the arrays are shared by all it emits."""
    columns = weight.shape[1]
    if weights == "palettized4":
        indices, palettes = palettize(weight)
        table = palettes.half().reshape(len(palettes), 1, -1, 1).numpy()
        codes = indices.numpy().astype(types.np_uint4_dtype)
        return lambda **where: mb.constexpr_lut_to_dense(indices=codes, lut=table, **where)
    if weights == "int4" and columns % BLOCK == 0:
        integers, scales = int4_per_group(weight, BLOCK)
        data = integers.numpy().astype(types.np_int4_dtype)
    else:
        integers, row_scales = int8_per_row(weight)
        data, scales = integers.numpy(), row_scales[:, None]
    steps = scales.half().numpy()
    return lambda **where: mb.constexpr_blockwise_shift_scale(data=data, scale=steps, **where)
