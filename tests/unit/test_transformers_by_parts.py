"""Transformers with one part's weights at a time says what it says with all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import at, tiny_model, write_gguf
from tiny_models import one_thread, token_ids  # noqa: F401
from toy import toy_manifest

from exporter import pipeline
from exporter.cache.plain import PlainKernels
from exporter.checkpoint import Checkpoint, GGUFCheckpoint, open_checkpoint
from exporter.errors import VerificationError
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.progress import Progress
from exporter.spec import Manifest, state_specs
from exporter.verification import (
    TRANSFORMERS,
    Calls,
    NoReference,
    Run,
    compare_model_with_transformers,
    run_by_layers,
)
from exporter.verification.by_parts import TransformersByParts
from exporter.verification.transformers import transformers_config

IDS, POSITIONS = token_ids(40), [0, 1, 3, 20, 39]
# Of a head of 256 Transformers takes what a GGUF does not say as it is.
GEMMA_GGUF = {"head_dim": 256, "query_pre_attn_scalar": 256, "final_logit_softcapping": None}


def saved(path: Path, model: Any, **how: Any) -> Checkpoint:
    model.save_pretrained(path, **how)
    return open_checkpoint(at(path))


def gguf(path: Path, model: Any) -> Checkpoint:
    return open_checkpoint(at(write_gguf(path, model, tokens=97)))


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0, POSITIONS]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["gemma3_text", "llama", "mistral", "qwen2", "qwen3"])
def test_a_directory_in_shards(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = tiny_model(model_type, tie_word_embeddings=tied)
    checkpoint = saved(tmp_path, model, max_shard_size="50KB")
    assert len(checkpoint.files) > 4
    torch.testing.assert_close(TransformersByParts(checkpoint).logits(IDS, POSITIONS), expected(model), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("model_type", "changes"), [("gemma3_text", GEMMA_GGUF), ("llama", {}), ("qwen2", {})])
def test_a_gguf_with_its_rows_in_another_order(
    tmp_path: Path, model_type: str, changes: dict[str, Any], tied: bool
) -> None:
    plain = {"attention_bias": False, "mlp_bias": False} if model_type == "llama" else {"use_sliding_window": False}
    model = tiny_model(model_type, **(plain | changes), tie_word_embeddings=tied)
    checkpoint = gguf(tmp_path / "tiny.gguf", model)
    torch.testing.assert_close(
        TransformersByParts(checkpoint).logits(IDS, POSITIONS), expected(model), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_no_other_part_has_its_weights(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3_text", **GEMMA_GGUF)
    checkpoint = saved(tmp_path, model) if kind == "directory" else gguf(tmp_path / "tiny.gguf", model)
    parts: list[str] = []

    def part_of(name: str) -> str:
        return ".".join(name.split(".")[:3]) if ".layers." in name else name

    by_parts = TransformersByParts(checkpoint)
    load = by_parts._loading.load

    def watched(tensors: dict[str, torch.Tensor]) -> None:
        assert all(parameter.is_meta for parameter in by_parts.model.parameters())
        load(tensors)
        there = {part_of(name) for name, parameter in by_parts.model.named_parameters() if not parameter.is_meta}
        assert len(there) == 1, there
        parts.extend(there)

    monkeypatch.setattr(by_parts._loading, "load", watched)
    by_parts.logits(IDS, POSITIONS)
    assert parts == ["model.embed_tokens.weight", *(f"model.layers.{n}" for n in range(6)), "model.norm.weight",
                     "model.embed_tokens.weight"]  # fmt: skip
    assert all(parameter.is_meta for parameter in by_parts.model.parameters())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("marsupial", "it has no class for this model .*`marsupial`"),
        ("vit", "it has no causal language model for 'vit'"),
    ],
)
def test_a_class_it_lacks(tmp_path: Path, model_type: str, reason: str) -> None:
    """What a family of ours reads need not be a model of Transformers."""
    checkpoint = saved(tmp_path, tiny_model("llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with pytest.raises(NoReference, match=reason):
        transformers_config(checkpoint)


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({}, "the softcap of the logits, the scale of attention"),
        ({"head_dim": 256, "query_pre_attn_scalar": 256}, "the softcap of the logits"),
        ({"final_logit_softcapping": None}, "the scale of attention"),
    ],
)
def test_what_it_does_not_read_from_a_gguf(tmp_path: Path, changes: dict[str, Any], unread: str) -> None:
    checkpoint = gguf(tmp_path / "tiny.gguf", tiny_model("gemma3_text", **changes))
    with pytest.raises(NoReference, match=f"does not read from a GGUF {unread}$"):
        transformers_config(checkpoint)


def test_a_config_without_the_vocabulary_is_the_files_own(tmp_path: Path) -> None:
    from transformers import AutoConfig

    write_gguf(tmp_path / "tiny.gguf", tiny_model("gemma3_text", **GEMMA_GGUF), tokens=2000)
    checkpoint = open_checkpoint(at(tmp_path / "tiny.gguf"))
    assert isinstance(checkpoint, GGUFCheckpoint) and len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 2000
    ours = transformers_config(checkpoint).to_dict()
    theirs = AutoConfig.from_pretrained(str(tmp_path), gguf_file="tiny.gguf").to_dict()
    assert ours.pop("vocab_size") == 97 and theirs.pop("vocab_size") == 2000
    del ours["_name_or_path"]
    assert {key: value for key, value in ours.items() if theirs.get(key) != value} == {}


def float_run(checkpoint: Checkpoint, calls: Calls) -> tuple[Manifest, Run]:
    manifest = toy_manifest(context=64, chunk=16)
    manifest = manifest.model_copy(update={"model": checkpoint.spec})
    manifest = manifest.with_states(state_specs(checkpoint.spec, manifest.cache, 64))
    decoder = Decoder.unread(checkpoint.spec, manifest.states, PlainKernels())
    return manifest, run_by_layers(manifest, decoder, calls, checkpoint.reader(parameter_shapes(checkpoint.spec)))


CALLS = Calls(IDS, [1, 1, 2, 7, 16, 4, 1, 1])


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama"])
def test_a_model_that_was_read_right_passes(tmp_path: Path, model_type: str) -> None:
    """Over a window of 8, which the text goes through four times."""
    checkpoint = saved(tmp_path, tiny_model(model_type))
    manifest, original = float_run(checkpoint, CALLS)
    comparison, few = compare_model_with_transformers(checkpoint, original, CALLS)
    assert comparison.reference == TRANSFORMERS and comparison.format is None
    assert comparison.positions == 8 and few == Calls(IDS[:33], CALLS.pieces)
    assert comparison.max_abs_difference <= 2e-5 * comparison.largest_logit  # what parity is held to
    recorded = pipeline.verify_model(manifest, checkpoint, original, CALLS, Progress.silent())
    assert recorded.verification == (*manifest.verification, comparison) and recorded.not_compared is None


@pytest.mark.parametrize("fault", ["window", "rope", "norm", "swapped"])
def test_a_model_that_was_read_wrong_is_refused(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(tmp_path, tiny_model("mistral"))
    if fault == "swapped":
        read = checkpoint.reader

        def wrong(expected: Any) -> Any:
            own, swapped = read(expected), {"gate_proj": "up_proj", "up_proj": "gate_proj"}
            return lambda name: own(".".join(swapped.get(part, part) for part in name.split(".")))

        monkeypatch.setattr(checkpoint, "reader", wrong)
    else:
        layers = list(checkpoint.spec.layers)
        mixer = layers[1].mixer
        if fault == "window":
            layers[1] = layers[1].model_copy(update={"mixer": mixer.model_copy(update={"window": 9})})
        elif fault == "rope":
            rope = mixer.rope.model_copy(update={"theta": 1.1 * mixer.rope.theta})
            layers[1] = layers[1].model_copy(update={"mixer": mixer.model_copy(update={"rope": rope})})
        changes = {"norm_eps": 1e-5} if fault == "norm" else {"layers": tuple(layers)}
        checkpoint.spec = checkpoint.spec.model_copy(update=changes)
    manifest, original = float_run(checkpoint, CALLS)
    with pytest.raises(VerificationError, match=r"against transformers: got max \|difference\| / largest logit"):
        pipeline.verify_model(manifest, checkpoint, original, CALLS, Progress.silent())


def test_why_nothing_was_compared_is_recorded(tmp_path: Path) -> None:
    checkpoint = gguf(tmp_path / "tiny.gguf", tiny_model("gemma3_text"))
    manifest, original = float_run(checkpoint, CALLS)
    recorded = pipeline.verify_model(manifest, checkpoint, original, CALLS, Progress.silent())
    assert recorded.verification == manifest.verification
    assert recorded.not_compared is not None and "does not read from a GGUF the softcap" in recorded.not_compared
