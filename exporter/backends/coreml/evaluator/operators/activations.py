"""Activations and normalisations. Each is one operator: float32 inside, a float16 result rounded once at the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from exporter.backends.coreml.evaluator.operators.registry import operator, unsupported, wide

Tensor = torch.Tensor


def _activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    @operator(name)
    def kernel(x: Tensor) -> Tensor:
        return function(wide(x)).to(x.dtype)


_activation("relu", lambda x: torch.where(x > 0, x, 0.0))
_activation("sigmoid", torch.sigmoid)
_activation("silu", lambda x: x * torch.sigmoid(x))
# log(1 + e^x) without overflow.
_activation("softplus", lambda x: torch.log1p(torch.exp(-x.abs())) + torch.where(x > 0, x, 0.0))


@operator("leaky_relu", static=("alpha",))
def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    """x where x >= 0, else alpha * x."""
    z = wide(x)
    return torch.where(z >= 0, z, z * alpha).to(x.dtype)


@operator("gelu", static=("mode",))
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    """x times the normal distribution function, exactly or by one of two approximations."""
    z = wide(x)
    match mode:
        case "EXACT":
            y = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
        case "TANH_APPROXIMATION":
            y = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case "SIGMOID_APPROXIMATION":
            y = z * torch.sigmoid(1.702 * z)
        case _:
            raise unsupported(f"mode {mode}")
    return y.to(x.dtype)


@operator("softmax", static=("axis",))
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `axis`, after subtracting the maximum, which changes nothing but the overflow."""
    z = wide(x)
    exponentials = torch.exp(z - z.amax(axis, keepdim=True))
    return (exponentials / exponentials.sum(axis, keepdim=True)).to(x.dtype)


@operator("layer_norm", static=("axes", "epsilon"))
def layer_norm(
    x: Tensor, axes: tuple[int, ...] | None = None, gamma: Tensor | None = None, beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:  # fmt: skip
    """gamma * (x - mean) / sqrt(variance + epsilon) + beta over `axes` (all, unless given); the variance divides by
    the count. gamma and beta have the shape of those axes."""
    z = wide(x)
    over = tuple(range(x.dim())) if axes is None else tuple(axis % x.dim() for axis in axes)
    centred = z - z.mean(over, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(over, keepdim=True) + epsilon)
    shape = [n if axis in over else 1 for axis, n in enumerate(x.shape)]
    if gamma is not None:
        y = y * wide(gamma).view(shape)
    if beta is not None:
        y = y + wide(beta).view(shape)
    return y.to(x.dtype)


@operator("l2_norm", static=("epsilon",))
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + epsilon) over the last three axes."""
    if x.dim() < 3:
        raise unsupported(f"rank {x.dim()}")
    z = wide(x)
    return (z / torch.sqrt((z * z).sum((-3, -2, -1), keepdim=True) + epsilon)).to(x.dtype)
