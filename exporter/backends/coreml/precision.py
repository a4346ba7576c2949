"""The decoder in Core ML's number formats: float16 matrices, float32 for the few steps that need it.

Every cast is in the decoder before it is traced, so the converted program has the types chosen here, none chosen by a
pass of the converter. Letters: Q query_len, D hidden_size, R rotary_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exporter.backends.coreml.kernels import CoremlKernels
from exporter.model.decoder import Decoder
from exporter.model.norms import RMSNorm


@dataclass(frozen=True)
class Precision:
    """The dtype of each part of the decoder. docs/coreml.md says what each choice costs in logits.

    Args:
        matrices: embeddings, linears, convolutions and experts, and the activations between them.
        norms: inside an RMSNorm, weights included.
        softmax: attention scores, from their scaling to the weights.
        residual: the residual sum.
        rotation: cos and sin that multiply queries and keys; angles are float32 in any case.
    """

    matrices: torch.dtype = torch.float16
    norms: torch.dtype = torch.float32
    softmax: torch.dtype = torch.float16
    residual: torch.dtype = torch.float32
    rotation: torch.dtype = torch.float16


SHIPPED = Precision()
FLOAT32 = Precision(torch.float32, torch.float32, torch.float32, torch.float32, torch.float32)
"""Everything but the states, which Core ML stores in float16 only; for comparison with eager models."""


class Cast(torch.nn.Module):
    """`inner`, with inputs of one dtype and outputs of another."""

    def __init__(self, inner: torch.nn.Module, takes: torch.dtype | None, gives: torch.dtype) -> None:
        super().__init__()
        self.inner, self.takes, self.gives = inner, takes, gives

    @property
    def weight(self) -> torch.Tensor:
        """The inner module's weight, so that others can be tied to it."""
        weight = self.inner.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x if self.takes is None else x.to(self.takes)).to(self.gives)


class CastTable(torch.nn.Module):
    """A rotary table whose cos and sin ``[1, Q, 1, R/2]`` are rounded to `gives` once a call."""

    def __init__(self, inner: torch.nn.Module, gives: torch.dtype) -> None:
        super().__init__()
        self.inner, self.gives = inner, gives

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.inner(positions)
        return cos.to(self.gives), sin.to(self.gives)


def in_precision(decoder: Decoder, precision: Precision) -> Decoder:
    """A copy of a float32 `decoder` on Core ML's caches; the original and its parameters do not change.

    Parameters whose dtype does not change are shared with the original; the others are copied one by one.
    """
    twin = decoder.with_kernels(CoremlKernels(precision.matrices, precision.softmax))
    norms = {name for name, module in twin.named_modules() if isinstance(module, RMSNorm)}
    made: dict[int, torch.nn.Parameter] = {}
    for name, module in list(twin.named_modules()):
        dtype = precision.norms if name in norms else precision.matrices
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            setattr(module, key, made[id(parameter)])
    for name in norms:
        _replace(twin, name, Cast(twin.get_submodule(name), precision.norms, precision.matrices))
    for index, table in enumerate(twin.rotary_tables):
        twin.rotary_tables[index] = CastTable(table, precision.rotation)
    twin.embed_tokens = Cast(twin.embed_tokens, None, precision.residual)
    twin.lm_head = Cast(twin.lm_head, None, torch.float32)
    return twin.eval()


def _replace(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(root.get_submodule(parent), key, module)
