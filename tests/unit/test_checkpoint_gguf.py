"""GGUF files, and files that are joined from parts shipped in packages."""

import random
import resource
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_checkpoints import CONFIGS, at, decoder_logits, gguf_tensors, tiny_model, write_gguf

from exporter.checkpoint import GGUFCheckpoint, open_checkpoint
from exporter.checkpoint.gguf_header import read_header
from exporter.checkpoint.source import join_parts, sha256_file
from exporter.config import CheckpointConfig
from exporter.errors import CheckpointError, UserError
from exporter.model.decoder import parameter_shapes

IDS = [5, 17, 96, 3, 3, 41, 60, 2, 88, 9, 10, 11]
# What llama.cpp's GGUF of each family cannot say: Qwen2's windows, Gemma's unusual scale.
AS_GGUF: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
}


def load(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(at(path))
    return checkpoint.load_state_dict(parameter_shapes(checkpoint.spec))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFCheckpoint, "_read", lambda *_: pytest.fail("a tensor was read"))
        load(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("model_type", AS_GGUF)
def test_spec_and_weights_equal_the_hugging_face_directory(tmp_path: Path, model_type: str) -> None:
    """The oracle is the same model through the other reader, which is held to Transformers elsewhere."""
    model = tiny_model(model_type, **AS_GGUF[model_type])
    model.save_pretrained(tmp_path / "hf")
    checkpoint = open_checkpoint(at(write_gguf(tmp_path / "tiny.gguf", model)))
    other = open_checkpoint(at(tmp_path / "hf"))
    family = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    assert checkpoint.spec.family == family
    assert checkpoint.spec == other.spec
    shapes = parameter_shapes(checkpoint.spec)
    ours, theirs = checkpoint.load_state_dict(shapes), other.load_state_dict(shapes)
    assert list(ours) == list(theirs) == list(shapes)
    for key in shapes:
        assert torch.equal(ours[key], theirs[key]), key


def test_logits_of_a_permuted_llama_equal_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    ours = decoder_logits(open_checkpoint(at(path)).spec, load(path), IDS)
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.F16, Type.BF16])
def test_quantised_tensors_come_back_as_the_package_dequantises_them(tmp_path: Path, kind: Type) -> None:
    model = tiny_model("gemma3_text")
    names = {"token_embd.weight": kind, "blk.2.attn_k.weight": kind, "blk.5.ffn_down.weight": kind}
    path = write_gguf(tmp_path / "tiny.gguf", model, types=names)
    state, plain = load(path), gguf_tensors(model)
    canonical = {
        "token_embd.weight": "embed_tokens.weight",
        "blk.2.attn_k.weight": "layers.2.mixer.k_proj.weight",
        "blk.5.ffn_down.weight": "layers.5.feed_forward.down_proj.weight",
    }
    for name, ours in canonical.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(plain[name], kind), kind)
        assert state[ours].dtype == torch.float32
        np.testing.assert_array_equal(state[ours].numpy(), expected.reshape(plain[name].shape))
        assert not np.array_equal(expected.reshape(plain[name].shape), plain[name])
    np.testing.assert_array_equal(state["norm.weight"].numpy(), plain["output_norm.weight"])


def test_the_header_agrees_with_the_packages_own_reader(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_model("gemma3_text"), types={"token_embd.weight": Type.Q8_0}, tokens=97
    )
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (ours.type, ours.offset, ours.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
    assert len(header.tensors) == len(reader.tensors)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_file(tmp_path: Path, fraction: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    refused(path, "tiny.gguf")
    if fraction == 0.999:
        refused(path, "ends at byte", "truncated")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"GGUF", b"GGUF\x01\0\0\0", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_files_that_are_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    refused(path, "model.gguf", "GGUF")


def test_a_damaged_header_is_a_users_error_or_another_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tokens=97)
    good, source = path.read_bytes(), random.Random(0)
    end = good.index(b"output_norm.weight")
    refusals = 0
    for _ in range(200):
        data = bytearray(good)
        data[source.randrange(end)] = source.choice((0, 255, source.randrange(256)))
        path.write_bytes(data)
        try:
            open_checkpoint(at(path))
        except UserError:
            refusals += 1
    assert refusals > 100


def test_missing_unexpected_and_misshaped_tensors(tmp_path: Path) -> None:
    extra = {"blk.0.surprise.weight": np.zeros(3, np.float32), "blk.1.ffn_norm.weight": np.zeros(65, np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), drop=("blk.0.ffn_up.weight",), extra=extra)
    refused(
        path,
        "1 missing tensors (layers.0.feed_forward.up_proj.weight [96, 64])",
        "1 unexpected tensors (blk.0.surprise.weight in tiny.gguf)",
        "1 misshaped tensors (blk.1.ffn_norm.weight in tiny.gguf is [65], not [64])",
    )


def test_a_head_of_its_own_unties_the_model(tmp_path: Path) -> None:
    tied = write_gguf(tmp_path / "tied.gguf", tiny_model("gemma3_text"))
    assert open_checkpoint(at(tied)).spec.tie_word_embeddings
    head = np.random.default_rng(0).standard_normal((97, 64), np.float32)
    untied = write_gguf(tmp_path / "untied.gguf", tiny_model("gemma3_text"), extra={"output.weight": head})
    assert not open_checkpoint(at(untied)).spec.tie_word_embeddings
    np.testing.assert_array_equal(load(untied)["lm_head.weight"].numpy(), head)


def test_one_part_of_a_split_model(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(path, "one of 2 parts", "gguf-split")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.type": "adapter", "adapter.type": "lora"}, "an adapter"),
        ({"adapter.lora.alpha": "8"}, "an adapter"),
        ({"general.type": "mmproj"}, "a vision or audio encoder"),
        ({"clip.projector_type": "gemma3"}, "a vision or audio encoder"),
        ({"controlvector.model_hint": "llama"}, "a control vector"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"general.type": "newest"}, "type 'newest'"),
        ({}, "an adapter"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, keys: dict[str, str], words: str) -> None:
    """The last one says nothing; its tensors do."""
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        writer.add_string(key, value)
    writer.add_tensor("blk.0.attn_q.weight" if keys else "blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, f"a GGUF file of {words}, which is no model by itself", "llama-export-lora")


def test_license_and_name_come_from_the_file_unless_the_config_speaks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    assert open_checkpoint(at(path)).source.name == "tiny"
    assert open_checkpoint(at(path)).source.license is None
    source = open_checkpoint(at(path, license="MIT")).source
    assert (source.kind, source.license, source.files) == ("gguf", "MIT", {"tiny.gguf": sha256_file(path)})


def test_sha256_is_verified(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    assert open_checkpoint(at(path, sha256=sha256_file(path)))
    with pytest.raises(CheckpointError, match=f"sha256 {sha256_file(path)}; expected sha256 {'1' * 64}"):
        open_checkpoint(at(path, sha256="1" * 64))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose import fails, with a model in two parts and whole."""
    root = tmp_path / "site" / "tiny_weights_for_test"
    (root / "data").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')\n")
    data = write_gguf(root / "data" / "tiny.gguf", tiny_model("llama")).read_bytes()
    (root / "data" / "tiny.gguf.part00").write_bytes(data[:1000])
    (root / "data" / "tiny.gguf.part01").write_bytes(data[1000:])
    monkeypatch.syspath_prepend(str(root.parent))
    return root


PARTS = tuple(f"tiny_weights_for_test:data/tiny.gguf.part0{i}" for i in (0, 1))


def test_one_packaged_file_is_used_in_place_and_never_imported(package: Path) -> None:
    config = CheckpointConfig(package_files=("tiny_weights_for_test:data/tiny.gguf",))
    assert open_checkpoint(config).path == package / "data" / "tiny.gguf"
    assert "tiny_weights_for_test" not in sys.modules


@pytest.mark.parametrize("declared", [True, False])
def test_parts_are_joined_once_into_the_cache(package: Path, tmp_path: Path, declared: bool) -> None:
    whole = package / "data" / "tiny.gguf"
    sha256 = sha256_file(whole)
    cache = tmp_path / "cache"
    config = CheckpointConfig(package_files=PARTS, cache_dir=cache, sha256=sha256 if declared else None)
    path = open_checkpoint(config).path
    assert path == cache / sha256 / "tiny.gguf"
    assert path.read_bytes() == whole.read_bytes()
    assert [p.name for p in cache.iterdir()] == [sha256]
    before = path.stat().st_ino
    assert open_checkpoint(config).path == path
    assert not declared or path.stat().st_ino == before
    path.write_bytes(b"rotten")
    assert open_checkpoint(config).path.read_bytes() == whole.read_bytes()


def test_parts_called_bin_are_the_gguf_they_make(package: Path, tmp_path: Path) -> None:
    """``part01.bin``, ``part02.bin``: the name of the first is the joined file's, and no pickle's."""
    whole = (package / "data" / "tiny.gguf").read_bytes()
    for i, data in enumerate((whole[:1000], whole[1000:]), start=1):
        (package / "data" / f"part{i:02}.bin").write_bytes(data)
    files = tuple(f"tiny_weights_for_test:data/part{i:02}.bin" for i in (1, 2))
    checkpoint = open_checkpoint(CheckpointConfig(package_files=files, cache_dir=tmp_path / "cache"))
    assert (checkpoint.kind, checkpoint.path.name) == ("gguf", "part01.bin")
    assert checkpoint.path.read_bytes() == whole
    assert checkpoint.load_state_dict(parameter_shapes(checkpoint.spec))["norm.weight"].shape == (64,)


def test_parts_in_the_wrong_order_are_refused_and_leave_nothing(package: Path, tmp_path: Path) -> None:
    sha256 = sha256_file(package / "data" / "tiny.gguf")
    cache = tmp_path / "cache"
    config = CheckpointConfig(package_files=PARTS[::-1], cache_dir=cache, sha256=sha256)
    with pytest.raises(CheckpointError, match=f"expected sha256 {sha256}"):
        open_checkpoint(config)
    assert list(cache.iterdir()) == []


def test_a_package_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pip install --no-deps no-such-weights"):
        open_checkpoint(CheckpointConfig(package_files=("no_such_weights:model.gguf",)))


def test_a_package_without_the_file(package: Path) -> None:
    with pytest.raises(CheckpointError, match="without that file"):
        open_checkpoint(CheckpointConfig(package_files=("tiny_weights_for_test:data/other.gguf",)))


def test_a_cache_that_cannot_be_written(package: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpoint\.cache_dir"):
        join_parts([package / "data" / "tiny.gguf"], blocked / "cache", None)


def test_a_cache_without_room_is_left_as_it_was(package: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; expected room in"):
            join_parts([package / "data" / f"tiny.gguf.part0{i}" for i in (0, 1)], tmp_path / "cache", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "cache").iterdir()) == []


def test_every_tiny_config_is_tested_as_gguf_or_has_no_gguf_form() -> None:
    assert set(CONFIGS) - set(AS_GGUF) == {"mistral"}  # Mistral's GGUF files are of the llama architecture
