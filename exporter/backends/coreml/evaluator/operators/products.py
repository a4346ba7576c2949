"""Matrix products, attention and convolution.

A product of float16 arguments adds in float32 and is rounded once, bias included. The order in which float32 sums is
the library's, so two machines may differ in its last bits, and then in a float16's last bit.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from exporter.backends.coreml.evaluator.operators.registry import operator, unsupported, wide

Tensor = torch.Tensor


@operator("linear", multiplied=("weight",))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: x ``[*, I]``, weight ``[O, I]``, bias ``[O]`` to ``[*, O]``, in the type of x."""
    a, b = wide(x), wide(weight)
    _same_type(a, b)
    return F.linear(a, b, None if bias is None else wide(bias)).to(x.dtype)


@operator("matmul", static=("transpose_x", "transpose_y"), multiplied=("x", "y"))
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """numpy's matmul, batch axes broadcasting, of x and y or their transposes (vectors are not transposed)."""
    a = x.transpose(-1, -2) if transpose_x and x.dim() > 1 else x
    b = y.transpose(-1, -2) if transpose_y and y.dim() > 1 else y
    a, b = wide(a), wide(b)
    _same_type(a, b)
    return torch.matmul(a, b).to(_narrower(x, y))


def _same_type(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise unsupported(f"a product of {a.dtype} and {b.dtype}")


def _narrower(x: Tensor, y: Tensor) -> torch.dtype:
    """A wide weight is float32 but stands for float16: the other argument knows the result's type."""
    return torch.float16 if torch.float16 in (x.dtype, y.dtype) else x.dtype


@operator("scaled_dot_product_attention")
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """softmax(query @ key^T / sqrt(E) + mask) @ value in float32, rounded once.

    query ``[*, L, E]``, key ``[*, S, E]``, value ``[*, S, V]`` to ``[*, L, V]``; the mask broadcasts to ``[*, L, S]``:
    a bool is True where the key takes part, a float is added.
    """
    scores = torch.matmul(wide(query), wide(key).transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + wide(attn_mask)
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    return torch.matmul(weights, wide(value)).to(query.dtype)


@operator("conv", static=("strides", "pad_type", "pad", "dilations", "groups"), multiplied=("weight",))
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, strides: tuple[int, ...] | None = None,
    pad_type: str = "valid", pad: tuple[int, ...] | None = None, dilations: tuple[int, ...] | None = None,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolution (no flip): x ``[N, C, *D]``, weight ``[O, C / groups, *K]``, bias ``[O]``; one to three axes D.

    `pad_type`: valid (none), custom (`pad`: before and after each axis), same (the result has ``ceil(D / stride)``
    places, the odd one after) or same_lower (the odd one before).
    """
    rank = x.dim() - 2
    steps, gaps = strides or (1,) * rank, dilations or (1,) * rank
    match pad_type:
        case "valid":
            amounts = [(0, 0)] * rank
        case "custom" if pad is not None:
            amounts = [(pad[2 * i], pad[2 * i + 1]) for i in range(rank)]
        case "same" | "same_lower":
            amounts = []
            for size, kernel, step, gap in zip(x.shape[2:], weight.shape[2:], steps, gaps, strict=True):
                total = max(0, (math.ceil(size / step) - 1) * step + (kernel - 1) * gap + 1 - size)
                small, large = total // 2, total - total // 2
                amounts.append((small, large) if pad_type == "same" else (large, small))
        case _:
            raise unsupported(f"pad_type {pad_type} with pad {pad}")
    # torch takes the last axis first.
    z = F.pad(wide(x), [n for pair in reversed(amounts) for n in pair])
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    return function(z, wide(weight), None if bias is None else wide(bias), steps, 0, gaps, groups).to(x.dtype)


@operator("einsum", static=("equation",))
def einsum(values: tuple[Tensor, Tensor], equation: str) -> Tensor:
    """The two products that the operator defines: rank 4 ``nchw,nwhu->nchu`` and rank 3 ``chw,whr->chr``, under any
    letters; n and h broadcast."""
    x, y = values
    compact = equation.replace(" ", "")
    letters = dict.fromkeys(c for c in compact if c.isalpha())
    renamed = compact.translate({ord(c): "abcdefgh"[i] for i, c in enumerate(letters)})
    if renamed not in ("abcd,adce->abce", "abc,cbd->abd"):
        raise unsupported(f"equation {equation}")
    # h moves to the front, then it is a matrix product.
    product = torch.matmul(wide(x).transpose(-3, -2), wide(y).transpose(-3, -2))
    return product.transpose(-3, -2).contiguous().to(_narrower(x, y))
