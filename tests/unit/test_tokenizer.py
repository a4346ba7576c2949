"""The tokenizer of a Hugging Face directory: copied, tried, and asked which tokens begin and end a text."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.config import CheckpointConfig
from exporter.english import english_ids
from exporter.errors import CheckpointError
from exporter.quantization.passages import calibration
from exporter.spec import TokenizerSpec
from exporter.text.encoder import Encoder
from exporter.text.files import load_tokenizer
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
        # Every file that names one; an id of a token of text only where there is no other.
        ({"generation_config": {"eos_token_id": [257, 258, 257]}, "config": {"eos_token_id": 1}}, (257, 258)),
        ({"generation_config": {"eos_token_id": 257}, "tokenizer_config": {"eos_token": "<turn>"}}, (258, 257)),
        ({"generation_config": {"eos_token_id": 257}, "special_tokens_map": {"eos_token": "<turn>"}}, (258, 257)),
        ({"config": {"eos_token_id": 257, "text_config": {"eos_token_id": [258]}}}, (257, 258)),
        ({"generation_config": {"eos_token_id": 257}, "config": {"eos_token_id": 258}}, (257, 258)),
        ({"config": {"eos_token_id": 1}}, (1,)),
        ({"config": {"eos_token_id": -1}, "tokenizer_config": {"eos_token": None}}, ()),
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


TURNS = "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"
TEMPLATE_FILE = {"tokenizer_config": {"chat_template": TURNS}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 257}, "tokenizer_config": {"eos_token": "<turn>"}}, (258, 257)),
        ({"generation_config": {"eos_token_id": 257}, "special_tokens_map": {"eos_token": "<turn>"}}, (258, 257)),
        ({"generation_config": {"eos_token_id": 257}, "config": {"eos_token_id": 258}}, (257, 258)),
        ({"generation_config": {"eos_token_id": [257]}, "config": {"text_config": {"eos_token_id": 258}}}, (257, 258)),
        ({"config": {"eos_token_id": 257}, **TEMPLATE_FILE}, (257, 258)),
        (TEMPLATE_FILE, (258,)),
        ({"config": {"eos_token_id": -1}, "generation_config": {"eos_token_id": None}, **TEMPLATE_FILE}, (258,)),
        # A word is no end where another file knows one; a word that is the only end is one.
        ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<eos>"}}, (257,)),
        ({"config": {"eos_token_id": 1}}, (1,)),
        # A token that the tokenizer has not ends nothing.
        ({"config": {"eos_token_id": 257}, "tokenizer_config": {"eos_token": "</s>"}}, (257,)),
    ],
)
def test_every_file_that_names_an_end_is_heard(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert write_tokenizer(directory(tmp_path, byte_tokenizer(), **files), tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}<bos>{{ m.content }}<turn>\n{% endfor %}{{ '<bos>' if add_generation_prompt }}",
            (258,),
        ),
        ("{% for m in messages %}<eos>{{ m.role }}{{ m.content | trim }} <turn> <bos>{% endfor %}", (258,)),
        ("{% for m in messages %}<turn>{{ m.role }}{{ m.content }}{% endfor %}", (258,)),  # the next turn's begin
        ("{% for m in messages %}{{ m.content[0].text }}<turn>{% endfor %}", (258,)),  # content in parts
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ()),
        ("{{ messages[0].content }}<turn>", ()),  # without answers
        ("{{ raise_exception('no') }}", ()),
        ("{{ 1 / 0 }}", ()),
    ],
)
def test_the_end_of_an_answer_in_the_template(tmp_path: Path, template: str, expected: tuple[int, ...]) -> None:
    checkpoint = directory(tmp_path, byte_tokenizer(), tokenizer_config={"chat_template": template})
    assert write_tokenizer(checkpoint, tmp_path).eos_token_ids == expected


def begins_with(token: str) -> Tokenizer:
    tokenizer = byte_tokenizer()
    special = [(token, tokenizer.token_to_id(token))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "files", "expected"),
    [
        (begins_with("<bos>"), {"config": {"bos_token_id": 1}}, (256, True)),
        (begins_with("<bos>"), {"generation_config": {"bos_token_id": 1}}, (256, True)),
        (
            begins_with("<bos>"),
            {"config": {"bos_token_id": -1}, "tokenizer_config": {"add_bos_token": True}},
            (256, True),
        ),
        (begins_with("<turn>"), {"tokenizer_config": {"bos_token": "<bos>"}}, (258, True)),
        (byte_tokenizer(), {"config": {"bos_token_id": 1}, "tokenizer_config": {"bos_token": "<bos>"}}, (256, False)),
        (byte_tokenizer(), {"config": {"bos_token_id": 1}, "special_tokens_map": {"bos_token": "<bos>"}}, (256, False)),
        (byte_tokenizer(), {"config": {"bos_token_id": 1}, "tokenizer_config": {"add_bos_token": True}}, (1, True)),
        (byte_tokenizer(), {"tokenizer_config": {"bos_token": "<bos>", "add_bos_token": True}}, (256, True)),
        (byte_tokenizer(), {"config": {"bos_token_id": 257}, "tokenizer_config": {"bos_token": None}}, (None, False)),
        (
            byte_tokenizer(),
            {"config": {"bos_token_id": 257}, "tokenizer_config": {"bos_token": None, "add_bos_token": True}},
            (None, False),
        ),
        (byte_tokenizer(), {"config": {"text_config": {"bos_token_id": 256}, "bos_token_id": 1}}, (256, False)),
        (byte_tokenizer(), {}, (None, False)),
    ],
)
def test_the_begin_is_the_tokenizers(
    tmp_path: Path, tokenizer: Tokenizer, files: dict[str, Any], expected: tuple[int | None, bool]
) -> None:
    spec = write_tokenizer(directory(tmp_path, tokenizer, **files), tmp_path)
    assert (spec.bos_token_id, spec.add_bos) == expected


def test_two_tokens_before_a_text_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokens = [("<bos>", 256), ("<turn>", 258)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> <turn> $A", special_tokens=tokens)
    with pytest.raises(CheckpointError, match="begins a text with 2 tokens"):
        write_tokenizer(directory(tmp_path, tokenizer), tmp_path)


@pytest.mark.parametrize("batching", ["truncation", "padding"])
def test_what_was_saved_of_training_batches_is_not_copied(tmp_path: Path, batching: str) -> None:
    tokenizer = begins_with("<bos>")
    if batching == "truncation":
        tokenizer.enable_truncation(max_length=4)
    else:
        tokenizer.enable_padding(length=64, pad_id=257, pad_token="<eos>", direction="left")
    spec = write_tokenizer(directory(tmp_path, tokenizer), tmp_path)
    assert (spec.bos_token_id, spec.add_bos) == (256, True)
    copy = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert copy.encode("a" * 20).ids == [256] + [copy.token_to_id("a")] * 20
    assert copy.to_str() == begins_with("<bos>").to_str()


@pytest.mark.parametrize("batching", ["truncation", "padding"])
def test_whoever_loads_a_tokenizer_neither_clips_nor_fills(tmp_path: Path, batching: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4) if batching == "truncation" else tokenizer.enable_padding(length=2_000_000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = TokenizerSpec(bos_token_id=256, eos_token_ids=(), add_bos=True, has_chat_template=False)
    assert len(load_tokenizer(tmp_path / "tokenizer.json").encode("a" * 20).ids) == 20
    assert len(english_ids(tmp_path / "tokenizer.json", spec, 100)) == 100
    assert {ids.shape for ids in calibration(Encoder(tmp_path, spec), 100).passages} == {(1, 100)}


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"config": {"eos_token_id": [257, None]}}, r"config\.json with eos_token_id = \[257, None\]"),
        ({"config": {"eos_token_id": "257"}}, "eos_token_id = '257'"),
        ({"config": {"eos_token_id": True}}, "eos_token_id = True"),
        ({"config": {"text_config": {"bos_token_id": 1.0}}}, r"bos_token_id = 1\.0"),
        ({"generation_config": {"eos_token_id": {"a": 1}}}, r"generation_config\.json with eos_token_id"),
        ({"generation_config": {"eos_token_id": 2**70}}, r"eos_token_id = \d{20}"),
        ({"generation_config": []}, r"generation_config\.json with a list"),
        ({"tokenizer_config": {"eos_token": 257}}, r"tokenizer_config\.json with eos_token = 257"),
        ({"tokenizer_config": {"bos_token": {"text": "<bos>"}}}, "bos_token = {'text'"),
        ({"tokenizer_config": {"pad_token": ["<eos>"]}}, "pad_token"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token = 'yes'"),
        ({"special_tokens_map": {"unk_token": 3}}, r"special_tokens_map\.json with unk_token"),
        ({"special_tokens_map": "x"}, r"special_tokens_map\.json with a str"),
        ({"tokenizer_config": {"chat_template": 7}}, "chat_template = '7'"),
        ({"tokenizer_config": {"chat_template": [{"template": "x"}]}}, "chat_template = "),
        ({"tokenizer_config": {"chat_template": {"default": 1}}}, "chat_template = '1'"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "a chat template that is none"),
        ({"tokenizer_config": {"chat_template": "\ud800"}}, "no text"),
        ({"chat_template": {"chat_template": False}}, r"chat_template\.json with chat_template = 'False'"),
    ],
)
def test_odd_values_are_named(tmp_path: Path, files: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        write_tokenizer(directory(tmp_path, byte_tokenizer(), **files), tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"text_config": None}},
        {"tokenizer_config": {"chat_template": None, "eos_token": None, "add_bos_token": None}},
        {"tokenizer_config": {"chat_template": {"default": TURNS}}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": TURNS}]}},
        {"tokenizer_config": {"chat_template": {"tools": "x"}}},
        {"chat_template": {"chat_template": TURNS}},
    ],
)
def test_odd_forms_that_mean_something(tmp_path: Path, files: dict[str, Any]) -> None:
    spec = write_tokenizer(directory(tmp_path, byte_tokenizer(), **files), tmp_path)
    assert spec.has_chat_template is (TURNS in json.dumps(files))


def test_a_template_in_another_encoding(tmp_path: Path) -> None:
    checkpoint = directory(tmp_path, byte_tokenizer())
    (checkpoint.path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja that cannot be read.*UTF-8"):
        write_tokenizer(checkpoint, tmp_path)


@pytest.mark.parametrize("special", [True, False])
def test_a_token_of_the_template_without_a_row_of_the_embedding(tmp_path: Path, special: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=special)])
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<turn>{% endfor %}"
    files = {"config": {"vocab_size": 259}, "tokenizer_config": {"chat_template": template}}
    with pytest.raises(
        CheckpointError,
        match=r"token id 259 \(<\|im_start\|>\) in what the chat template writes; expected ids below .* 259",
    ):
        write_tokenizer(directory(tmp_path, tokenizer, **files), tmp_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}<turn>{% endfor %}", (257, 258)),
        ("{% for m in messages %}{{ m.content }} \n<turn>\n{% endfor %}", (257, 258)),
        ("{% for m in messages %}<turn>{{ m.role }}{{ m.content }}{% endfor %}", (257, 258)),  # of the next turn
        ("{% for m in messages %}{{ m.content }}<eos>{% endfor %}", (257,)),
        ("{% for m in messages %}{{ m.content }}, {% endfor %}<turn>", (257,)),  # text comes first
        ("{% for m in messages %}<bos>{{ m.content }}{% endfor %}", (257,)),
        ("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
         (257,)),
        ("{{ raise_exception('no') }}", (257,)),
        ("{{ 1 / 0 }}", (257,)),
    ],
)  # fmt: skip
def test_a_template_says_what_ends_a_turn(tmp_path: Path, template: str, expected: tuple[int, ...]) -> None:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    assert write_tokenizer(directory(tmp_path, byte_tokenizer(), tokenizer_config=config), tmp_path).eos_token_ids == (
        expected
    )


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("config", [{"bos_token_id": 1}, {"bos_token_id": 256}, {}, {"bos_token_id": None}])
@pytest.mark.parametrize("says", [{}, {"add_bos_token": None}, {"bos_token": "<bos>"}, {"bos_token": None}])
def test_a_text_begins_as_transformers_begins_it(tmp_path: Path, adds: bool, config: Any, says: Any) -> None:
    tokenizer = byte_tokenizer()
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    says = {"tokenizer_class": "PreTrainedTokenizerFast", **says}
    checkpoint = directory(tmp_path, tokenizer, tokenizer_config=says, config=config)
    want = AutoTokenizer.from_pretrained(checkpoint.path)("hi")["input_ids"][:-2]
    spec = write_tokenizer(checkpoint, tmp_path)
    assert ([spec.bos_token_id] if spec.add_bos else []) == want


def test_several_tokens_before_every_text_are_said(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    names = [("<bos>", 256), ("<turn>", 258)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<turn> <bos> $A", special_tokens=names)
    with pytest.raises(CheckpointError, match="begins a text with 2 tokens"):
        write_tokenizer(directory(tmp_path, tokenizer), tmp_path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"generation_config": {"eos_token_id": 1.5}}, r"generation_config\.json with eos_token_id = 1\.5"),
        ({"generation_config": {"eos_token_id": True}}, r"generation_config\.json with eos_token_id = True"),
        ({"config": {"eos_token_id": [257, -2]}}, r"config\.json with eos_token_id = \[257, -2\]"),
        ({"tokenizer_config": {"eos_token": 7.0}}, r"eos_token = 7\.0"),
        ({"tokenizer_config": {"bos_token": ["<bos>"]}}, "bos_token = "),
        ({"special_tokens_map": {"pad_token": {"content": 3}}}, "pad_token = {'content': 3}"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token = 'yes'"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template = '5'"),
        (
            {"tokenizer_config": {"chat_template": [{"name": "default", "template": [1]}]}},
            r"chat_template = '\[1\]'",
        ),
    ],
)
def test_what_is_no_token_and_no_template_is_named(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        write_tokenizer(directory(tmp_path, byte_tokenizer(), **files), tmp_path)


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    checkpoint = directory(tmp_path, byte_tokenizer())
    (checkpoint.path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja that cannot be read.*UTF-8"):
        write_tokenizer(checkpoint, tmp_path)


def test_the_file_of_an_app_neither_cuts_nor_fills(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    want = tokenizer.to_str()
    tokenizer.enable_truncation(max_length=64)
    tokenizer.enable_padding(length=200)
    checkpoint = directory(tmp_path, tokenizer)
    write_tokenizer(checkpoint, tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(want)


def test_a_token_of_the_template_without_a_row_of_the_embedding_is_named(tmp_path: Path) -> None:
    config = {"chat_template": "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"}
    checkpoint = directory(tmp_path, byte_tokenizer(), tokenizer_config=config, config={"vocab_size": 258})
    with pytest.raises(CheckpointError, match=r"token id 258 \(<turn>\) in the end tokens; expected ids below .* 258"):
        write_tokenizer(checkpoint, tmp_path)
    config["chat_template"] = "{% for m in messages %}<turn>a {{ m.content }} b{% endfor %}"
    (checkpoint.path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"token id 258 \(<turn>\) in what the chat template writes"):
        write_tokenizer(checkpoint, tmp_path)


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
