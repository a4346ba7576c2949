"""Tiny random models of every kind the spec can say, with fixed seeds.

"Config T" is 6 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16, window 8, vocabulary 97, float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch

from exporter.cache.interface import CacheKernels
from exporter.cache.plain import PlainKernels
from exporter.model.decoder import Decoder
from exporter.spec import (
    AttentionSpec,
    CachePolicy,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    ShortConvSpec,
    state_specs,
)

VOCAB, HIDDEN, HEAD_DIM, WINDOW = 97, 64, 16, 8
MLP = MLPSpec(intermediate_size=96, activation="silu")
MOE = MoESpec(
    num_experts=4, num_experts_per_tok=2, intermediate_size=32, activation="silu", routing="topk_softmax",
    router_bias=True, expert_bias=True, clamp_limit=1.0,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For modules that import it: matrices this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kernels_named(name: str) -> CacheKernels:
    if name == "plain":
        return PlainKernels()
    from exporter.backends.executorch.kernels import ExecutorchKernels, StockKernels

    return ExecutorchKernels() if name == "executorch" else StockKernels()


KERNELS = ("plain", "executorch", "stock")
CacheDType = Literal["float32", "float16", "int8"]
DTYPES: tuple[CacheDType, ...] = ("float32", "float16", "int8")


def attention(window: int | None = WINDOW, *, theta: float = 10_000.0, **changes: Any) -> AttentionSpec:
    head_dim = changes.get("head_dim", HEAD_DIM)
    fields = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "window": window,
        "scale": head_dim**-0.5, "rope": RopeSpec(theta=theta, rotary_dim=head_dim),
    }  # fmt: skip
    return AttentionSpec(**(fields | changes))


def model(
    *mixers: AttentionSpec | ShortConvSpec,
    feed_forward: MLPSpec | MoESpec = MLP,
    post_norms: bool = False,
    **changes: Any,
) -> ModelSpec:
    fields = {
        "family": "tiny", "vocab_size": VOCAB, "hidden_size": HIDDEN, "norm_eps": 1e-6, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    layers = tuple(LayerSpec(mixer=m, feed_forward=feed_forward, post_norms=post_norms) for m in mixers)
    return ModelSpec(**(fields | changes), layers=layers)


SLIDING = attention(WINDOW)
GLOBAL = attention(None, theta=1_000_000.0)
CONV = ShortConvSpec(kernel_size=3)
SPECS: dict[str, ModelSpec] = {
    "config T": model(*[SLIDING] * 5, GLOBAL),
    "all sliding": model(SLIDING, SLIDING),
    "all global": model(GLOBAL, GLOBAL),
    "window above the context": model(attention(1000), GLOBAL),
    "window 1": model(attention(1), attention(1), GLOBAL),
    "own heads for each kind": model(
        attention(8, num_attention_heads=6, num_key_value_heads=3, head_dim=8),
        attention(None, num_attention_heads=4, num_key_value_heads=1, head_dim=24),
    ),
    "two windows": model(attention(8), attention(5), GLOBAL),
    "gemma": model(
        attention(8, qk_norm=True, scale=0.2),
        attention(None, qk_norm=True, scale=0.2, logit_softcap=2.0),
        feed_forward=MLPSpec(intermediate_size=96, activation="gelu_tanh"),
        post_norms=True, embedding_scale=8.0, final_logit_softcap=5.0,
    ),
    "sinks and experts": model(
        attention(8, sinks=True, qkv_bias=True, output_bias=True),
        attention(None, sinks=True, qkv_bias=True, output_bias=True),
        feed_forward=MOE, tie_word_embeddings=False,
    ),
    "softcap": model(attention(8, logit_softcap=2.0), attention(None, logit_softcap=2.0)),
    "short convolution": model(CONV, attention(8), ShortConvSpec(kernel_size=4, bias=True), GLOBAL),
    "no rotation, part rotation": model(
        attention(8, rope=RopeSpec(theta=10_000.0, rotary_dim=8)), attention(None, rope=None)
    ),
}  # fmt: skip


def randomize(decoder: Decoder, seed: int = 0) -> Decoder:
    """Every parameter random, in float32; scores spread widely enough for a wrong mask to show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    return decoder.requires_grad_(False).eval()


def decoder_of(
    spec: ModelSpec,
    *,
    kernels: str = "plain",
    slack: int = 0,
    context: int = 192,
    initial_rows: int = 64,
    seed: int = 0,
    dtype: CacheDType = "float32",
    global_dtype: CacheDType | None = None,
) -> Decoder:
    policy = CachePolicy(ring_slack=slack, initial_rows=initial_rows, dtype=dtype, global_dtype=global_dtype)
    return randomize(Decoder(spec, state_specs(spec, policy, context), kernels_named(kernels)), seed)


def states_of(decoder: Decoder, fill: float = 0.0, rows: int | None = None) -> list[torch.Tensor]:
    """The caller's tensors; a growing one has `rows` rows, all it may ever have unless given. Integers, of which none
    is NaN, are filled with -128, which no quantiser stores."""
    shapes = [state.shape((rows or state.max_rows) if state.kind == "full" else None) for state in decoder.states]
    return [
        torch.full(shape, -128, dtype=torch.int8) if state.dtype == "int8" and math.isnan(fill) else
        torch.full(shape, fill, dtype=getattr(torch, state.dtype))
        for state, shape in zip(decoder.states, shapes, strict=True)
    ]  # fmt: skip


def token_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def call(decoder: Any, ids: Sequence[int], offset: int, states: Sequence[torch.Tensor], *flag: bool) -> torch.Tensor:
    """Logits [V] of one call; `flag` is `write_first` of an eager decoder, absent for an exported program."""
    positions = torch.zeros(1, offset + len(ids), dtype=torch.int64)
    arguments = (states, *flag) if flag else tuple(states)
    with torch.no_grad():
        return decoder(torch.tensor([list(ids)]), positions, *arguments)[0]


def agree(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, exactly: bool) -> bool:
    """Equal to the bit, or to float32's last bits, NaN where the other is NaN.

    ``llama::custom_sdpa`` of more than one query repeats its own result to the last bits only: the alignment of its
    scratch memory, which decides the order in which BLAS sums, is malloc's. Over one query it repeats exactly.
    """
    pairs = zip(ours, theirs, strict=True)
    if exactly:
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    # Last bits may round an integer of an int8 cache the other way.
    return all(torch.allclose(a.float(), b.float(), rtol=0, equal_nan=True,
                              atol=1.0 if a.dtype == torch.int8 else 5e-6 * max(1.0, b.nan_to_num().abs().max()))
               for a, b in pairs)  # fmt: skip


def play(
    decoder: Decoder, ids: Sequence[int], splits: Sequence[int], states: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Logits by position of each call's last token; one token goes through decode, more through prefill."""
    logits, offset = {}, 0
    for length in splits:
        chunk = ids[offset : offset + length]
        offset += length
        logits[offset - 1] = call(decoder, chunk, offset - length, states, length == 1)
    assert offset == len(ids)
    return logits
