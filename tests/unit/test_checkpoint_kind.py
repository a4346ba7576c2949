"""What a file is, is in its first bytes; its name says nothing."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import at, tiny_model, write_gguf

from exporter.checkpoint import GGUFCheckpoint, open_checkpoint
from exporter.checkpoint.kind import kind_of
from exporter.errors import CheckpointError
from exporter.model.decoder import parameter_shapes


def torch_saved(zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def safetensors_bytes(tmp_path: Path, padding: int) -> bytes:
    save_file({"w": torch.zeros(3)}, tmp_path / "x", metadata={"p": "x" * padding})
    return (tmp_path / "x").read_bytes()


def test_kinds(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for data, kind in (
        (b"GGUF\x03\0\0\0", "gguf"),
        (torch_saved(zipped=True), "pickle"),
        (torch_saved(zipped=False), "pickle"),
        (pickle.dumps([1], protocol=2), "pickle"),
        (pickle.dumps([1], protocol=5), "pickle"),
        (safetensors_bytes(tmp_path, 0), "safetensors"),
        (b"", None),
        (b"GGU", None),
        (b'{"model_type": "llama"}', None),
        (b"\xff" * 8 + b"{", None),
    ):
        file.write_bytes(data)
        assert kind_of(file) == kind, data[:16]


def test_a_safetensors_header_whose_length_looks_like_a_pickles_first_byte(tmp_path: Path) -> None:
    """0x80, 2: protocol 2 of pickle, or the length 640."""
    lengths = {}
    for padding in range(0, 2048, 8):
        data = safetensors_bytes(tmp_path, padding)
        lengths[data[0]] = kind_of(tmp_path / "x")
    assert 0x80 in lengths and set(lengths.values()) == {"safetensors"}


@pytest.mark.parametrize("name", ["model.bin", "part01.bin", "model.safetensors", "model", "model.pt"])
def test_a_gguf_file_opens_whatever_its_name(tmp_path: Path, name: str) -> None:
    model = tiny_model("llama")
    checkpoint = open_checkpoint(at(write_gguf(tmp_path / name, model)))
    assert isinstance(checkpoint, GGUFCheckpoint) and checkpoint.path.name == name
    weights = checkpoint.load_state_dict(parameter_shapes(checkpoint.spec))
    assert torch.equal(weights["embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch_saved(zipped=True), ["pickled"]),
        (torch_saved(zipped=False), ["pickled"]),
        (b"", ["an empty file", "begins with b'GGUF'"]),
        (b"version https://git-lfs", ["a file that begins with b'version '", "begins with b'GGUF'"]),
        (None, ["a weight file without its config", "Name the directory"]),
    ],
)
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.bin"])
def test_a_file_of_another_kind_is_refused_for_what_it_is(
    tmp_path: Path, name: str, data: bytes | None, words: list[str]
) -> None:
    (tmp_path / name).write_bytes(safetensors_bytes(tmp_path, 0) if data is None else data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(at(tmp_path / name))
    for word in (f"checkpoint {name}", *words):
        assert word in str(caught.value)


def directory(path: Path, **files: bytes) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, data in files.items():
        (path / name.replace("__", ".")).write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model__safetensors": torch_saved(zipped=True)}, ["model.safetensors", "pickled"]),
        ({"model__safetensors": b"GGUF\x03\0\0\0"}, ["model.safetensors", "a GGUF file in a directory"]),
        ({"weights": torch_saved(zipped=False)}, ["weights", "pickled"]),
        ({"model__gguf": b"GGUF\x03\0\0\0"}, ["model.gguf", "a GGUF file in a directory", "Name the file itself"]),
        ({"pytorch_model__bin": b"no weights"}, ["a directory without weights"]),
    ],
)
def test_weights_in_a_directory_are_judged_by_their_bytes(
    tmp_path: Path, files: dict[str, bytes], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(at(directory(tmp_path, **files)))
    for word in words:
        assert word in str(caught.value)


def test_a_shard_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    index: dict[str, Any] = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    directory(
        tmp_path, **{"2__safetensors": torch_saved(zipped=True), "1__safetensors": safetensors_bytes(tmp_path, 0)}
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"checkpoint 2\.safetensors: got a pickled"):
        open_checkpoint(at(tmp_path))
