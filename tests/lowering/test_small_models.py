"""Models of few layers, short contexts and the smallest window: right programs, exported and verified in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import BOS, CHUNK, EOS, VOCAB, write_checkpoint, write_config
from tiny_models import one_thread  # noqa: F401

from exporter import pipeline
from exporter.config import load_config
from exporter.progress import Progress

BASE: dict[str, Any] = {
    "max_position_embeddings": 64, "vocab_size": VOCAB + 1, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "context", "dtype"),
    [
        ({"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 8}, 33, "float16"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 1}, 16, "int8"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 1, "layer_types": ["full_attention"]}, 8, "float32"),
        ({"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 4}, 2, "float32"),
    ],
    ids=["one layer", "a window of 1", "no window", "a context of 2"],
)
def test_a_small_model_is_exported_and_verified(
    tmp_path: Path, model: dict[str, Any], context: int, dtype: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", BASE | model)
    path = write_config(
        tmp_path / "c.yaml", checkpoint, max_context_length=context, max_prefill_chunk=min(CHUNK, context),
        cache={"dtype": dtype},
    )  # fmt: skip
    config = load_config(path)
    bundle = pipeline.export(config, tmp_path / "out", Progress.silent())
    assert bundle.manifest.max_context_length == context
    recorded = pipeline.verify_bundle(tmp_path / "out", None, Progress.silent())
    assert [one.reference for one in recorded] == ["float eager, as recorded"]
    full = pipeline.verify_bundle(tmp_path / "out", config, Progress.silent())
    assert len(full) > 3 and all(one.positions >= 1 for one in full)
