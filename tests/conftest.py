"""Bundles exported once a run from tiny random checkpoints, by the command everybody uses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # The workers share the cores. OpenMP reads this when torch is imported.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

import pytest
import yaml
from filelock import FileLock
from hypothesis import settings
from tiny_checkpoints import tiny_model
from toy import BOS, EOS, VOCAB, byte_tokenizer

from exporter import pipeline
from exporter.config import load_config
from exporter.progress import Progress

pytest_plugins = ["skips"]

# Equal examples in every run: what CI finds, everybody finds.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

WINDOW, CONTEXT, CHUNK = 8, 160, 40

# Sliding, global, sliding: the smallest model in which a ring is read after another layer's write.
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": WINDOW, "max_position_embeddings": CONTEXT,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "vocab_size": VOCAB + 1,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": CONTEXT, "vocab_size": VOCAB + 1,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
INT4 = {"linear": "int4", "embedding": "int4", "head": "int4", "keep_int8": ["down_proj"]}
# All that the presets use at once.
MIXED = {
    "linear": "int4", "embedding": "int8_grouped", "head": "int4", "keep_int8": ["down_proj", "v_proj"],
    "smooth": True, "rounding": "gptq", "head_exact_rows": 8,
}  # fmt: skip


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face directory with random weights and a tokenizer of bytes."""
    settings = dict(config)
    model = tiny_model(settings.pop("model_type"), **settings)
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    return directory


def write_config(path: Path, checkpoint: Path, /, **changes: Any) -> Path:
    """A YAML file for `checkpoint`."""
    config = {
        "name": path.stem, "checkpoint": {"path": str(checkpoint)}, "max_context_length": CONTEXT,
        "max_prefill_chunk": CHUNK, "cache": {"initial_rows": 16},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(config | changes))
    return path


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """Fills a folder once a run, whichever of pytest-xdist's workers asks first: the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base

    def folder(name: str, fill: Callable[[Path], object]) -> Path:
        place, partial = base / f"once-{name}", base / f"once-{name}.partial"
        with FileLock(base / f"once-{name}.lock"):
            if not place.exists():
                shutil.rmtree(partial, ignore_errors=True)  # of a worker that failed
                partial.mkdir()
                fill(partial)
                partial.rename(place)
        return place

    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(once: Callable[..., Path]) -> Path:
    return once("gemma", lambda folder: write_checkpoint(folder, GEMMA))


@pytest.fixture(scope="session")
def exported(once: Callable[..., Path]) -> Callable[..., Path]:
    """Exports a checkpoint and returns the bundle; its YAML stands beside it as ``<bundle>.yaml``. Equal exports are
    one: a test that changes a bundle takes a copy."""

    def run(checkpoint: Path, name: str, **changes: Any) -> Path:
        def fill(folder: Path) -> None:
            config = write_config(folder / f"{name}.yaml", checkpoint, **changes)
            pipeline.export(load_config(config), folder / name, Progress.silent())

        identity = hashlib.sha256(json.dumps([str(checkpoint), changes], sort_keys=True).encode()).hexdigest()
        return once(f"{name}-{identity[:8]}", fill) / name

    return run


@pytest.fixture(scope="session")
def tiny_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """Gemma 3, float32, rings of exactly the window."""
    return exported(tiny_checkpoint, "tiny")


@pytest.fixture(scope="session")
def slack_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """Rings of window + 3 rows, global layers growing by half."""
    return exported(tiny_checkpoint, "slack", cache={"ring_slack": 3, "initial_rows": 16, "growth": "1.5x"})


@pytest.fixture(scope="session")
def llama_bundle(exported: Callable[..., Path], once: Callable[..., Path]) -> Path:
    """All-global, untied head."""
    return exported(once("llama_checkpoint", lambda folder: write_checkpoint(folder, LLAMA)), "llama")


@pytest.fixture(scope="session")
def int8_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    return exported(tiny_checkpoint, "int8", executorch={"quantization": "accurate"})


@pytest.fixture(scope="session")
def int8_cache_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """Float weights over int8 caches, rings of window + 3 rows."""
    cache = {"dtype": "int8", "ring_slack": 3, "initial_rows": 16}
    return exported(tiny_checkpoint, "int8_cache", cache=cache)


@pytest.fixture(scope="session")
def half_cache_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """Float weights over float16 caches, rings of window + 3 rows."""
    cache = {"dtype": "float16", "ring_slack": 3, "initial_rows": 16}
    return exported(tiny_checkpoint, "half_cache", cache=cache)


@pytest.fixture(scope="session")
def int8_global_cache_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """Float weights over float16 rings of window + 3 rows and int8 caches of global layers."""
    cache = {"dtype": "float16", "global_dtype": "int8", "ring_slack": 3, "initial_rows": 16}
    return exported(tiny_checkpoint, "int8_global_cache", cache=cache)


@pytest.fixture(scope="session")
def int4_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    return exported(tiny_checkpoint, "int4", executorch={"quantization": INT4})


@pytest.fixture(scope="session")
def coreml_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    """A Core ML package with int8 weights."""
    return exported(tiny_checkpoint, "apple", targets=["coreml"], coreml={"weights": "int8"})


@pytest.fixture(scope="session")
def mixed_bundle(exported: Callable[..., Path], tiny_checkpoint: Path) -> Path:
    return exported(tiny_checkpoint, "mixed", executorch={"quantization": MIXED})
