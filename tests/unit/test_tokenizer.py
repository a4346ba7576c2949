"""The tokenizer of a Hugging Face directory: copied, tried, and asked which tokens begin and end a text."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.config import CheckpointConfig
from exporter.errors import CheckpointError
from exporter.spec import TokenizerSpec
from exporter.tokenizer import write_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<turn>"])
    return tokenizer


def directory(tmp_path: Path, tokenizer: Tokenizer | None, **files: Any) -> Checkpoint:
    """A Hugging Face directory whose weights are never read."""
    path = tmp_path / "hf"
    path.mkdir()
    config = {"model_type": "llama", "vocab_size": 300} | files.pop("config", {})
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").touch()
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return open_checkpoint(CheckpointConfig(path=path))


def test_a_directory_is_copied(tmp_path: Path) -> None:
    checkpoint = directory(
        tmp_path, byte_tokenizer(), tokenizer_config={"bos_token": "<bos>", "eos_token": {"content": "<eos>"}},
        special_tokens_map={}, secrets={},
    )  # fmt: skip
    (checkpoint.path / "chat_template.jinja").write_text(TEMPLATE)
    out = tmp_path / "out"
    out.mkdir()
    spec = write_tokenizer(checkpoint, out)
    assert spec == TokenizerSpec(bos_token_id=256, eos_token_ids=(257,), add_bos=False, has_chat_template=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    for path in out.iterdir():
        assert path.read_bytes() == (checkpoint.path / path.name).read_bytes()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [257, 258, 257]}, "config": {"eos_token_id": 1}}, (257, 258)),
        ({"generation_config": {"eos_token_id": 258}}, (258,)),
        ({"generation_config": {}, "config": {"eos_token_id": [257, 258]}}, (257, 258)),
        ({"config": {"eos_token_id": 257}}, (257,)),
        ({"tokenizer_config": {"eos_token": "<turn>"}}, (258,)),
        ({}, ()),
    ],
)
def test_end_tokens_of_a_directory(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert write_tokenizer(directory(tmp_path, byte_tokenizer(), **files), tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("adds", "says", "expected"), [(True, None, True), (False, None, False), (False, True, True), (True, False, False)]
)
def test_bos_of_a_directory_follows_its_config_then_its_behaviour(
    tmp_path: Path, adds: bool, says: bool | None, expected: bool
) -> None:
    tokenizer = byte_tokenizer()
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    config = {"bos_token": "<bos>"} | ({} if says is None else {"add_bos_token": says})
    spec = write_tokenizer(directory(tmp_path, tokenizer, tokenizer_config=config), tmp_path)
    assert (spec.bos_token_id, spec.add_bos) == (256, expected)


def test_a_template_inside_the_tokenizer_config_is_written_out(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    spec = write_tokenizer(directory(tmp_path, byte_tokenizer(), tokenizer_config={"chat_template": named}), tmp_path)
    assert spec.has_chat_template
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE


def test_a_directory_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        write_tokenizer(directory(tmp_path, None), tmp_path)


def test_a_damaged_tokenizer_json(tmp_path: Path) -> None:
    checkpoint = directory(tmp_path, byte_tokenizer())
    (checkpoint.path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"a readable tokenizer\.json"):
        write_tokenizer(checkpoint, tmp_path)


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(CheckpointError, match="the quick brown fox"):
        write_tokenizer(directory(tmp_path, tokenizer), tmp_path)


def test_an_added_token_beyond_the_embedding_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Gemma's text models list the multimodal ones' image token, which no text yields."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<image_soft_token>", special=True)])
    checkpoint = directory(tmp_path, tokenizer, config={"vocab_size": 259})
    assert write_tokenizer(checkpoint, tmp_path)
