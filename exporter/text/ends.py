"""LEAF: which token begins a text and which end it: the one place that decides, from every file that says something.

Begin: what the tokenizer does is right, and a config that names another token is wrong. A tokenizer that adds nothing
is asked for the name of its token (``tokenizer_config.json``, ``special_tokens_map.json``), and only then the configs
of the model, which are often copied from another one.

End: every token that any file calls an end, and the one with which the chat template ends an answer. A model that was
tuned for chats says the latter, whatever its config says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exporter.spec import TokenizerSpec
from exporter.text.chat import LARGEST, ChatEncoder, Conversation, is_ordinary
from exporter.text.files import CONFIG, TEMPLATE, Fault, encode, library_calls, read_object, read_template
from exporter.text.files import special_tokens as read_special_tokens
from exporter.text.template import ChatTemplate

_ANSWER = "\ue0a0\ue0a1"
"""Private use: no template writes it by itself."""


@dataclass(frozen=True)
class Claims:
    """What the files of a model say, beside those of its tokenizer.

    Attributes:
        bos: the token that begins a text.
        eos: those that end it.
        fallback_eos: those of a file that is often wrong; an ordinary word among them is left out where another file
            names an end.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    fallback_eos: tuple[int, ...] = ()


def token_ids(file: str, values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The token ids under `key` in `values`, the content of `file`: one, several, or none when it is absent, null or
    -1.

    Raises:
        Fault: it is something else.
    """
    value = values.get(key)
    several = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or not -1 <= token <= LARGEST for token in several):
        raise Fault(f"{file} with {key} = {value!r}", "a token id, a list of them, or null")
    return tuple(dict.fromkeys(token for token in several if token >= 0))


def claims_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> Claims:
    """What ``config.json`` (its `text_config` first) and ``generation_config.json`` say.

    Raises:
        Fault: an id is none.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    bos, eos = (
        [
            token_ids(file, values, key)
            for file, values in (("generation_config.json", generation), ("config.json", config), ("config.json", text))
        ]
        for key in ("bos_token_id", "eos_token_id")
    )
    bos = [bos[0], bos[2], bos[1]]
    first = next((ids[0] for ids in bos if ids), None)
    return Claims(bos=first, eos=eos[0], fallback_eos=eos[1] + eos[2])


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before a text."""
    with library_calls("a tokenizer that encodes text"):
        with_added, plain = (tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
    for start in range(len(with_added) - len(plain) + 1):
        if with_added[start : start + len(plain)] == plain:
            return list(with_added[:start])
    return []


def _bos(tokenizer: Tokenizer, directory: Path, named: Mapping[str, str], claims: Claims) -> tuple[int | None, bool]:
    """The token that begins a text, and whether every text does begin with it."""
    config = read_object(directory / CONFIG)
    says = config.get("add_bos_token")
    if says is not None and not isinstance(says, bool):
        raise Fault(f"{CONFIG} with add_bos_token = {says!r}", "true, false or null")
    prefix = _prefix(tokenizer)
    if len(prefix) > 1 and says is not False:
        raise Fault(f"a tokenizer that begins a text with {len(prefix)} tokens of its own", "one, or none")
    name = named.get("bos_token")
    own = prefix[0] if prefix else None if name is None else tokenizer.token_to_id(name)
    if own is None and (name is not None or "bos_token" not in config):
        own = claims.bos  # null is a name too: there is none
    return own, own is not None and (bool(prefix) if says is None else says)


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a directory, its special tokens and its chat template, if it has one.

    Raises:
        Fault: a file is damaged, or names what is no token.
    """

    tokenizer: Tokenizer
    directory: Path
    named: dict[str, str] = field(init=False)
    template: ChatTemplate | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", read_special_tokens(self.directory))
        file = self.directory / TEMPLATE
        template = ChatTemplate(read_template(file), self.named) if file.is_file() else None
        object.__setattr__(self, "template", template)

    def encoder(self, control: Sequence[int]) -> ChatEncoder:
        """What encodes conversations; there must be a template."""
        assert self.template is not None
        return ChatEncoder(self.tokenizer, self.template, control)


def begin_and_end(files: TokenizerFiles, claims: Claims) -> TokenizerSpec:
    """What a manifest records.

    Raises:
        Fault: a file says what cannot be.
    """
    tokenizer = files.tokenizer
    bos, add_bos = _bos(tokenizer, files.directory, files.named, claims)
    name = files.named.get("eos_token")
    own = None if name is None else tokenizer.token_to_id(name)
    named = [*([] if own is None else [own]), *claims.eos]
    template = [] if files.template is None else _end_of_answer(files.encoder(named), bos)
    sure = named or template
    fallback = [token for token in claims.fallback_eos if not sure or not is_ordinary(tokenizer, token)]
    eos = dict.fromkeys([*named, *fallback, *template])
    return TokenizerSpec(
        bos_token_id=bos, eos_token_ids=tuple(eos), add_bos=add_bos, has_chat_template=files.template is not None
    )


def example_conversations(encoder: ChatEncoder) -> Iterator[Conversation]:
    """What the template makes of the usual conversations; without those that it does not take."""
    user, answer = ("user", "a"), ("assistant", _ANSWER)
    for turns, is_open in (
        ([user], True), ([("system", "a"), user], True), ([user, answer], False), ([user, answer, user], True)
    ):  # fmt: skip
        if (conversation := _converse(encoder, turns, add_generation_prompt=is_open)) is not None:
            yield conversation


def _converse(
    encoder: ChatEncoder, turns: Sequence[tuple[str, str]], *, add_generation_prompt: bool
) -> Conversation | None:
    for content in (str, lambda text: [{"type": "text", "text": text}]):
        messages = [{"role": role, "content": content(text)} for role, text in turns]
        try:
            conversation = encoder.encode(messages, add_generation_prompt=add_generation_prompt)
        except Fault:
            continue
        if turns[-1][1] in conversation.text:  # a template may take another form of content in silence
            return conversation
    return None


def _end_of_answer(encoder: ChatEncoder, bos: int | None) -> list[int]:
    """The control token that the template writes after an answer, before anything but blanks; where it writes none, the
    one that begins the turn after it. The token that begins a text ends none."""
    user, answer = ("user", "a"), ("assistant", _ANSWER)
    for turns in ([user, answer], [user, answer, user]):
        conversation = _converse(encoder, turns, add_generation_prompt=False)
        if conversation is None or _ANSWER not in conversation.text:
            continue
        end = conversation.text.rfind(_ANSWER) + len(_ANSWER)
        after = next((token for token in conversation.written if token.start >= end), None)
        if after is not None and after.id != bos and not conversation.text[end : after.start].strip():
            return [after.id]
    return []


def largest_ids(files: TokenizerFiles, spec: TokenizerSpec) -> dict[str, int]:
    """The largest token id of each thing that can bring one; -1 if it brings none.

    Raises:
        Fault: as `begin_and_end`.
    """
    # Added tokens may lie beyond a model's embedding (Gemma's text models keep the image token of the multimodal ones):
    # only those that the template writes are met.
    chats = [] if files.template is None else example_conversations(files.encoder(spec.eos_token_ids))
    return {
        "the vocabulary": max(files.tokenizer.get_vocab(with_added_tokens=False).values(), default=-1),
        "the end tokens": max(spec.eos_token_ids, default=-1),
        "BOS": spec.bos_token_id if spec.add_bos and spec.bos_token_id is not None else -1,
        "what the chat template writes": max((id for chat in chats for id in chat.ids), default=-1),
    }


def check_encodes(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Encode and decode `texts`.

    Raises:
        Fault: one does not come back as it went in.
    """
    for text in texts:
        ids = encode(tokenizer, text).ids
        with library_calls("a tokenizer that decodes what it encodes"):
            back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != text:
            raise Fault(f"{back!r} after encoding and decoding", repr(text))
