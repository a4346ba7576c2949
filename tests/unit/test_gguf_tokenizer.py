"""Tokenizers rebuilt from GGUF metadata, held to another reading of the same data."""

import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from exporter.checkpoint import Checkpoint, GGUFCheckpoint, open_checkpoint
from exporter.checkpoint.gguf_tokenizer import build_tokenizer
from exporter.config import load_config
from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.families import from_gguf
from exporter.spec import TokenizerSpec
from exporter.tokenizer import ROUND_TRIP_TEXTS, check_round_trip, write_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
TEMPLATE_WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEMPLATE_WITHOUT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT = [{"role": "user", "content": "hi there"}]

Vocabulary = list[tuple[str, float, int]]


def metadata(model: str, vocabulary: Vocabulary, **keys: Any) -> dict[str, Any]:
    tokens, scores, types = (list(column) for column in zip(*vocabulary, strict=True))
    values = {"model": model, "tokens": tokens, "scores": scores, "token_type": types} | keys
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def byte_level(pre: str | None = "smollm", **keys: Any) -> dict[str, Any]:
    """Three control tokens, the 256 bytes, and merges that glue digits, a word and an accented letter together."""
    merges = ["1 2", "12 3", "123 4", "a b", "Ġ ab", "Ã ©"]
    control = [("<|end|>", 0.0, CONTROL), ("<|bos|>", 0.0, CONTROL), ("<|turn|>", 0.0, CONTROL)]
    pieces = [*BYTES, *(merge.replace(" ", "") for merge in merges), "zq"]
    vocabulary = control + [(piece, 0.0, NORMAL) for piece in pieces] + [("<think>", 0.0, USER_DEFINED)]
    defaults = {"bos_token_id": 1, "eos_token_id": 0}
    return metadata("gpt2", vocabulary, pre=pre, merges=merges, **(defaults | keys))


def sentencepiece(**keys: Any) -> dict[str, Any]:
    """Scored pieces in which a greedy left-to-right reading is wrong, bytes, a user-defined run of blanks."""
    words = ["▁the", "ab", "bc", "abcd", "▁a", "he", "▁t", "aa", "aaa"]
    vocabulary: Vocabulary = [("<pad>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL), ("<bos>", 0.0, CONTROL)]
    vocabulary += [("<unk>", 0.0, 2), ("  ", -1000.0, USER_DEFINED), ("\n", -1000.0, USER_DEFINED)]
    vocabulary += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    # bc scores above ab, so that "abc" is a + bc.
    scores = dict(zip(words, [-9, -4, -3, -20, -5, -2, -1, -6, -7], strict=True))
    vocabulary += [(word, float(scores[word]), NORMAL) for word in words]
    vocabulary += [(char, -100.0 - i, NORMAL) for i, char in enumerate("▁abcdefghijklmnopqrstuvwxyz")]
    defaults = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    return metadata("llama", vocabulary, **(defaults | {"add_space_prefix": False} | keys))


class Holder(GGUFCheckpoint):
    """A GGUF checkpoint of nothing but metadata."""

    def __init__(self, data: dict[str, Any], vocab_size: int | None = None) -> None:
        self.name, self.metadata = "tiny", data
        sizes = ("block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count")
        header = {f"llama.{key}": 1 for key in sizes} | {"llama.attention.layer_norm_rms_epsilon": 1e-6}
        shapes = {} if vocab_size is None else {"token_embd.weight": (vocab_size, 1)}
        self.spec = from_gguf({"general.architecture": "llama"} | header | data, shapes, pytest.fail)[1]


def write(data: dict[str, Any], directory: Path) -> tuple[TokenizerSpec, Tokenizer]:
    spec = write_tokenizer(Holder(data), directory)
    return spec, Tokenizer.from_file(str(directory / "tokenizer.json"))


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def test_smollm_splits_every_digit_where_merges_would_join_them(tmp_path: Path) -> None:
    assert tokens(build_tokenizer(byte_level("gpt-2")), "1234") == ["1234"]
    _, tokenizer = write(byte_level("smollm"), tmp_path)
    assert tokens(tokenizer, "1234") == ["1", "2", "3", "4"]
    assert tokens(tokenizer, " ab1234") == ["Ġab", "1", "2", "3", "4"]


def test_llama_and_qwen_patterns() -> None:
    assert tokens(build_tokenizer(byte_level("llama-bpe")), "1234") == ["123", "4"]
    assert tokens(build_tokenizer(byte_level("qwen2")), "1234") == ["1", "2", "3", "4"]
    # Llama takes a whole word from the vocabulary, though no merge leads to it; the others do not.
    assert tokens(build_tokenizer(byte_level("llama-bpe")), "zq") == ["zq"]
    assert tokens(build_tokenizer(byte_level("qwen2")), "zq") == ["z", "q"]
    # Qwen normalises: e + combining accent becomes one letter.
    assert tokens(build_tokenizer(byte_level("qwen2")), "e\u0301") == ["Ã©"]
    assert tokens(build_tokenizer(byte_level("gpt-2")), "e\u0301")[0] == "e"


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    _, tokenizer = write(byte_level(), tmp_path)
    ids = tokenizer.encode("ab<|turn|>ab<think>", add_special_tokens=False).ids
    assert 2 in ids
    assert tokenizer.token_to_id("<think>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abab<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<|turn|>ab<think>"


@pytest.mark.parametrize("data", [byte_level(), sentencepiece()], ids=["gpt2", "llama"])
def test_every_token_keeps_its_id(data: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(data)
    listed = data["tokenizer.ggml.tokens"]
    assert [tokenizer.id_to_token(i) for i in range(len(listed))] == listed
    assert tokenizer.get_vocab_size() == len(listed)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tokenizer.ggml.pre": "made-up"}, "'made-up'"),
        ({"tokenizer.ggml.pre": None}, "None"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.precompiled_charsmap": [1]}, "precompiled_charsmap"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.remove_extra_whitespaces": True}, "extra_whitespaces"),
    ],
)
def test_unknown_kinds_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        build_tokenizer(byte_level() | change)


@pytest.mark.parametrize("name", ["tokens", "token_type", "merges"])
def test_a_missing_part_is_named(name: str) -> None:
    data = byte_level()
    del data[f"tokenizer.ggml.{name}"]
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}"):
        build_tokenizer(data)


def test_a_token_listed_twice_is_refused() -> None:
    data = byte_level()
    data["tokenizer.ggml.tokens"][-1] = "zq"
    with pytest.raises(CheckpointError, match="1 tokens that occur twice"):
        build_tokenizer(data)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"merges": ["a b", "q ☃"]}, "merge 'q ☃' with the unknown token '☃'"),
        ({"merges": ["a b", "a c"]}, "merge 'a c' with the unknown token 'ac'"),
        ({"merges": ["ab"]}, "merge 'ab'; expected two tokens"),
        ({"merges": [" b"]}, "merge ' b'"),
        ({"merges": [1]}, "1 in tokenizer.ggml.merges; expected items of type str"),
        ({"merges": "a b"}, "without tokenizer.ggml.merges"),
        ({"token_type": [1] * 5}, r"token_type with 5 items; expected one for each of \d+ tokens"),
        ({"token_type": [0.5] * 267}, "items of type int"),
        ({"tokens": [0, ""]}, "items of type str"),
        ({"bos_token_id": 5000}, "bos_token_id = 5000"),
        ({"eos_token_id": -1}, "eos_token_id = -1"),
        ({"padding_token_id": 2.5}, "padding_token_id = 2.5"),
        ({"eot_token_id": True}, "eot_token_id = True"),
        ({"eom_token_id": "0"}, "eom_token_id = '0'"),
        ({"add_bos_token": 1}, "add_bos_token = 1; expected true or false"),
    ],
)
def test_a_tokenizer_that_contradicts_itself(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    data = byte_level() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=word):
        write_tokenizer(Holder(data), tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scores": [0.0]}, "scores with 1 items"),
        ({"scores": ["a"]}, "items of type float"),
        ({"unknown_token_id": 10**6}, "unknown_token_id = 1000000"),
        ({"add_space_prefix": "no"}, "add_space_prefix = 'no'"),
    ],
)
def test_a_scored_vocabulary_that_contradicts_itself(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        write_tokenizer(Holder(sentencepiece(**change)), tmp_path)


@pytest.mark.parametrize("template", [1, ["x"], "{{", "{% endif %}"])
def test_a_chat_template_that_is_none(tmp_path: Path, template: Any) -> None:
    with pytest.raises(CheckpointError, match="template"):
        write_tokenizer(Holder(byte_level() | {"tokenizer.chat_template": template}), tmp_path)


def test_the_template_of_a_gguf_says_what_ends_an_answer(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|turn|>{% endfor %}"
    spec, _ = write(byte_level() | {"tokenizer.chat_template": template}, tmp_path)
    assert spec.eos_token_ids == (0, 2)


def spm_oracle(data: dict[str, Any]) -> Callable[[str], list[int]]:
    """llama.cpp's reading of a SentencePiece vocabulary: cut user-defined tokens out of the raw text, longest first; in
    what is left join the adjacent pair whose joined piece scores highest, leftmost among equals, until none is left;
    spell what is in no piece as bytes."""
    listed = data["tokenizer.ggml.tokens"]
    types, scores = data["tokenizer.ggml.token_type"], data["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(listed)}
    whole = [i for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    whole.sort(key=lambda i: -len(listed[i]))

    def merge(symbols: list[str]) -> list[str]:
        while True:
            joined = [(ids.get(a + b), n) for n, (a, b) in enumerate(pairwise(symbols))]
            pairs = [(-scores[i], n) for i, n in joined if i is not None and types[i] == NORMAL]
            if not pairs:
                return symbols
            n = min(pairs)[1]
            symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]

    def encode(text: str) -> list[int]:
        fragments: list[str | int] = [text]
        for i in whole:
            if listed[i] not in text:
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                for n, rest in enumerate(fragment.split(listed[i])):
                    cut += ([i] if n else []) + ([rest] if rest else [])
            fragments = cut
        result: list[int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                result.append(fragment)
                continue
            for symbol in merge(list(fragment.replace(" ", "▁"))):
                result += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return result

    return encode


def random_texts(alphabet: str, count: int, length: int) -> Iterator[str]:
    source = random.Random(0)
    for _ in range(count):
        yield "".join(source.choice(alphabet) for _ in range(source.randint(1, length)))


def test_score_merges_follow_the_oracle() -> None:
    data = sentencepiece()
    tokenizer = build_tokenizer(data)
    assert tokens(tokenizer, "abc") == ["a", "bc"]
    assert tokens(tokenizer, "dab the") == ["d", "ab", "▁the"]
    assert tokens(tokenizer, "é") == ["<0xC3>", "<0xA9>"]
    assert tokens(tokenizer, "a    b\n") == ["a", "  ", "  ", "b", "\n"]
    oracle = spm_oracle(data)
    for text in (*ROUND_TRIP_TEXTS, *random_texts("abc the\né", 300, 12)):
        assert tokenizer.encode(text, add_special_tokens=False).ids == oracle(text), text


def without_user_defined(data: dict[str, Any]) -> dict[str, Any]:
    types = [NORMAL if kind == USER_DEFINED else kind for kind in data["tokenizer.ggml.token_type"]]
    return data | {"tokenizer.ggml.token_type": types}


def test_space_prefix_is_added_only_when_the_file_says_so() -> None:
    assert tokens(build_tokenizer(sentencepiece()), "ab") == ["ab"]
    for data in (sentencepiece(add_space_prefix=True), sentencepiece(add_space_prefix=None)):
        tokenizer = build_tokenizer(without_user_defined(data))
        assert tokens(tokenizer, "ab") == ["▁", "ab"]
        check_round_trip(tokenizer, "tiny")


def test_a_space_prefix_beside_user_defined_tokens_loses_text_and_is_refused(tmp_path: Path) -> None:
    """The prefix comes back after each of them."""
    with pytest.raises(CheckpointError, match="two   three"):
        write(sentencepiece(add_space_prefix=True), tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (byte_level(), False),
        (byte_level(add_bos_token=True), True),
        (byte_level("llama-bpe"), True),
        (byte_level("llama-bpe", add_bos_token=False), False),
        (byte_level(add_bos_token=True, bos_token_id=None), False),
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
    ],
)
def test_bos_is_added_once_or_not_at_all(tmp_path: Path, data: dict[str, Any], expected: bool) -> None:
    spec, tokenizer = write(data, tmp_path)
    assert spec.add_bos is expected
    bos = data.get("tokenizer.ggml.bos_token_id")
    count = int(expected)
    ids = tokenizer.encode("ab").ids
    assert sum(token == bos for token in ids) == count
    assert (ids[0] == bos) is expected
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert auto("ab").input_ids == ids
    assert auto("ab", add_special_tokens=False).input_ids == ids[count:]


@pytest.mark.parametrize("template", [TEMPLATE_WITH_BOS, TEMPLATE_WITHOUT])
def test_one_bos_with_chat_templates_that_emit_it_and_that_do_not(tmp_path: Path, template: str) -> None:
    """The rule of `TokenizerSpec.add_bos`: encode without special tokens, then put BOS first unless it is there."""
    spec, tokenizer = write(sentencepiece() | {"tokenizer.chat_template": template}, tmp_path)
    assert spec.has_chat_template
    assert spec.add_bos
    auto: Any = AutoTokenizer.from_pretrained(tmp_path)
    text = auto.apply_chat_template(CHAT, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if ids[:1] != [2]:
        ids = [2, *ids]
    assert spec.bos_token_id == 2
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == "hi there"
    assert auto.apply_chat_template(CHAT)["input_ids"].count(2) == int(template == TEMPLATE_WITH_BOS)


def test_every_end_token_of_a_gguf_stops(tmp_path: Path) -> None:
    assert write(byte_level(), tmp_path)[0].eos_token_ids == (0,)
    spec, _ = write(byte_level(eot_token_id=2, eom_token_id=0), tmp_path)
    assert spec.eos_token_ids == (0, 2)
    assert write(byte_level(eos_token_id=None), tmp_path)[0].eos_token_ids == ()


def test_a_token_id_of_minus_one_is_none(tmp_path: Path) -> None:
    spec, _ = write(byte_level(padding_token_id=2**32 - 1, eot_token_id=2**32 - 1, bos_token_id=2**32 - 1), tmp_path)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.add_bos) == (None, (0,), False)


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    size = len(byte_level()["tokenizer.ggml.tokens"])
    assert write_tokenizer(Holder(byte_level(), size), tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"token id {size - 1} \(<think>\) in the vocabulary; expected ids below .* {size - 1}"
    ):
        write_tokenizer(Holder(byte_level(), size - 1), tmp_path)


def real(name: str) -> Checkpoint:
    config = load_config(CONFIGS / f"{name}.yaml").checkpoint
    for place in config.package_files or ():
        if find_spec(place.split(":")[0]) is None:
            pytest.skip(f"{place.split(':')[0]} is not installed")
    return open_checkpoint(config)


def test_smollm2_from_its_gguf(tmp_path: Path) -> None:
    spec = write_tokenizer(real("smollm2_135m"), tmp_path)
    assert spec == TokenizerSpec(bos_token_id=1, eos_token_ids=(2,), add_bos=False, has_chat_template=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokens(tokenizer, "in 1234567") == ["in", "Ġ", "1", "2", "3", "4", "5", "6", "7"]
    auto: Any = AutoTokenizer.from_pretrained(tmp_path)
    for text in ROUND_TRIP_TEXTS:
        assert auto(text).input_ids == tokenizer.encode(text).ids
    chat = auto.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(chat, skip_special_tokens=False).endswith(
        "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[GGUFCheckpoint, Path, TokenizerSpec]:
    checkpoint = real("gemma3_270m")
    assert isinstance(checkpoint, GGUFCheckpoint)
    out = tmp_path_factory.mktemp("gemma")
    return checkpoint, out, write_tokenizer(checkpoint, out)


GEMMA_TEXTS = (
    *ROUND_TRIP_TEXTS,
    "<start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\n",
    "aaaaaaa bbbbbbbbb hahahahaha ========== ......... ----",
    "<div>\t\t<b>x</b></div>\n\n\n    return 0;",
    "∮⟨ψ|φ⟩ ∀x, y: x ≠ y ⇒ ½ 𐍈 ᚠᛇᚻ",
)


def test_gemma_from_its_gguf_follows_the_oracle(gemma: tuple[GGUFCheckpoint, Path, TokenizerSpec]) -> None:
    checkpoint, out, spec = gemma
    assert spec == TokenizerSpec(bos_token_id=2, eos_token_ids=(1,), add_bos=True, has_chat_template=False)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("Hi").ids == [2, *tokenizer.encode("Hi", add_special_tokens=False).ids]
    oracle = spm_oracle(checkpoint.metadata)
    for text in (*GEMMA_TEXTS, *random_texts("etaoin shrdlu .,\n\t12ABéß你", 100, 30)):
        assert tokenizer.encode(text, add_special_tokens=False).ids == oracle(text), text


@pytest.mark.slow
def test_gemma_from_its_gguf_follows_transformers(gemma: tuple[GGUFCheckpoint, Path, TokenizerSpec]) -> None:
    checkpoint, out, _ = gemma
    ours = AutoTokenizer.from_pretrained(out)
    theirs = AutoTokenizer.from_pretrained(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    for text in GEMMA_TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
