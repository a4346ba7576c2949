"""Text in, text out: one BOS, whole characters, and an end that is always said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
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


@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=12))
def test_streamed_text_is_the_text_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)[1:]]
    assert not any("\ufffd" in piece for piece in pieces)
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
