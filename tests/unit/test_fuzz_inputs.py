"""Inputs that are nearly right end in success or in one typed error, never in another exception."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import ODD, mutated
from tiny_checkpoints import CONFIGS, tiny_model
from toy import toy_bundle

from exporter.architecture import read_planned
from exporter.bundle import read_bundle
from exporter.checkpoint.gguf_header import read_header
from exporter.cli.app import parse_overrides
from exporter.config import load_config
from exporter.errors import UserError
from exporter.families import from_gguf, from_hf
from exporter.graph.contract_file import load_contract

MANY = settings(max_examples=1000, deadline=None)
ARCHITECTURES = Path(__file__).parents[2] / "configs" / "architectures"
ROPES: list[dict[str, Any]] = [
    {}, {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}},
    {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
]  # fmt: skip


@cache
def hf_config(model_type: str) -> dict[str, Any]:
    return dict(json.loads(tiny_model(model_type).config.to_json_string()))


@MANY
@given(data=st.data(), model_type=st.sampled_from(sorted(CONFIGS)), rope=st.sampled_from(ROPES))
def test_config_json(data: st.DataObject, model_type: str, rope: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        from_hf(data.draw(mutated(hf_config(model_type) | copy.deepcopy(rope))))


def gguf_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("tiny")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_feed_forward_length(8)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_token_list(["a", "b"])
        writer.add_array("llama.x", [1, 2, 3])
        writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
        writer.add_tensor("token_embd.weight", np.ones((2, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


GGUF = gguf_file()
NUMBERS = st.one_of(st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]), st.integers(0, 2**16))


@MANY
@given(place=st.integers(4, len(GGUF) - 8), number=NUMBERS, size=st.sampled_from([1, 4, 8]), cut=st.booleans())
def test_gguf_bytes(place: int, number: int, size: int, cut: bool) -> None:
    changed = bytearray(GGUF)
    changed[place : place + size] = number.to_bytes(8, "little")[:size]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UserError):
        path = Path(folder, "m.gguf")
        path.write_bytes(changed[:place] if cut else changed)
        header = read_header(path)
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        from_gguf(header.metadata, shapes, lambda name: pytest.fail("a tensor was read"))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    bundle = toy_bundle(tmp_path_factory.mktemp("fuzz") / "toy", template="x")
    return bundle.path, json.loads((bundle.path / "manifest.json").read_text())


@MANY
@given(data=st.data())
def test_manifest(manifest: tuple[Path, dict[str, Any]], data: st.DataObject) -> None:
    path, values = manifest
    (path / "manifest.json").write_text(json.dumps(data.draw(mutated(values))))
    with contextlib.suppress(UserError):
        read_bundle(path)


CONFIG = {
    "name": "x", "checkpoint": {"path": "nowhere", "license": "MIT"}, "max_context_length": 64, "max_prefill_chunk": 16,
    "targets": ["executorch", "coreml"], "cache": {"dtype": "float16", "ring_slack": 2, "growth": "1.5x"},
    "executorch": {"quantization": {"linear": "int4", "keep_int8": ["v_proj"]}, "kernels": "stock"},
    "coreml": {"weights": "int4", "keep_int8": ["lm_head"]}, "coreai": {"weights": "float16"},
}  # fmt: skip
YAML_PARTS = [
    "a: ", "- ", "[", "]", "{", "}", "&x ", "*x", "? ", "!!python/object:os.system ", "|\n", "\n", "  ", "'", '"',
    "1e999", "0x1F", "2026-12-01", "<<: ", "name", "\t", "%YAML 1.1\n",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(YAML_PARTS)).map("".join),
)


KEYS = ["name", "checkpoint", "checkpoint.path", "cache.dtype", "executorch.quantization", "a.b", ""]


def read_yaml(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_bytes(content)
        for read in (load_config, read_planned, load_contract):
            with contextlib.suppress(UserError):
                read(path)


@MANY
@given(data=st.data())
def test_yaml_of_an_export(data: st.DataObject) -> None:
    read_yaml(yaml.safe_dump(data.draw(mutated(CONFIG))).encode())


@MANY
@given(text=TEXTS)
def test_yaml_of_any_text(text: str) -> None:
    read_yaml(text.encode("utf-8", "surrogatepass"))


@MANY
@given(content=st.binary(max_size=20))
def test_yaml_of_any_bytes(content: bytes) -> None:
    read_yaml(content)


def test_yaml_that_grows_or_nests_without_end() -> None:
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))
    read_yaml(f"a0: &a0 [x]\n{levels}\nname: *a8\n".encode())
    read_yaml(b"[" * 5000)
    read_yaml(b"name: " + b"9" * 5000)
    read_yaml(b"a: &a [*a]\nname: *a\n")


@MANY
@given(data=st.data())
def test_yaml_of_an_architecture(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(ARCHITECTURES.glob("*.yaml"))))
    read_yaml(yaml.safe_dump(data.draw(mutated(yaml.safe_load(file.read_text())))).encode())


@MANY
@given(pairs=st.lists(st.one_of(st.text(max_size=12), TEXTS.map(lambda text: f"a.b={text}")), max_size=3))
def test_overrides(pairs: list[str]) -> None:
    with contextlib.suppress(UserError):
        parse_overrides(pairs)
    path = Path(tempfile.gettempdir(), "never-there.yaml")
    with contextlib.suppress(UserError), contextlib.redirect_stdout(io.StringIO()):
        load_config(path, {"name": pairs})


@MANY
@given(key=st.sampled_from(KEYS), value=ODD)
def test_overrides_of_a_config(config_file: Path, key: str, value: Any) -> None:
    with contextlib.suppress(UserError):
        load_config(config_file, {key: value})


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path
