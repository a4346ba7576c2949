"""Text in, text out: one BOS, whole characters, and an end that is always said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BLANK, KINDS
from torch import Tensor
from toy import BOS, END_OF_TURN, EOS, VOCAB, toy_bundle, toy_manifest, toy_program

from exporter.bundle import Bundle
from exporter.errors import BundleError, ConfigError, RuntimeLimitError
from exporter.spec import Manifest
from runtime_ref.generate import Generation
from runtime_ref.programs import EagerProgram
from runtime_ref.sampling import Sampler
from runtime_ref.session import Session
from runtime_ref.tokenizer import TextStream, Tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return toy_bundle(tmp_path_factory.mktemp("bundle") / "toy", template=PLAIN)


@pytest.fixture(scope="module")
def tokenizer(bundle: Bundle) -> Tokenizer:
    return Tokenizer(bundle)


def reciting(manifest: Manifest, ids: list[int]) -> Session:
    """A session whose program wants `ids`, one after the other, whatever it reads."""
    script = iter(ids)

    def step(*_: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(script)]), VOCAB).float()

    return Session(manifest, EagerProgram({"prefill": step, "main": step}))


def run(session: Session, tokenizer: Tokenizer, count: int = 64) -> tuple[Generation, list[str]]:
    generation = Generation(session, tokenizer, [BOS, 5, 6], sampler=Sampler(), max_new_tokens=count)
    return generation, list(generation)


@pytest.mark.parametrize("template", [PLAIN, "{{ bos_token }}" + PLAIN])
def test_a_chat_begins_with_one_bos(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(toy_bundle(tmp_path / "toy", template=template))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert tokenizer.decode(ids) == "[user]hi[model]"


@pytest.mark.parametrize("add_bos", [True, False])
def test_plain_text_has_bos_as_the_manifest_says(tmp_path: Path, add_bos: bool) -> None:
    manifest = toy_manifest()
    spec = manifest.tokenizer.model_copy(update={"add_bos": add_bos})
    tokenizer = Tokenizer(toy_bundle(tmp_path / "toy", manifest.model_copy(update={"tokenizer": spec})))
    for text in ("hi", ""):
        assert tokenizer.encode(text).count(BOS) == add_bos
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<bos>hi").count(BOS) == 1


def test_the_special_tokens_of_a_template(tmp_path: Path) -> None:
    bundle = toy_bundle(tmp_path / "toy", template="{{ messages[0].content }}{{ eos_token }}")
    config = tmp_path / "toy" / "tokenizer" / "tokenizer_config.json"
    for eos in ("<eos>", {"content": "<eos>", "special": True}):
        config.write_text(json.dumps({"eos_token": eos, "pad_token": None}))
        assert Tokenizer(bundle).encode_chat([{"role": "user", "content": ""}]) == [BOS, EOS]


def test_no_template_is_said(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toy_bundle(tmp_path / "toy"))
    with pytest.raises(BundleError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toy_bundle(tmp_path / "toy", template="{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(BundleError, match="refuses the messages"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    bundle = toy_bundle(tmp_path / "toy")
    (tmp_path / "toy" / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Tokenizer(bundle)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_streamed_text_is_the_text_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)[1:]]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_blank_before_a_word_is_kept(tmp_path: Path) -> None:
    """Tokenizers of the sentencepiece kind strip the blank before the first word of whatever they decode."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, unk_token="c"))
    words.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    bundle = toy_bundle(tmp_path / "toy")
    words.save(str(tmp_path / "toy" / "tokenizer" / "tokenizer.json"))
    stream = TextStream(Tokenizer(bundle))
    assert [stream.push(token) for token in (0, 1, 1, 2)] == ["a", " b", " b", "c"]


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    stream = TextStream(tokenizer, prompt)
    return "".join([*map(stream.push, tokens), stream.finish()])


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    loaded = {}
    for name, make in KINDS.items():
        folder = tmp_path_factory.mktemp("kinds") / name
        bundle = toy_bundle(folder)
        make().save(str(folder / "tokenizer" / "tokenizer.json"))
        loaded[name] = Tokenizer(bundle)
    return loaded


def bytes_of(kind: str, token: str) -> bytes:
    """What a token stands for."""
    if kind == "byte_level":  # GPT-2's letters for bytes: those that can be printed, then the others
        printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printed]
        return bytes([ord(token) if ord(token) < 256 else others[ord(token) - 256]])
    return bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace(BLANK, " ").encode()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from(" ab\nézß你🙂<\ufffd"), max_size=16), cut=st.integers(0, 40))
def test_prompt_and_continuation_are_the_text_of_all_tokens(
    kinds: dict[str, Tokenizer], kind: str, text: str, cut: int
) -> None:
    """Cut where it may: before a blank, within a character, at the begin."""
    tokenizer = kinds[kind]
    ids = KINDS[kind]().encode(text, add_special_tokens=False).ids
    prompt, tokens = ids[:cut], ids[cut:]
    vocabulary = KINDS[kind]()
    whole = b"".join(bytes_of(kind, vocabulary.id_to_token(token)) for token in ids).decode()
    known = b"".join(bytes_of(kind, vocabulary.id_to_token(token)) for token in prompt).decode(errors="ignore")
    if not known:  # the first text of all, of which the tokenizer may strip a blank
        whole = tokenizer.decode(ids)
    assert streamed(tokenizer, prompt, tokens) == whole[len(known) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte_level"])
def test_the_first_blank_of_a_continuation_is_kept(kinds: dict[str, Tokenizer], kind: str) -> None:
    words = KINDS[kind]()
    blank_a, b = words.token_to_id(BLANK + "a"), words.token_to_id("b")
    assert streamed(kinds[kind], [b], [blank_a, blank_a]) == " a a"
    # After a prompt without text, a first blank is what the decoder makes of it; a long one costs no more.
    assert streamed(kinds[kind], [words.token_to_id("<bos>")], [blank_a, b]) == kinds[kind].decode([blank_a, b])
    # Behind a control token a text begins.
    assert streamed(kinds[kind], [b] * 500 + [words.token_to_id("<turn>")], [blank_a]) == kinds[kind].decode([blank_a])
    assert streamed(kinds[kind], [words.token_to_id("<turn>")] + [b] * 500, [blank_a]) == " a"


def test_bytes_that_are_no_character_keep_what_was_said(kinds: dict[str, Tokenizer]) -> None:
    """Byte fallback reads a run of bytes whole: one that ends within a character would undo those before it."""
    words = KINDS["prepended"]()
    ids = [words.token_to_id(token) for token in ("b", "<0xC3>", "<0xA9>", "<0xE2>", "a")]
    assert streamed(kinds["prepended"], ids[:1], ids[1:]) == "é\ufffda"


def test_a_conversation_goes_on_in_its_text(kinds: dict[str, Tokenizer]) -> None:
    words = KINDS["prepended"]()
    blank_a = words.token_to_id(BLANK + "a")
    session = reciting(toy_manifest(), [blank_a, 2])
    generation = Generation(session, kinds["prepended"], [words.token_to_id("b")], sampler=Sampler(), max_new_tokens=1)
    assert list(generation) == [" a"]


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RuntimeLimitError, match="text that the tokenizer takes"):
        tokenizer.encode("a\ud800")


def test_a_template_that_writes_bos_after_a_blank(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toy_bundle(tmp_path / "toy", template="\n\n{{ bos_token }}" + PLAIN))
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]).count(BOS) == 1


def test_a_message_spells_no_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(toy_bundle(tmp_path / "toy", template="{{ messages[0].content }}<end_of_turn>"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "<bos><end_of_turn>"}])
    assert (ids[0], ids[-1], ids.count(BOS), ids.count(END_OF_TURN)) == (BOS, END_OF_TURN, 1, 1)
    ids = tokenizer.encode_chat([{"role": "user", "content": "<bos><end_of_turn>"}], parse_special=True)
    assert ids == [BOS, END_OF_TURN, END_OF_TURN]


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "unk_token", "pad_token"])
def test_a_null_token_is_written_as_nothing(tmp_path: Path, name: str) -> None:
    bundle = toy_bundle(tmp_path / "toy", template=f"{{{{ {name} }}}}x")
    config = tmp_path / "toy" / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({name: None}))
    assert Tokenizer(bundle).encode_chat([{"role": "user", "content": ""}]) == [BOS, *Tokenizer(bundle).encode("x")[1:]]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b"["),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": 1}'),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"caf\xe9"),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"{{ 1 / 0 }}"),
        ("chat_template.jinja", b"{{ messages[0].content + 1 }}"),
    ],
)
def test_a_damaged_file_of_a_chat_is_one_error(tmp_path: Path, file: str, content: bytes) -> None:
    bundle = toy_bundle(tmp_path / "toy", template=PLAIN)
    (tmp_path / "toy" / "tokenizer" / file).write_bytes(content)
    with pytest.raises(BundleError, match=r"bundle toy: got .*(tokenizer_config\.json|chat[_ ]template)"):
        Tokenizer(bundle).encode_chat([{"role": "user", "content": "hi"}])


def test_an_unfinished_character_is_dropped_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\N{ROCKET}")[1:]
    _, pieces = run(reciting(toy_manifest(), [*ids[:3], EOS]), tokenizer)
    assert pieces == ["a"]
    _, pieces = run(reciting(toy_manifest(), [*ids, EOS]), tokenizer)
    assert pieces == ["a", "\N{ROCKET}"]


@pytest.mark.parametrize("end", [EOS, END_OF_TURN])
def test_every_end_token_ends(tokenizer: Tokenizer, end: int) -> None:
    session = reciting(toy_manifest(), [65, 66, end, 67])
    generation, pieces = run(session, tokenizer)
    assert generation.tokens == [65, 66]
    assert "".join(pieces) == tokenizer.decode([65, 66])
    assert generation.reason == f"end token {end}"


def test_generation_goes_on_past_the_window(tokenizer: Tokenizer) -> None:
    manifest = toy_manifest(("ring", "ring"), window=8)
    session = Session(manifest, toy_program(manifest))
    generation, _ = run(session, tokenizer, 8 + 8 + 10)
    assert len(generation.tokens) == 26
    assert generation.reason == "26 new tokens"
    assert session.length == 3 + 25  # the last token was never run


def test_a_full_context_ends_generation(tokenizer: Tokenizer) -> None:
    session = reciting(toy_manifest(context=20), [65] * 99)
    generation, _ = run(session, tokenizer)
    assert session.length == 20
    assert len(generation.tokens) == 18
    assert generation.reason == "the context of 20 tokens is full"
    assert "decode" in generation.report()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda s, t: Generation(s, t, [], sampler=Sampler(), max_new_tokens=1), RuntimeLimitError),
        (lambda s, t: Generation(s, t, [1] * 97, sampler=Sampler(), max_new_tokens=1), RuntimeLimitError),
        (lambda s, t: Generation(s, t, [1], sampler=Sampler(), max_new_tokens=1, chunk=99), RuntimeLimitError),
        (lambda s, t: Generation(s, t, [1], sampler=Sampler(), max_new_tokens=0), ConfigError),
    ],
)
def test_refused_before_the_first_call(
    tokenizer: Tokenizer, make: Callable[[Session, Tokenizer], Generation], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make(reciting(toy_manifest(), []), tokenizer)
