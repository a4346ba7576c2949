"""LEAF: the tokens of a conversation: control tokens are the template's, a message is text.

A control token ends a turn, begins one or says whose it is. A message that spells one (``<|im_end|>``) must not end
its own turn: what it spells is encoded as the ordinary text it is. A conversation that spells none has exactly the
tokens of its rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from exporter.text.files import Fault, encode, library_calls
from exporter.text.template import ChatTemplate, Rendered

_CONTROL = re.compile(r"<(?!0x[0-9A-F]{2}>).+>|\[.+\]", re.DOTALL)
_FIRST_ALIAS = 0x100000
"""Supplementary private-use area B; marks are of area A."""
_NOTHING = -1
"""The id of a character there that cuts text without being a token of it."""


def is_ordinary(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is a piece of text, as far as can be seen: it was not added, and has no brackets around it."""
    text = tokenizer.id_to_token(token)
    return text is not None and token not in tokenizer.get_added_tokens_decoder() and not _CONTROL.fullmatch(text)


LARGEST = 2**31 - 1
"""No tokenizer has a larger id."""


@dataclass(frozen=True, order=True)
class Found:
    """A token in a text, where `start` <= place < `end`."""

    start: int
    end: int
    id: int


@dataclass(frozen=True)
class Conversation:
    """A conversation's text and tokens. `written` are the control tokens that the template wrote, in their order."""

    text: str
    ids: list[int]
    written: tuple[Found, ...]


class ChatEncoder:
    """Args:
    tokenizer: one that neither clips nor fills.
    template: the model's.
    control: ids of tokens that end a text or begin it: control tokens, if they are no ordinary words.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, control: Iterable[int] = ()) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._added = {
            id: token for id, token in tokenizer.get_added_tokens_decoder().items() if not token.content.isspace()
        }
        control = [id for id in control if 0 <= id <= LARGEST and not is_ordinary(tokenizer, id)]
        special = {id for id, token in self._added.items() if token.special}
        # An added token that is not special is one all the same where the template writes it: <think>, <tool_call>.
        in_template = {id for id, token in self._added.items() if token.content in template.literals}
        self._control = special | in_template | set(control)
        self._last: tuple[dict[int, str], Tokenizer, dict[int, tuple[int, bool]]] | None = None
        self._spelled = {token.content for token in self._added.values()}
        self._spelled |= {text for id in control if (text := tokenizer.id_to_token(id)) is not None}

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, parse_special: bool = False
    ) -> Conversation:
        """The text and tokens of `messages`.

        Args:
            messages: each with `role` and `content`, and what else the template takes.
            add_generation_prompt: end with what begins an answer.
            parse_special: control tokens that a message spells are control tokens.

        Raises:
            Fault: the template does not take the messages, or it cannot be told which control tokens are its own.
        """
        rendered = self._template.render(
            messages, tokens=sorted(self._spelled), add_generation_prompt=add_generation_prompt
        )
        encoding = encode(self._tokenizer, rendered.text)
        if parse_special or rendered.marked is None:
            found = self._found(encoding, self._control | self._added.keys())
            if found and not parse_special:
                raise self._undecided(rendered.text, found[0])
            return Conversation(rendered.text, list(encoding.ids), found)
        # In the marked text nothing but the template's own letters spells a token.
        marked = encode(self._tokenizer, rendered.marked)
        control = self._control | {token.id for token in self._found(marked, self._added.keys())}
        written, found = self._found(marked, control), self._found(encoding, control)
        if not rendered.is_exact:
            if [token.id for token in written] != [token.id for token in found]:
                raise self._undecided(rendered.text, next(iter(found), None))
            written = found
        ids = list(encoding.ids) if found == written else self._encode_apart(rendered, written, control)
        return Conversation(rendered.text, ids, written)

    def _found(self, encoding: Any, wanted: Iterable[int]) -> tuple[Found, ...]:
        wanted = frozenset(wanted)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return tuple(Found(start, end, id) for id, (start, end) in places if id in wanted)

    def _undecided(self, text: str, token: Found | None) -> Fault:
        spelled = "a control token" if token is None else repr(text[token.start : token.end])
        return Fault(
            f"messages of which the chat template makes {spelled} in a way that hides whose it is",
            "control tokens from the template alone, or a caller who takes them from messages too (parse_special)",
        )

    def _encode_apart(self, rendered: Rendered, written: Sequence[Found], control: set[int]) -> list[int]:
        """The tokens of the text in which `written` are control tokens and no others.

        They are replaced by characters of private use, and so are they in the tokenizer. All else, the first place of
        a text, prefixes, what is cut out before what, stays as it is in the whole text.
        """
        aliases = self._aliases(rendered.text, {*control, *(token.id for token in written)} & self._added.keys())
        text, end = "", 0
        for token in written:
            if token.id not in aliases:  # no added token but one that the model's vocabulary spells
                raise self._undecided(rendered.text, token)
            text += rendered.text[end : token.start] + aliases[token.id]
            end = token.end
        text += rendered.text[end:]
        if self._last is None or self._last[0] != aliases:  # nearly always those of the last time
            self._last = (aliases, *self._renamed(aliases))
        _, tokenizer, back = self._last
        while True:
            encoding = encode(tokenizer, text)
            ids = [back.get(id, (id, False)) for id in encoding.ids]
            places = zip(encoding.offsets, ids, strict=True)
            spans = [span for span, (id, is_alias) in places if id in control and not is_alias]
            if not spans:
                break
            # A vocabulary that has its control tokens among its words: they are spelled by their parts.
            if any(end - start < 2 for start, end in spans):
                raise Fault(
                    "a message that the tokenizer makes a control token of even as plain text",
                    "a tokenizer that has its control tokens apart from its text",
                )
            for _, end in reversed(spans):
                text = text[: end - 1] + aliases[_NOTHING] + text[end - 1 :]
        if [id for id, is_alias in ids if is_alias] != [token.id for token in written]:
            raise self._undecided(rendered.text, next(iter(written), None))
        return [id for id, _ in ids if id != _NOTHING]

    def _aliases(self, text: str, ids: Iterable[int]) -> dict[int, str]:
        taken = set(text).union(*(token.content for token in self._added.values()))
        free = (chr(point) for point in range(_FIRST_ALIAS, 0x10FFFE) if chr(point) not in taken)
        return dict(zip([_NOTHING, *sorted(ids)], free, strict=False))

    def _renamed(self, aliases: Mapping[int, str]) -> tuple[Tokenizer, dict[int, tuple[int, bool]]]:
        """The tokenizer with other names for some added tokens; and, of its added tokens, the id here and whether that
        token has another name there."""
        with library_calls("a tokenizer that can be written and read again"):
            data = json.loads(self._tokenizer.to_str())
            data["post_processor"] = None
            for token in data["added_tokens"]:
                if (alias := aliases.get(token["id"])) is not None:
                    # Not a word for itself, and found in the raw text where normalising would lose the character.
                    token |= {"content": alias, "single_word": False}
                    normalizer = self._tokenizer.normalizer
                    if token["normalized"] and normalizer and alias not in normalizer.normalize_str(alias):
                        token["normalized"] = False
            renamed = Tokenizer.from_str(json.dumps(data))
            renamed.add_tokens([AddedToken(aliases[_NOTHING], special=True, normalized=False)])
        back: dict[int, tuple[int, bool]] = {}
        words = renamed.get_vocab(with_added_tokens=False)
        word_ids = set(words.values())
        names = {id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()}
        for id, name in {**names, **aliases}.items():
            new = renamed.token_to_id(name)
            if new is None or (name not in words and new in word_ids):
                raise Fault("a vocabulary with gaps in its ids", "ids without gaps, to tell control tokens from text")
            back[new] = (id, id in aliases and id != _NOTHING)
        return renamed, back
