"""A slow and obvious model that keeps the calling convention, and an uncached oracle of the same model.

Every layer reads x, mixes it over time and adds the result; positions enter through a sinusoid, so a wrong offset
shows. `ring` and `full` layers attend, `conv` layers sum their last inputs with weights. The cached programs loop over
positions and look rows up one by one; the oracle recomputes the whole sequence under a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import tokenizers
import torch
from recipes import recipe_of
from torch import Tensor

from exporter.backends.executorch.options import ExecutorchOptions
from exporter.bundle import Bundle, write_bundle
from exporter.spec import (
    PROGRAMS,
    AttentionSpec,
    CachePolicy,
    LayerSpec,
    Manifest,
    MethodSpec,
    MLPSpec,
    ModelSpec,
    ProgramKind,
    ProgramSpec,
    ShortConvSpec,
    SourceSpec,
    TokenizerSpec,
    state_specs,
)
from runtime_ref.programs import EagerProgram

DIM, KERNEL = 8, 3
BOS, EOS, END_OF_TURN = 256, 257, 258
VOCAB = 259
QKV = tuple[Tensor, Tensor, Tensor]


def toy_manifest(
    kinds: Sequence[str] = ("ring", "full"), *, window: int = 8, slack: int = 0, context: int = 96, chunk: int = 16,
    dtype: Literal["float32", "int8"] = "float32",
) -> Manifest:  # fmt: skip
    """A manifest whose layers are `kinds`; full caches start at 4 rows, so that every test grows them."""
    mlp = MLPSpec(intermediate_size=1, activation="silu")
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {
        "ring": AttentionSpec(
            num_attention_heads=1, num_key_value_heads=1, head_dim=DIM, window=window, scale=1.0, rope=None
        ),
        "full": AttentionSpec(
            num_attention_heads=1, num_key_value_heads=1, head_dim=DIM, window=None, scale=1.0, rope=None
        ),
        "conv": ShortConvSpec(kernel_size=KERNEL),
    }
    model = ModelSpec(
        family="toy", vocab_size=VOCAB, hidden_size=DIM, norm_eps=1e-6, tie_word_embeddings=True,
        layers=tuple(LayerSpec(mixer=mixers[kind], feed_forward=mlp) for kind in kinds),
        max_position_embeddings=context,
    )  # fmt: skip
    policy = CachePolicy(dtype=dtype, ring_slack=slack, initial_rows=4)
    methods = {
        name: MethodSpec(
            write_first=kind.write_first, logits=kind.logits, inputs=(), outputs=(), dims={}, mutates=()
        )
        for name, kind in PROGRAMS.items()
    }  # fmt: skip
    return Manifest(
        name="toy", created="2026-01-01T00:00:00Z", model=model, cache=policy,
        max_context_length=context, max_prefill_chunk=chunk, dtype="float32",
        source=SourceSpec(kind="safetensors", name="toy", license=None, files={"model.safetensors": "0" * 64}),
        tokenizer=TokenizerSpec(
            bos_token_id=BOS, eos_token_ids=(EOS, END_OF_TURN), add_bos=True, has_chat_template=True
        ),
        programs=(
            ProgramSpec(
                format="executorch", file="model.pte", options=ExecutorchOptions().model_dump(mode="json"),
                weights="float32", recipe=recipe_of(model, ExecutorchOptions()), layout="per_layer",
                max_kl_divergence=0.05,
                states=state_specs(model, policy, context), methods=methods, runtime="executorch 0", operators=(),
            ),
        ),
        graph_checks=(), verification=(), versions={}, files={},
    )  # fmt: skip


def embed(ids: Sequence[int], first_position: int) -> Tensor:
    """[len(ids), DIM]: a fixed random row a token plus a sinusoid of the position."""
    table = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(first_position, first_position + len(ids), dtype=torch.float32)[:, None]
    return table[list(ids)] + torch.sin(positions * torch.linspace(0.1, 2.0, DIM))


def weights(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value matrices, [DIM, DIM] each."""
    q, k, v = torch.randn(3, DIM, DIM, generator=torch.Generator().manual_seed(100 + layer)) / DIM**0.5
    return q, k, v


def head(x: Tensor) -> Tensor:
    """Logits [VOCAB] of one token's x [DIM]."""
    return torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(2)) @ x


def oracle(manifest: Manifest, ids: Sequence[int]) -> Tensor:
    """Logits of every token, [len(ids), VOCAB], without any cache."""
    x = embed(ids, 0)
    i = torch.arange(len(ids))
    for index, layer in enumerate(manifest.model.layers):
        q, k, v = weights(index)
        if isinstance(layer.mixer, ShortConvSpec):
            padded = torch.cat([torch.zeros(KERNEL - 1, DIM), x])
            x = x + sum((padded[n : n + len(ids)] * v[n] for n in range(KERNEL)), torch.zeros(()))
            continue
        seen = i[None] <= i[:, None]
        if layer.mixer.window is not None:
            seen &= i[None] > i[:, None] - layer.mixer.window
        scores = ((x @ q) @ (x @ k).T).masked_fill(~seen, -torch.inf)
        x = x + scores.softmax(1) @ (x @ v)
    return torch.stack([head(row) for row in x])


def toy_program(manifest: Manifest) -> EagerProgram:
    """The same model with the caller's caches: `prefill` reads a ring before it writes, `main` writes first."""

    def run(kind: ProgramKind, input_ids: Tensor, position_ids: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        ids = input_ids[0].tolist()
        offset = position_ids.shape[1] - len(ids)
        tensors = {spec.name: state[0] for spec, state in zip(manifest.states, states, strict=True)}
        specs = {spec.name: spec for spec in manifest.states}
        x = embed(ids, offset)
        for index, layer in enumerate(manifest.model.layers):
            q, k, v = weights(index)
            if isinstance(layer.mixer, ShortConvSpec):
                x = x + convolve(x, v, tensors[f"layer_{index}_inputs"])
                continue
            keys, values = (tensors[f"layer_{index}_{role}"].squeeze(1) for role in ("keys", "values"))
            window = specs[f"layer_{index}_keys"].window
            arguments = ((x @ q, x @ k, x @ v), keys, values, offset)
            if window is None:
                x = x + attend_full(*arguments)
            elif kind.write_first:
                x = x + main_ring(*arguments, window)
            else:
                x = x + prefill_ring(*arguments, window)
        return head(x[-1])[None]

    def method(kind: ProgramKind) -> Callable[..., Tensor]:
        return lambda ids, positions, *states: run(kind, ids, positions, states)

    return EagerProgram({name: method(kind) for name, kind in PROGRAMS.items()})


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    return (torch.stack(list(keys)) @ query).softmax(0) @ torch.stack(list(values))


def attend_full(qkv: QKV, keys: Tensor, values: Tensor, offset: int) -> Tensor:
    q, k, v = qkv
    for n in range(len(q)):
        keys[offset + n], values[offset + n] = k[n], v[n]  # fails where the rows were not grown
    return torch.stack(
        [attend(q[n], list(keys[: offset + n + 1]), list(values[: offset + n + 1])) for n in range(len(q))]
    )


def prefill_ring(qkv: QKV, keys: Tensor, values: Tensor, offset: int, window: int) -> Tensor:
    q, k, v = qkv
    capacity = len(keys)
    rows = {
        p: (keys[p % capacity].clone(), values[p % capacity].clone()) for p in range(max(0, offset - capacity), offset)
    }
    rows |= {offset + n: (k[n], v[n]) for n in range(len(q))}
    out = []
    for position in range(offset, offset + len(q)):
        visible = [rows[p] for p in range(max(0, position - window + 1), position + 1)]
        out.append(attend(q[position - offset], [row[0] for row in visible], [row[1] for row in visible]))
    for n in range(len(q)):
        keys[(offset + n) % capacity], values[(offset + n) % capacity] = k[n], v[n]
    return torch.stack(out)


def main_ring(qkv: QKV, keys: Tensor, values: Tensor, offset: int, window: int) -> Tensor:
    q, k, v = qkv
    capacity = len(keys)
    keys[offset % capacity], values[offset % capacity] = k[0], v[0]
    if capacity == window:
        slots = list(range(min(offset + 1, window)))
    else:
        held = [offset - ((offset - slot) % capacity) for slot in range(capacity)]
        slots = [slot for slot, p in enumerate(held) if p >= 0 and p > offset - window]
    return attend(q[0], list(keys[slots]), list(values[slots]))[None]


def convolve(x: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
    everything = torch.cat([inputs, x])
    inputs.copy_(everything[-(KERNEL - 1) :])
    return torch.stack(
        [sum((everything[n + i] * weight[i] for i in range(KERNEL)), torch.zeros(())) for n in range(len(x))]
    )


def byte_tokenizer() -> tokenizers.Tokenizer:
    """256 byte tokens, BOS, EOS, end of turn; its own post-processing adds a BOS, as Gemma's and Llama's do."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<end_of_turn>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def toy_bundle(
    directory: Path, manifest: Manifest | None = None, template: str | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Bundle:  # fmt: skip
    """A bundle directory whose program file is no program, with further `files`."""
    with write_bundle(directory) as writer:
        for name, content in {"model.pte": b"no program", **files}.items():
            (writer.path / name).parent.mkdir(parents=True, exist_ok=True)
            (writer.path / name).write_bytes(content)
        (writer.path / "tokenizer").mkdir()
        byte_tokenizer().save(str(writer.path / "tokenizer" / "tokenizer.json"))
        (writer.path / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
        if template is not None:
            (writer.path / "tokenizer" / "chat_template.jinja").write_text(template)
        manifest = manifest or toy_manifest()
        tokenizer = manifest.tokenizer.model_copy(update={"has_chat_template": template is not None})
        return writer.finish(manifest.model_copy(update={"tokenizer": tokenizer}))
