"""Constants of a program: literal ones, those in the weight file, and the compressed ones that are unpacked at load.

**Wide weights.** A float16 matrix that a `linear`, `matmul` or `conv` multiplies by is kept as float32, every element
still a float16 value: the product is then one float32 matrix product, which this machine does fastest and which is
what the operators' model asks for (see `operators.linear`). Whatever else reads such a constant narrows what it took.
A constant that several functions, or an embedding and a head, refer to is stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from exporter.backends.coreml.evaluator.dtypes import FP16, STRING, decode
from exporter.backends.coreml.evaluator.operators.compression import CONSTEXPR
from exporter.backends.coreml.evaluator.package import Package, TensorType, tensor_type

Key = tuple[Any, ...]


class Constant:
    """A value known before the program runs. Equal keys mean equal values."""

    def __init__(self, declared: TensorType, key: Key, make: Callable[[bool], torch.Tensor | str]) -> None:
        self.declared, self.key, self._make = declared, key, make

    def value(self, *, wide: bool = False) -> torch.Tensor | str:
        """The tensor in its carrier (float32 for a float16 one when `wide`), or the string."""
        return self._make(wide)


class ConstantStore:
    """The constants of a whole package; tensors are made when first asked for and shared from then on."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._tensors: dict[tuple[Key, bool], torch.Tensor] = {}
        self._wide: set[Key] = set()

    def widen(self, constant: Constant) -> None:
        """Declare that `constant` is multiplied by: its only form is then the wide one."""
        if constant.declared.element is FP16:
            self._wide.add(constant.key)

    def is_wide(self, constant: Constant) -> bool:
        return constant.key in self._wide

    def tensor(self, constant: Constant) -> torch.Tensor:
        """The shared tensor of `constant`, float32 if it is wide."""
        key = (constant.key, self.is_wide(constant))
        if key not in self._tensors:
            value = constant.value(wide=key[1])
            assert isinstance(value, torch.Tensor)
            self._tensors[key] = value
        return self._tensors[key]

    def narrow(self, constant: Constant) -> torch.Tensor:
        """The tensor of `constant` in its declared type."""
        return self.tensor(constant).to(constant.declared.element.carrier)

    def literal(self, value: Any, owner: str) -> Constant:
        """The constant that a MIL Value spells out or refers to.

        Raises:
            BundleError: a kind of value that the evaluator does not know, or one that is not of its declared type.
        """
        declared = tensor_type(value.type)
        if declared is None or declared.shape is None or None in declared.shape:
            raise self._error(owner, got="a constant that is no tensor of known type and shape")
        shape = tuple(n for n in declared.shape if n is not None)
        element = declared.element
        if value.WhichOneof("value") == "blobFileValue":
            name, offset = value.blobFileValue.fileName, int(value.blobFileValue.offset)
            file = self.package.weights(name)
            key: Key = ("blob", name, offset, element.name, shape)
            return Constant(declared, key, lambda wide: _widened(file.read(offset, element, shape), wide))
        tensor = value.immediateValue.tensor
        kind = tensor.WhichOneof("value")
        if kind is None:
            raise self._error(owner, got="a constant without a value")
        data = getattr(tensor, kind).values
        if element is STRING:
            text = data[0] if len(data) == 1 else None
            if text is None:
                raise self._error(owner, got=f"{len(data)} strings")
            return Constant(declared, ("text", text), lambda wide: text)
        count = 1
        for n in shape:
            count *= n
        if kind == "bytes":
            if len(data) * 8 < count * element.bits:
                raise self._error(owner, got=f"{len(data)} bytes for {declared}")
            whole = decode(bytes(data), element, count)
        else:
            if len(data) != count:
                raise self._error(owner, got=f"{len(data)} values for {declared}")
            whole = torch.tensor(list(data), dtype=element.carrier)
        whole = whole.view(tuple(shape))
        key = ("value", element.name, shape, whole.numpy().tobytes())
        return Constant(declared, key, lambda wide: _widened(whole, wide))

    def unpacked(self, operator: str, inputs: dict[str, Constant], declared: TensorType) -> Constant:
        """The constant that a ``constexpr_*`` operator makes of other constants."""
        key = (operator, *((name, inputs[name].key) for name in sorted(inputs)))

        def make(wide: bool) -> torch.Tensor:
            arguments = {name: constant.value() for name, constant in inputs.items()}
            return CONSTEXPR[operator](arguments, declared.element.carrier, wide)

        return Constant(declared, key, make)

    def _error(self, owner: str, *, got: str) -> Exception:
        return self.package.error(got=f"{owner}: {got}", expected="a value of its declared type")


def _widened(tensor: torch.Tensor, wide: bool) -> torch.Tensor:
    return tensor.float() if wide and tensor.dtype == torch.float16 else tensor
