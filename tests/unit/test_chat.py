"""Conversations: the text is Transformers', and control tokens are the template's alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BLANK, CONTROL, KINDS, byte_level
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exporter.text.chat import ChatEncoder, Conversation
from exporter.text.files import Fault
from exporter.text.template import ChatTemplate

PLAIN = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<turn>\n{% endfor %}"
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
TEMPLATES = {
    "plain": PLAIN,
    "trims": "{% for m in messages %}<turn>{{ m.role | upper }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "escapes": "{{ messages[-1] | tojson }}{{ messages[0].content | tojson(ensure_ascii=True) }}<turn>",
    "macro": "{% macro turn(m) %}{{ '<turn>' ~ m.role ~ ' ' + m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "collects": "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text + '<turn>' + m.content %}{% endfor %}{{ ns.text }}",
    "lets": "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}<turn>{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p['text'].strip() }}{% endif %}{% endfor %}{% endif %}<turn>{% endfor %}",
    "thinks": "{% for m in messages %}{% set c = m.content %}{% if '</turn>' in c %}"
    "{% set c = c.split('</turn>')[-1].lstrip('\n') %}{% endif %}{{ c }}<turn>{% endfor %}",
    "builds": "{% for m in messages %}{{ '<' + m.role.replace('user', 'turn') + '>' + m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<turn>{% endfor %}",
}
AT_MOST = 24


def encoder(template: str, tokenizer: Tokenizer | None = None) -> ChatEncoder:
    return ChatEncoder(tokenizer or byte_level(), ChatTemplate(template, SPECIAL))


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(template: str, text: Any, tokenizer: Tokenizer | None = None, **options: Any) -> Conversation:
    return encoder(template, tokenizer).encode(user(text), **options)


@cache
def made(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def made_encoder(template: str, kind: str) -> ChatEncoder:
    return encoder(template, made(kind))


def oracle(kind: str, template: str, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """What Transformers says."""
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=made(kind), **SPECIAL)
    options = {"chat_template": template, "add_generation_prompt": True}
    text = fast.apply_chat_template(messages, tokenize=False, **options)
    return text, fast.apply_chat_template(messages, return_dict=False, **options)


def written_by(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    control = {tokenizer.token_to_id(token) for token in CONTROL}
    return [token for token in ids if token in control]


TEXT = st.text(st.sampled_from(" \n\"\\'<>/|abtTurnésß你🙂"), max_size=AT_MOST)
SPELLED = st.lists(st.sampled_from([*CONTROL, "<tu", "rn>", "</turn>", "<", "a", " ", "\n", "é", "<TURN>"]), max_size=8)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(first=TEXT, second=TEXT)
def test_ordinary_text_has_the_tokens_of_transformers(kind: str, template: str, first: str, second: str) -> None:
    if any(token in text.lower() for token in CONTROL for text in (first, second)):
        return
    messages = [{"role": "system", "content": first}, *user(second)]
    conversation = made_encoder(template, kind).encode(messages)
    assert (conversation.text, conversation.ids) == oracle(kind, template, messages)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(parts=SPELLED)
def test_control_tokens_are_those_of_a_harmless_text(kind: str, template: str, parts: list[str]) -> None:
    """And the text is still what the template writes."""
    tokenizer, text = made(kind), "".join(parts)
    conversation = made_encoder(template, kind).encode(user(text))
    harmless = made_encoder(template, kind).encode(user("x"))
    assert written_by(conversation.ids, tokenizer) == written_by(harmless.ids, tokenizer)
    assert conversation.text == oracle(kind, template, user(text))[0]
    if kind in ("byte_level", "metaspace_never"):
        assert tokenizer.decode(conversation.ids, skip_special_tokens=False) == conversation.text


def bytes_of(text: str) -> list[int]:
    return byte_level().encode(text).ids


@pytest.mark.parametrize(
    "text", ["a<turn>b", "<turn>", "<bos><eos><turn>", "<<turn>>", "<turn", "turn>", "", "\n<turn> "]
)
def test_tokens_from_the_definition(text: str) -> None:
    """The bytes of everything but the two control tokens that the template wrote."""
    spelled = [token for part in text.partition("<turn>") for token in split_bytes(part)]
    assert chat(PLAIN, text).ids == [256, *bytes_of("user\n"), *spelled, 258, *bytes_of("\n")]


def split_bytes(text: str) -> list[int]:
    """A letter at a time no control token can be found."""
    return [token for letter in text for token in bytes_of(letter)]


def test_whoever_wants_it_has_the_control_tokens_of_a_message() -> None:
    assert chat(PLAIN, "a<turn>", parse_special=True).ids.count(258) == 2
    assert chat(PLAIN, "a<turn>").ids.count(258) == 1


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_of_whatever_role(role: str) -> None:
    messages = [{"role": role, "content": "<turn>"}, *user("<eos>")]
    assert written_by(encoder(PLAIN).encode(messages).ids, byte_level()) == [256, 258, 258]


def test_a_role_that_spells_a_token_is_text_and_one_that_a_template_makes_a_token_of_is_not() -> None:
    spelled = encoder(PLAIN).encode([{"role": "<turn>", "content": "a"}]).ids
    assert written_by(spelled, byte_level()) == [256, 258]
    built = encoder("{% for m in messages %}{{ '<' + m.role + '>' }}{% endfor %}")
    assert built.encode([{"role": "turn", "content": ""}]).ids == [258]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content | lower }}<turn>",
        "{{ messages[0].content.upper() | lower }}<turn>",
        "{{ messages[0].content.replace('-', '') }}<turn>",
        "{{ messages[0].content | replace('-', '') }}<turn>",
        "{{ messages[0].content[::-1] }}<turn>",
        "{{ messages[0].content | reverse }}<turn>",
        "{{ messages[0].content.split('-') | join }}<turn>",
        "{{ messages[0].content.split(sep='-', maxsplit=1) | join }}<turn>",
        "{{ messages[0].content.partition('-')[0] }}{{ messages[0].content.rpartition('-')[2] }}<turn>",
        "{{ messages[0].content.strip('-') }}{{ messages[0].content | trim('-') }}<turn>",
        "{{ messages[0].content.removeprefix('-').removesuffix('-') }}<turn>",
        "{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}<turn>",
        "{{ messages[0].content * 2 }}<turn>",
        "{{ messages[0].content.splitlines() | join }}{{ messages[0].content.split() | join }}<turn>",
        "{% if messages[0].content.startswith('<') or messages[0].content == '<' %}{% endif %}{{ messages[0].content }}"
        "<turn>",
    ],
)
@pytest.mark.parametrize(
    "text", ["<turn>", "<Turn>", "<tu-rn>", "-<turn>-", ">nrut<", "<tuRN>\u0130", "<\n turn>", "<t\u017frn>", "<turn>t"]
)
def test_what_a_template_does_to_a_message_makes_no_token_of_it(template: str, text: str) -> None:
    try:
        ids = chat(template, text).ids
    except Fault as fault:  # rather than to guess
        assert "hides whose it is" in fault.got
        return
    assert written_by(ids, byte_level()) == [258]
    assert byte_level().decode(ids, skip_special_tokens=False) == oracle("byte_level", template, user(text))[0]


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(Fault, match="'<turn>' in a way that hides whose it is"):
        chat("{{ messages[0].content | center(20) }}{{ messages[0].content | urlencode }}<turn>", "<turn>")


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_that_the_template_writes_is_a_control_token(special: bool) -> None:
    """Also one that is not special (<think>, <tool_call>); one that the template does not know is a word."""
    tokenizer = byte_level(AddedToken("<end>", special=special, normalized=False), AddedToken("word", special=False))
    ids = chat("{{ messages[0].content }}<end>", "a<end>word", tokenizer).ids
    assert ids == [*bytes_of("a<end>"), tokenizer.token_to_id("word"), tokenizer.token_to_id("<end>")]


def test_a_token_that_the_template_builds_is_one() -> None:
    tokenizer = byte_level(AddedToken("<|end|>", special=False))
    ids = chat("{{ messages[0].content }}{{ '<|' ~ 'end' ~ '|>' }}", "<|end|>", tokenizer).ids
    assert ids == [*bytes_of("<|end|>"), tokenizer.token_to_id("<|end|>")]


def test_normalising_makes_no_control_token() -> None:
    """A token that is found in normalised text is found in letters that are not its own."""
    tokenizer = byte_level(AddedToken("<end>", special=True, normalized=True))
    tokenizer.normalizer = normalizers.Lowercase()
    ids = chat("{{ messages[0].content }}<end>", "A<END>", tokenizer).ids
    assert ids == [*bytes_of("a<end>"), tokenizer.token_to_id("<end>")]


def test_a_message_hides_no_token_of_the_template() -> None:
    """``a<`` is a token, and would take the first letter of the template's."""
    tokenizer = byte_level(AddedToken("a<", special=False))
    assert chat("{{ messages[0].content }}<turn>", "a", tokenizer).ids == [*bytes_of("a"), 258]


def test_an_end_that_is_an_ordinary_word_is_a_word_in_messages() -> None:
    quote = byte_level().token_to_id('"')
    ends = [quote, -1, 10**20]  # also of a manifest that somebody wrote
    chat = ChatEncoder(byte_level(), ChatTemplate("{{ messages[0].content }}<turn>", SPECIAL), ends)
    assert chat.encode(user('"a"')).ids == [*bytes_of('"a"'), 258]


def test_a_vocabulary_that_spells_its_control_tokens_spells_them_in_parts() -> None:
    """A model of pieces that has <turn> among them, and likely; one of whole words that has no other way to say it."""
    likely = [("?", -20.0), *((letter, -9.0) for letter in "<turn>hi "), ("<turn>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(likely, unk_id=0))
    tokenizer.add_special_tokens(["<turn>"])
    ids = chat("{{ messages[0].content }}<turn>", "hi<turn>", tokenizer).ids
    assert [tokenizer.id_to_token(token) for token in ids] == [*"hi<turn>", "<turn>"]
    words = Tokenizer(models.WordLevel({"x": 0, "hi": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["x"])
    assert chat("{{ messages[0].content }} x", "hi", words).ids == [1, 0]
    with pytest.raises(Fault, match="even as plain text"):
        chat("{{ messages[0].content }} x", "hi x", words)


def test_no_character_of_a_message_is_lost_where_it_is_cut() -> None:
    text = "".join(map(chr, [0x100000, 0x100001, 0x10FFFD])) + "<turn>"
    assert chat("{{ messages[0].content }}<turn>", text).ids == [*bytes_of(text[:3]), *split_bytes("<turn>"), 258]


@pytest.mark.parametrize("absent", [{}, {"name": None}, {"reasoning": "why"}, {"tool_calls": [{"id": 1, "ok": True}]}])
def test_messages_are_those_of_transformers(absent: dict[str, Any]) -> None:
    template = (
        "{{ messages }}{{ tools is none }}{{ messages[0].name is defined }}{{ messages[0].reasoning_content }}<turn>"
    )
    messages = [{"role": "user", "content": "a"} | absent]
    assert encoder(template).encode(messages).text == oracle("byte_level", template, messages)[0]


def test_a_token_that_is_not_there_is_written_as_nothing() -> None:
    assert ChatTemplate("[{{ pad_token }}]", {}).render(user("a"), tokens=(), add_generation_prompt=True).text == "[]"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% set ns = namespace(_a=1) %}", "_a"),
        ("{{ messages[0].content.split('') }}", "ValueError"),
        ("{{ nothing.of.this }}", "nothing"),
    ],
)
def test_a_template_that_fails(template: str, word: str) -> None:
    with pytest.raises(Fault, match=word):
        chat(template, "a")


@pytest.mark.parametrize("template", ["{% if %}", "{{", "{% endfor %}", "{{ a | nofilter }}", "{% unknown %}"])
def test_a_template_that_is_none(template: str) -> None:
    with pytest.raises(Fault, match="a chat template"):
        chat(template, "a")


@pytest.mark.parametrize("messages", [["hi"], [{"role": "user", "content": object()}], [{"content": b"a"}], [None]])
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(Fault, match="a message that"):
        encoder(PLAIN).encode(messages)


def test_private_use_in_messages_and_templates_is_text() -> None:
    text = "\U000f0000\U000f0001\U00100000<turn>"
    conversation = chat("\U000f0002{{ messages[0].content }}<turn>", text)
    assert conversation.ids == [*bytes_of("\U000f0002\U000f0000\U000f0001\U00100000"), *split_bytes("<turn>"), 258]


def test_the_blank_before_a_piece_of_text_is_the_tokenizers() -> None:
    """Of text between two control tokens of the template, whether a message spells one or not."""
    tokenizer = made("prepended")
    plain = chat("<turn>{{ messages[0].content }}<turn>", "ab", tokenizer).ids
    assert [tokenizer.id_to_token(token) for token in plain] == ["<turn>", BLANK + "ab", "<turn>"]
    spelled = chat("<turn>{{ messages[0].content }}<turn>", "ab<eos>", tokenizer).ids
    assert [tokenizer.id_to_token(token) for token in spelled] == ["<turn>", BLANK + "ab", *"<eos>", "<turn>"]
