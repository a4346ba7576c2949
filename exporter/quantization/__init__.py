"""Quantise a decoder in place, before it is traced, as a `QuantizationSpec` says."""

from __future__ import annotations

import torch

from exporter.errors import ConfigError
from exporter.model.decoder import Decoder
from exporter.quantization import grids
from exporter.quantization.modules import QuantizedEmbedding, QuantizedLinear, pack_nibbles
from exporter.spec import QuantizationSpec

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "quantize"]


def quantize(decoder: Decoder, spec: QuantizationSpec) -> None:
    """Replace the modules `spec` names by their quantised forms.

    A tied head quantised to int8 beside an int8 embedding shares its table. Routers of experts and experts' stacked
    weights keep their float values.

    Raises:
        ConfigError: `group_size` does not divide a quantised weight's input channels, or `keep_int8` names nothing.
    """
    embedding, head = decoder.embed_tokens, decoder.lm_head
    assert isinstance(embedding, torch.nn.Embedding) and isinstance(head, torch.nn.Linear)
    float_embedding, float_head = embedding.weight.detach(), head.weight.detach()
    _quantize_linears(decoder, spec)
    if spec.embedding == "int8":
        weight, scales = grids.int8_per_row(float_embedding)
        decoder.embed_tokens = QuantizedEmbedding(weight, scales[:, None])
    elif spec.embedding == "int4":
        _check_group(float_embedding, "embedding", spec.group_size)
        codes, scales = grids.int4_per_group(float_embedding, spec.group_size)
        decoder.embed_tokens = QuantizedEmbedding(pack_nibbles(codes), scales)
    if spec.head == "int8" and spec.embedding == "int8" and decoder.spec.tie_word_embeddings:
        assert isinstance(decoder.embed_tokens, QuantizedEmbedding)
        decoder.lm_head = QuantizedLinear(decoder.embed_tokens.weight, scales, None, None)
    elif spec.head != "none":
        decoder.lm_head = _quantized(float_head, None, "lm_head", spec.head, spec.group_size)


def _quantize_linears(decoder: Decoder, spec: QuantizationSpec) -> None:
    if spec.linear == "none":
        return
    linears = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("layers.") and not name.endswith("router")
    }
    for pattern in spec.keep_int8:
        if not any(pattern in name for name in linears):
            raise ConfigError(
                "quantization.keep_int8",
                got=repr(pattern),
                expected="a part of a linear's name, such as 'down_proj' or 'layers.0.mixer.v_proj'",
                repair="Names are `layers.N.mixer.{q,k,v,o}_proj` and `layers.N.feed_forward.{gate,up,down}_proj`.",
            )
    for name, linear in linears.items():
        bits = "int8" if any(pattern in name for pattern in spec.keep_int8) else spec.linear
        parent = decoder.get_submodule(name.rpartition(".")[0])
        bias = None if linear.bias is None else linear.bias.detach()
        quantized = _quantized(linear.weight.detach(), bias, name, bits, spec.group_size)
        setattr(parent, name.rpartition(".")[2], quantized)


def _quantized(
    weight: torch.Tensor, bias: torch.Tensor | None, name: str, bits: str, group_size: int
) -> QuantizedLinear:
    if bits == "int8":
        return QuantizedLinear(*grids.int8_per_row(weight), bias, None)
    _check_group(weight, name, group_size)
    return QuantizedLinear(*grids.int4_per_group(weight, group_size), bias, group_size)


def _check_group(weight: torch.Tensor, name: str, group_size: int) -> None:
    if weight.shape[1] % group_size:
        raise ConfigError(
            "quantization.group_size",
            got=f"{group_size} for {name} with {weight.shape[1]} input channels",
            expected="a divisor of the input channels",
            repair="Choose a smaller group_size, or int8, which has no groups.",
        )
