"""How a converted program keeps its weights. Arithmetic is float32 whatever they are stored as.

This runs on the converted program. Whoever rounds before has the conversion back to float32 folded into the constant;
what is folded by nobody is ``blockwise_shift_scale``, the operator Core AI has for stored integers, which takes
float16 as well. So every reduced weight is stored in front of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from exporter.backends.coreai.library import library
from exporter.backends.coreai.program import constant_value
from exporter.errors import UnsupportedModelError

Weights = Literal["float32", "float16", "int8", "int4"]
BLOCK = 32
"""Input channels that share a scale and a zero point in ``int4``."""
MIN_ELEMENTS = 1024
"""Constants up to this size (norms, biases, tables of the rotary embedding) stay float32."""
_READERS = frozenset({"coreai.transpose", "coreai.gather_nd", "coreai.decomposable.broadcasting_batch_matmul"})


def store(program: Any, weights: Weights) -> Any:
    """Store the weights of an ``AIProgram`` as asked, in place, and return it.

    ``float16`` rounds each to nearest. ``int8`` is symmetric per output channel, ``int4`` has a scale and a zero point
    per `BLOCK` input channels; both are coreai-opt's, rounded to nearest with no data. (Symmetric int4 was nearly
    twice as far from the float model: a KL divergence of 0.63 nats on Gemma 3 270M, not 0.35.)

    A constant counts as a weight when it has more than `MIN_ELEMENTS` elements and feeds products or a look-up: the
    embedding and the head too, once when tied.

    Raises:
        MissingPackageError: integers are asked for and coreai-opt is not installed.
        UnsupportedModelError: a weight is no finite float16.
    """
    if weights == "float16":
        _store_half(program)
    elif weights != "float32":
        tools = library("coreai_opt.coreai_utils")
        schemes = library("coreai_opt.coreai_utils.common").QScheme
        int4 = weights == "int4"
        tools.quantize_weights(
            program,
            tools.DType.INT4 if int4 else tools.DType.INT8,
            qscheme=schemes.ASYMMETRIC if int4 else schemes.SYMMETRIC,
            granularity=tools.CompressionGranularity["PER_BLOCK" if int4 else "PER_CHANNEL"],
            block_size=BLOCK,
            weight_num_threshold=MIN_ELEMENTS,
            in_place=True,
        )
    for constant in list(_constants(program)):
        if not list(constant.results[0].uses):
            constant.erase()  # the float32 original, which would be written all the same
    return program


def _constants(program: Any) -> Iterator[Any]:
    for graph in program._module._mlir_module.operation.regions[0].blocks[0].operations:
        for op in graph.regions[0].blocks[0].operations:
            if op.name == "coreai.constant":
                yield op


def _store_half(program: Any) -> None:
    authoring, ir = library("coreai.authoring"), library("coreai._compiler.ir")
    constant = library("coreai.authoring.constant").constant
    for op in list(_constants(program)):
        kind, readers = op.results[0].type, {use.owner.name for use in op.results[0].uses}
        if str(kind.element_type) != "f32" or math.prod(kind.shape) <= MIN_ELEMENTS or not readers <= _READERS:
            continue
        half = _half(constant_value(op)).reshape(tuple(kind.shape))
        one = np.ones([1] * half.ndim, dtype=np.float32)
        with op.context, op.location, ir.InsertionPoint(op):
            whole = authoring.blockwise_shift_scale(
                data=constant(half),
                scale=constant(one),
                offset1=constant(np.zeros_like(one, dtype=np.float16)),
                offset2=constant(np.zeros_like(one)),
            )._to_mlir()
        op.results[0].replace_all_uses_with(whole)


def _half(weight: np.ndarray) -> np.ndarray:
    """`weight` rounded to float16."""
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16)
    if not (np.isfinite(half.max()) and np.isfinite(half.min())):  # a mask of so many numbers would take memory
        raise UnsupportedModelError(
            "Core AI weights",
            got=f"a weight of magnitude {float(np.abs(weight).max()):.3g}",
            expected=f"at most {float(np.finfo(np.float16).max):.0f}, the largest float16",
            repair="Set coreai.weights to float32.",
        )
    return half
