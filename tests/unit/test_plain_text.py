"""What a user writes stays text: control tokens of a chat come from its template alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from toy import toy_bundle, toy_manifest
from transformers import PreTrainedTokenizerFast

from exporter.bundle import Bundle
from runtime_ref import tokenizer as runtime

LETTERS = "abcdehinrstu<>/|_ ½\n▁"
CONTROL = ["<s>", "</s>", "<turn>", "<|end|>"]
TEMPLATES = {
    "plain": "<s>{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<turn>assistant",
    "trimmed and repeated": "{% for m in messages %}<turn>{{ m.content | trim }} / {{ m.content }}</s>{% endfor %}",
    "quoted": "<s>{% for m in messages %}{{ {'role': m.role, 'text': m.content} | tojson }}<|end|>{% endfor %}",
    "nothing but text": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


def byte_level() -> Tokenizer:
    """With merges, as GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("Ġ", "hi"), ("t", "u"), ("tu", "r"), ("tur", "n"), ("<", "tur"), ("e", "n"), ("en", "d")]
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pieces(words: list[str]) -> dict[str, int]:
    every = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted({*LETTERS, "▁"}), *words]
    return {word: i for i, word in enumerate(dict.fromkeys(every))}


def sentencepiece(scheme: str) -> Tokenizer:
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i"), ("t", "u")]
    vocab = pieces([left + right for left, right in merges] + CONTROL)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """The control tokens are pieces of the vocabulary, and likely ones: without care they come of any text."""
    words = pieces(["▁hi", "tu", *CONTROL])
    likely = {word: 0.0 if word in CONTROL else -float(10 - len(word)) for word in words}
    tokenizer = Tokenizer(models.Unigram(list(likely.items()), unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    **{scheme: lambda scheme=scheme: sentencepiece(scheme) for scheme in ("legacy", "first", "always", "never")},
    "unigram": unigram,
}


def with_control(tokenizer: Tokenizer) -> Tokenizer:
    """Three special tokens, one that is only added and that the templates write, and blanks that are added."""
    tokenizer.add_special_tokens(CONTROL[:3])
    tokenizer.add_tokens([AddedToken(CONTROL[3], normalized=False, special=False)])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False, special=False)])
    return tokenizer


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Bundle]:
    tokenizer = with_control(KINDS[request.param]())
    spec = toy_manifest().tokenizer.model_copy(update={"bos_token_id": tokenizer.token_to_id("<s>"), "add_bos": False})
    manifest = toy_manifest().model_copy(update={"tokenizer": spec})
    bundle = toy_bundle(tmp_path_factory.mktemp("chat") / "toy", manifest, template="")
    folder = bundle.path / runtime.DIRECTORY
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, bundle


def chat(made: tuple[Tokenizer, Bundle], template: str) -> runtime.Tokenizer:
    folder = made[1].path / runtime.DIRECTORY
    (folder / "chat_template.jinja").write_text(template)
    return runtime.Tokenizer(made[1])


TEXT = st.text(LETTERS, max_size=8)
ORDINARY = TEXT.filter(lambda text: not any(token in text for token in CONTROL))
FEW = settings(max_examples=30, deadline=None)
SPELLED = st.lists(st.one_of(TEXT, st.sampled_from(CONTROL)), max_size=6).map("".join)


@FEW
@given(texts=st.lists(ORDINARY, min_size=1, max_size=3))
@pytest.mark.parametrize("template", TEMPLATES)
def test_ordinary_text_is_as_transformers_has_it(
    made: tuple[Tokenizer, Bundle], template: str, texts: list[str]
) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    theirs = PreTrainedTokenizerFast(tokenizer_object=made[0])
    want = theirs.apply_chat_template(messages, chat_template=TEMPLATES[template], tokenize=True)["input_ids"]
    assert chat(made, TEMPLATES[template]).encode_chat(messages) == want


@FEW
@given(texts=st.lists(SPELLED, min_size=1, max_size=3))
@pytest.mark.parametrize("template", TEMPLATES)
def test_control_tokens_are_the_templates(made: tuple[Tokenizer, Bundle], template: str, texts: list[str]) -> None:
    """As many of each as the template writes around texts that spell none, in that order."""
    control = {made[0].token_to_id(word) for word in CONTROL if word != "<|end|>" or word in TEMPLATES[template]}
    ours = chat(made, TEMPLATES[template])

    def those(texts: list[str]) -> list[int]:
        ids = ours.encode_chat([{"role": "user", "content": text} for text in texts])
        return [id for id in ids if id in control]

    expected = those(["hi"] * len(texts))
    if template == "nothing but text":
        assert not control & set(expected)
    assert those(texts) == expected


@FEW
@given(parts=st.lists(st.one_of(TEXT, st.sampled_from(CONTROL)), max_size=6))
@pytest.mark.parametrize("kind", ["byte level", "never"])
def test_text_that_spells_a_control_token_is_tokenised_as_text(
    kind: str, parts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the definition: the same tokenizer before anything was added to it, between the template's own tokens."""
    text = "".join(parts).replace("\n", "")  # two of them would be the token that is text
    bare, full = KINDS[kind](), with_control(KINDS[kind]())
    manifest = toy_manifest()
    spec = manifest.tokenizer.model_copy(update={"add_bos": False})
    bundle = toy_bundle(
        tmp_path_factory.mktemp("chat") / "toy", manifest.model_copy(update={"tokenizer": spec}),
        template=TEMPLATES["plain"],
    )  # fmt: skip
    full.save(str(bundle.path / runtime.DIRECTORY / "tokenizer.json"))
    begin, turn, end = (full.token_to_id(word) for word in ("<s>", "<turn>", "<|end|>"))

    def plain(text: str) -> list[int]:
        return bare.encode(text, add_special_tokens=False).ids

    want = [begin, turn, *plain(f"user\n{text}"), end, *plain("\n"), turn, *plain("assistant")]
    assert runtime.Tokenizer(bundle).encode_chat([{"role": "user", "content": text}]) == want


def test_a_flag_lets_the_text_spell_them(made: tuple[Tokenizer, Bundle]) -> None:
    turn = made[0].token_to_id("<turn>")
    ours, message = chat(made, "{{ messages[0].content }}"), [{"role": "user", "content": "a<turn>b"}]
    assert ours.encode_chat(message).count(turn) == 0
    assert ours.encode_chat(message, parse_special=True).count(turn) == 1


def test_parts_and_calls_are_guarded_too(made: tuple[Tokenizer, Bundle]) -> None:
    """Whatever a template may print: parts of a content, names and arguments of a call."""
    ours, turn = chat(made, "<turn>{{ messages | tojson }}"), made[0].token_to_id("<turn>")
    call = {"function": {"name": "f<turn>", "arguments": {"x": ["<turn>", 1, None]}}}
    parts = [{"type": "text", "text": "<turn>"}]
    ids = ours.encode_chat(
        [{"role": "user", "content": parts}, {"role": "tool", "content": "<turn>", "tool_calls": [call]}]
    )
    assert ids.count(turn) == 1


def test_an_answer_keeps_what_its_template_looks_for(made: tuple[Tokenizer, Bundle]) -> None:
    """Templates cut thoughts out of answers at a token that is added and not special; whose text that was is all the
    same to them."""
    template = "{% for m in messages %}{{ m.content.split('<|end|>')[-1] }}{% endfor %}"
    ours, hi = chat(made, template), made[0].encode("hi", add_special_tokens=False).ids
    assert ours.encode_chat([{"role": "assistant", "content": "thoughts<|end|>hi"}]) == hi
    assert ours.encode_chat([{"role": "user", "content": "thoughts<|end|>hi"}]) == hi


def test_a_token_of_null_renders_as_nothing(made: tuple[Tokenizer, Bundle]) -> None:
    ours = chat(made, "{{ bos_token }}{{ pad_token }}{{ messages[0].content }}")
    folder = made[1].path / runtime.DIRECTORY
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "pad_token": {"content": None}}))
    assert ours.encode_chat([{"role": "user", "content": "hi"}]) == ours.encode("hi")


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_goes_on_where_the_prompt_ends(kind: str, tmp_path: Path) -> None:
    """Prompt and what was streamed are the text of all tokens; behind a control token a text begins."""
    tokenizer = with_control(KINDS[kind]())
    if kind != "byte level":
        decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(decode if kind == "never" else [*decode, decoders.Strip(" ", 1, 0)])
    bundle = toy_bundle(tmp_path / "toy")
    tokenizer.save(str(bundle.path / runtime.DIRECTORY / "tokenizer.json"))
    ours = runtime.Tokenizer(bundle)
    ids = tokenizer.encode("hi hi½ hi\nhi", add_special_tokens=False).ids
    for cut in range(1, len(ids)):
        stream = runtime.TextStream(ours, ids[:cut])
        streamed = "".join(stream.push(id) for id in ids[cut:]) + stream.finish()
        assert ours.decode(ids[:cut]).rstrip("\ufffd") + streamed == "hi hi½ hi\nhi"
    stream = runtime.TextStream(ours, [*ids, tokenizer.token_to_id("<turn>")])
    assert "".join(stream.push(id) for id in ids) == "hi hi½ hi\nhi"


def test_a_tokenizer_neither_cuts_nor_fills(tmp_path: Path) -> None:
    bundle = toy_bundle(tmp_path / "toy")
    file = bundle.path / runtime.DIRECTORY / "tokenizer.json"
    saved = Tokenizer.from_file(str(file))
    want = runtime.Tokenizer(bundle).encode("x" * 150)
    saved.enable_truncation(max_length=64)
    saved.enable_padding(length=200)
    saved.save(str(file))
    assert runtime.Tokenizer(bundle).encode("x" * 150) == want
