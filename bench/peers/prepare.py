"""The inputs of every peer, made once per model: a Hugging Face checkpoint, token ids, and float32's log-probabilities.

The weights are those of the model's GGUF, dequantised to float32; the tokenizer is the exporter's. The ids are English
text, repeated where it is too short. Run in the project's own environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from catalogue import LOG_PROBABILITIES

from exporter.checkpoint import open_checkpoint
from exporter.config import load_config
from exporter.english import english_ids
from exporter.reference import TransformersReference
from exporter.tokenizer import write_tokenizer
from runtime_ref.bench import SCORE_PREFIX, SCORED

ROOT = Path(__file__).resolve().parent.parent.parent
IDS = 33000


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the keys that Transformers before 5.0 reads: the bases of RoPE and the dtype, under their old
    names."""
    ropes = config.get("rope_parameters") or {}
    full, sliding = ropes.get("full_attention", ropes), ropes.get("sliding_attention")
    older: dict[str, Any] = {"rope_theta": full["rope_theta"], "torch_dtype": "float32"}
    if sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    return {**older, **config}


def plain(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same float32 weights in a model without its record of the GGUF, with which Transformers refuses to save
    it."""
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    return fresh


def write_log_probabilities(reference: TransformersReference, ids: list[int], file: Path) -> float:
    """Write float32's log-probabilities at the scored positions to `file`, [`SCORED`, vocab] in float16.

    Returns:
        The mean negative log-likelihood of the true tokens there.
    """
    logits = reference.logits(ids[: SCORE_PREFIX + SCORED])[SCORE_PREFIX - 1 : -1]
    true = torch.tensor(ids[SCORE_PREFIX : SCORE_PREFIX + SCORED])
    out = np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=tuple(logits.shape))
    total, written = 0.0, 0
    for rows, own in zip(logits.split(100), true.split(100), strict=True):
        expected = torch.log_softmax(rows, dim=-1)
        total -= float(expected.gather(1, own[:, None]).sum())
        out[written : written + len(rows)] = expected.numpy()
        written += len(rows)
    out.flush()
    return total / len(true)


def prepare(model: str, directory: Path) -> None:
    """Write ``checkpoint/``, ``log_probabilities.npy`` and ``reference.json`` (ids, NLL, the GGUF's path) into
    `directory`."""
    source = open_checkpoint(load_config(ROOT / "configs" / f"{model}.yaml").checkpoint)
    folder = directory / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    spec = write_tokenizer(source, folder)
    ids = english_ids(folder / "tokenizer.json", spec, IDS)
    ids = (ids * (IDS // len(ids) + 1))[:IDS]
    reference = TransformersReference(source)
    plain(reference.model).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(older_config(json.loads(config.read_text())), indent=2))
    likelihood = write_log_probabilities(reference, ids, directory / LOG_PROBABILITIES)
    found = {"ids": ids, "nll": likelihood, "gguf": str(source.path)}
    # Written last: a directory that has it is complete.
    (directory / "reference.json").write_text(json.dumps(found))


if __name__ == "__main__":
    prepare(sys.argv[1], Path(sys.argv[2]))
