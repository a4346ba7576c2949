"""How a converted program stores its weights. Arithmetic is float32 in any case.

Every reduced weight is a constant in front of ``blockwise_shift_scale``, Core AI's operator for stored integers, which
takes float16 as well; a plain conversion of a constant to float32 would be folded away. A weight is reduced when the
converter meets its parameter: the compiler keeps every constant it has seen as long as the program lives, so float32
matrices would stay in memory.

Letters: N output channels (rows), K input channels, g groups a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from exporter.backends.coreai.library import library
from exporter.errors import UnsupportedModelError
from exporter.grids.base import store
from exporter.quantization.modules import pack_nibbles
from exporter.spec import GridSpec

ROOT = "decoder."
"""Prefix of the decoder's parameters in a traced program."""


class _Constants(NamedTuple):
    """The operands of a ``blockwise_shift_scale``, which is ``(data - offset1) * scale + offset2``, as the compiler
    keeps them."""

    data: Any
    scale: Any
    offset1: Any
    offset2: Any


def converter(kept: Mapping[str, GridSpec]) -> Any:
    """A ``TorchConverter`` that keeps each parameter of the decoder named in `kept` in that form.

    Its ``to_coreai`` raises UnsupportedModelError where a weight is not finite in float16. coreai-torch has no option
    for how a parameter is stored; this overrides the method that makes a constant of one.
    """
    base = library("coreai_torch").TorchConverter
    operation = library("coreai._compiler.dialects.coreai").ConstantOp
    shift_scale = library("coreai._compiler.dialects.coreai").blockwise_shift_scale

    class Reducing(base):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.reduced: dict[int, _Constants] = {}

        def _handle_placeholder_op(self, node: Any) -> Any:
            name = self.exported_program.graph_signature.inputs_to_parameters.get(node.name, "")
            own = kept.get(name.removeprefix(ROOT))
            if own is None:
                return super()._handle_placeholder_op(node)
            weight = self._parameters_map[node.name]
            key = weight.data_ptr()  # of a tied matrix, and in both functions
            if key not in self.reduced:
                self.reduced[key] = _constants(weight, own)
            operands = [operation(value=value).result for value in self.reduced[key]]
            self._values_map[node.name] = shift_scale(*operands)
            return None

    return Reducing(mode=base.Mode.RELEASE)


def _constants(weight: torch.Tensor, kept: GridSpec) -> _Constants:
    """float32 ``[N, K]`` to its operands; scales and offsets are ``[N, g]``."""
    if kept.codes == "float16":
        one = np.ones((1, 1), dtype=np.float32)
        half = _half(weight)
        return _Constants(*map(_attribute, (half, one, np.zeros_like(one, dtype=np.float16), np.zeros_like(one))))
    stored = store(weight, kept)
    assert stored.scales is not None, f"{kept.grid} has no scales"
    scales = stored.scales.numpy()
    shifts = torch.zeros(scales.shape, dtype=torch.int8) if stored.zero_points is None else stored.zero_points
    integers = _attribute if kept.codes == "int8" else _nibbles
    return _Constants(
        integers(stored.codes.numpy()), _attribute(scales), integers(shifts.numpy()), _attribute(np.zeros_like(scales))
    )


def _attribute(values: np.ndarray) -> Any:
    """An array as a constant. Equal arrays are one constant in the file; an array of equal numbers takes no room."""
    return library("coreai._compiler.dialects.coreai.constant").create_constant_attr(values)


def _nibbles(codes: np.ndarray) -> Any:
    """int8 in -8 .. 7 as a constant of 4-bit integers; numpy has no 4-bit type that the compiler takes."""
    ir, constants = library("coreai._compiler.ir"), library("coreai._compiler.dialects.coreai.constant")
    integer = ir.IntegerType.get_signed(4)
    kind = ir.RankedTensorType.get(codes.shape, integer)
    if codes.min() == codes.max():
        return ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(integer, int(codes.flat[0])))
    packed = pack_nibbles(torch.from_numpy(codes.reshape(1, -1))) ^ 0x88  # two's complement, not an offset from -8
    return constants.create_elements_attr(ir.Location.unknown(), kind, packed.numpy())


def _half(weight: torch.Tensor) -> np.ndarray:
    """`weight` rounded to float16."""
    half = weight.half().numpy()
    if not (np.isfinite(half.max()) and np.isfinite(half.min())):  # a boolean mask of this size would take memory
        raise UnsupportedModelError(
            "Core AI weights",
            got=f"a weight of magnitude {float(weight.abs().max()):.3g}",
            expected=f"at most {float(np.finfo(np.float16).max):.0f}, the largest float16",
            repair="Set coreai.weights to float32.",
        )
    return half
