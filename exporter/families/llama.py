"""Llama. Meaning of the config: ``transformers.models.llama``.

A GGUF file of the ``llama`` architecture (Mistral's are too) stores query and key rows with the two halves of each head
interleaved, because llama.cpp rotates adjacent pairs there; they are put back into half-split order.
"""

from __future__ import annotations

from exporter.families.llama_like import COMMON_DEFAULTS, GGUF_NAMES, llama_like
from exporter.families.reading import never_slides
from exporter.families.tensors import Names, Piece, half_split
from exporter.spec import AttentionSpec, LayerSpec

DEFAULTS = COMMON_DEFAULTS | {"attention_bias": False, "mlp_bias": False}


def _gguf_names(layer: LayerSpec) -> Names:
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    return GGUF_NAMES | {
        f"attn_{x}.{kind}": Piece(f"mixer.{x}_proj.{kind}", (half_split(heads, mixer.head_dim),))
        for x, heads in (("q", mixer.num_attention_heads), ("k", mixer.num_key_value_heads))
        for kind in ("weight", "bias")
    }


FAMILY = llama_like("llama", defaults=DEFAULTS, layer_types=never_slides, gguf_names=_gguf_names)
