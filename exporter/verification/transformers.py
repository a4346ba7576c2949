"""Transformers as a reference: its own code and its own reading of the checkpoint, in float32.

At export its forward runs once with one layer's or one table's weights at a time (`TransformersByParts`), `verify
--model` has the whole model. Letters: n compared positions, V vocab_size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exporter.backends import Effort
from exporter.checkpoint import Checkpoint, GGUFCheckpoint
from exporter.progress import Detail
from exporter.spec import AttentionSpec, Comparison, ModelSpec
from exporter.verification.compare import TRANSFORMERS, Differences
from runtime_ref.session import Session

MOST_ENTRIES = 1024
"""Lists of a GGUF header that are longer say something of the vocabulary, not of the model."""


class NoReference(Exception):
    """Why Transformers cannot say what this model should."""


def _transformers() -> Any:
    import transformers  # a second that an export need not wait for before it must

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def transformers_config(checkpoint: Checkpoint) -> Any:
    """The config that Transformers makes of `checkpoint`.

    Raises:
        NoReference: it has no class for that model, or does not read all that the file says of it.
    """
    auto = _transformers()
    try:
        if isinstance(checkpoint, GGUFCheckpoint):
            with tempfile.TemporaryDirectory() as folder:
                _write_header(checkpoint.metadata, list(checkpoint.raw_tensors()), Path(folder) / "header.gguf")
                config = auto.AutoConfig.from_pretrained(folder, gguf_file="header.gguf", local_files_only=True)
            config.vocab_size, config._name_or_path = checkpoint.spec.vocab_size, checkpoint.name
        else:
            config = auto.AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
        known = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    except (ValueError, KeyError, NotImplementedError) as error:
        raise NoReference(f"it has no class for this model ({' '.join(str(error).split())[:200]})") from error
    except Exception as error:  # its own check of a config raises many kinds; ours has taken this one
        text = " ".join(str(error).split())[:200]
        raise NoReference(f"it does not read this config ({type(error).__name__}: {text})") from error
    if not known:
        raise NoReference(f"it has no causal language model for {config.model_type!r}")
    if isinstance(checkpoint, GGUFCheckpoint) and (assumed := _assumed(config, checkpoint.spec)):
        raise NoReference(f"it does not read from a GGUF {', '.join(assumed)}")
    return config


def _write_header(metadata: Mapping[str, Any], names: Sequence[str], path: Path) -> None:
    """A GGUF file of the same model without vocabulary and with one number in each tensor: of a whole one Transformers
    makes arrays of every token and score, 21 CPU seconds and 0.75 GB for the 262,144 of Gemma."""
    import numpy as np
    from gguf import GGUFValueType, GGUFWriter

    types = GGUFValueType
    kinds = {bool: types.BOOL, int: types.INT64, float: types.FLOAT64, str: types.STRING}
    writer = GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        entries = value if isinstance(value, list) else [value]
        if key == "general.architecture" or not 0 < len(entries) <= MOST_ENTRIES:
            continue
        kind = kinds[type(entries[0])]
        if isinstance(value, list):
            writer.add_key_value(key, value, types.ARRAY, kind)
        else:
            writer.add_key_value(key, value, kind)
    for name in names:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _assumed(config: Any, spec: ModelSpec) -> list[str]:
    """What Transformers takes from its defaults, since its table for GGUF leaves the keys out, and takes wrongly."""
    wrong = []
    if getattr(config, "final_logit_softcapping", None) != spec.final_logit_softcap:
        wrong.append("the softcap of the logits")
    attention = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if any(mixer.rope is not None and mixer.rope.scaling != "none" for mixer in attention):
        wrong.append("the scaling of RoPE")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if any(mixer.head_dim != head_dim for mixer in attention):
        wrong.append("the length of a head")
    scale = getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5
    if any(abs(mixer.scale / scale - 1) > 1e-6 for mixer in attention):
        wrong.append("the scale of attention")
    return wrong


class TransformersReference:
    """Logits of the checkpoint by Transformers' own code, its own reading of the file and its own cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises NoReference: Transformers does not know the model."""
        config = transformers_config(checkpoint)
        how: dict[str, Any] = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
        how |= {"gguf_file": checkpoint.path.name} if checkpoint.kind == "gguf" else {"use_safetensors": True}
        directory = checkpoint.path.parent if checkpoint.kind == "gguf" else checkpoint.path
        models = _transformers().AutoModelForCausalLM
        self.model = models.from_pretrained(str(directory), local_files_only=True, **how).eval()
        windows = [layer.mixer.window for layer in checkpoint.spec.layers if isinstance(layer.mixer, AttentionSpec)]
        # Of a window of 1 Transformers' cache keeps every key: ``keys[-window + 1 :]`` is all of them.
        self._has_cache = 1 not in windows

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 ``[len(ids), V]``, in one forward without a cache."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        """`count` greedy tokens after `ids`, and the logits ``[V]`` each was followed by."""
        seen, tokens, rows = list(ids), list[int](), list[torch.Tensor]()
        new, cache = seen, None
        for _ in range(count + 1):
            out = self.model(torch.tensor([new]), past_key_values=cache, use_cache=self._has_cache, logits_to_keep=1)
            rows.append(out.logits[0, -1].float())
            tokens.append(int(rows[-1].argmax()))
            seen.append(tokens[-1])
            new, cache = (seen[-1:], out.past_key_values) if self._has_cache else (seen, None)
        return tokens[:count], rows[1:]


def compare_with_transformers(
    session: Session, reference: TransformersReference, ids: Sequence[int], effort: Effort, detail: Detail
) -> list[Comparison]:
    """For each chunk length: the prompt's logits at every call, then greedy tokens of the reference one by one."""
    detail("reference logits")
    rows = reference.logits(ids)
    tokens, greedy_rows = reference.greedy(ids, effort.greedy)
    first = len(ids) - effort.tail - 1 if effort.tail else 0  # the first position whose next token counts
    targets = torch.tensor(list(ids[first + 1 :]))
    reference_nll = float(torch.nn.functional.cross_entropy(rows[first:-1].double(), targets))
    comparisons = []
    for chunk in sorted({min(chunk, session.manifest.max_prefill_chunk) for chunk in effort.chunks}):
        detail(f"chunks of {chunk}")
        differences = Differences(f"{TRANSFORMERS}, chunks of {chunk}", session.manifest.program.format)
        losses: list[float] = []
        session.reset()

        def observe(position: int, logits: torch.Tensor, differences: Differences = differences) -> None:
            if position >= len(ids):
                return
            differences.add(logits, rows[position])
            if first <= position < len(ids) - 1:
                losses.append(-float(torch.log_softmax(logits.double(), -1)[ids[position + 1]]))  # noqa: B023

        session.observer = observe
        logits = session.prefill(ids[: len(ids) - effort.tail], chunk)
        for token in ids[len(ids) - effort.tail :]:
            logits = session.decode(token)
        agreed = 0
        for token, want in zip(tokens, greedy_rows, strict=True):
            agreed += int(logits.argmax()) == token
            logits = session.decode(token)
            differences.add(logits, want)
        session.observer = None
        nll = {}
        if chunk == 1 or effort.tail:
            assert len(losses) == len(targets)
            nll = {"nll": sum(losses) / len(losses), "reference_nll": reference_nll}
        comparisons.append(differences.comparison(greedy_agreement=f"{agreed} of {effort.greedy}", **nll))
    return comparisons
