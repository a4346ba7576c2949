"""The tokenizer of a bundle: ids with exactly one BOS where the model wants one, and the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from exporter.bundle import Bundle
from exporter.errors import BundleError, RuntimeLimitError
from exporter.text.encoder import Encoder
from exporter.text.files import Fault
from runtime_ref.ids import token_ids

DIRECTORY = "tokenizer"
UNFINISHED = "\ufffd"
_LONGEST = 4
"""Bytes of a character in UTF-8."""


class Tokenizer:
    """Reads ``tokenizer/tokenizer.json`` of a bundle, and the chat template beside it.

    Raises:
        BundleError: the file is missing or is no tokenizer.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.spec = bundle.manifest.tokenizer
        self._owner = f"bundle {bundle.path.name}"
        with self._faults_of_the_bundle():
            self._encoder = Encoder(bundle.path / DIRECTORY, self.spec)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, in which control tokens may be spelled, with exactly one BOS where the model wants one.

        Raises:
            RuntimeLimitError: it is no text that the tokenizer can take.
        """
        try:
            return self._encoder.encode(text)
        except Fault as fault:
            raise RuntimeLimitError(
                self._owner, got=fault.got, expected=fault.expected, repair="Give text in UTF-8."
            ) from fault

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False) -> list[int]:
        """Token ids of `messages` (``role``, ``content``) rendered by the chat template, ready for the answer.

        Control tokens come from the template alone: what a message spells is text. With `parse_special` a message may
        spell control tokens too.

        Raises:
            BundleError: the bundle has no chat template, or it refuses the messages.
        """
        if not self.spec.has_chat_template:
            raise self._error("no chat template", "the tokenizer of the model", "Export a checkpoint that has it.")
        with self._faults_of_the_bundle():
            return self._encoder.encode_chat(messages, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that form no character become U+FFFD.

        Raises:
            BundleError: the tokenizer cannot decode what it encodes.
        """
        with self._faults_of_the_bundle():
            return self._encoder.decode(ids)

    def behind_control(self, ids: list[int]) -> list[int]:
        """What of `ids` is behind the last special token."""
        place = next((n for n in range(len(ids), 0, -1) if ids[n - 1] in self._encoder.special), 0)
        return ids[place:]

    @contextmanager
    def _faults_of_the_bundle(self) -> Iterator[None]:
        try:
            yield
        except Fault as fault:
            repair = "Export a checkpoint that has the model's own tokenizer, or send other messages."
            raise self._error(fault.got, fault.expected, repair) from fault

    def _error(self, got: str, expected: str, repair: str) -> BundleError:
        return BundleError(self._owner, got=got, expected=expected, repair=repair)


class TextStream:
    """Turns tokens into text one by one, and holds back bytes that do not yet make a whole character.

    Each step decodes the tokens since the last whole character, preceded by those of the step before, at first by the
    end of the prompt: tokenizers treat the first token of a text differently (a stripped leading space). The text of
    the prompt and what this gives are the text of all tokens; behind a control token a text begins.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._replacement = self._tokens_of_replacement()
        ids = token_ids(prompt)
        started = self._started(ids)
        self._before = self._context(ids[: len(ids) - started])
        self._pending = ids[len(ids) - started :]

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._pending.append(token)
        text = self._new_text()
        if not text or self._is_unfinished(text, self._pending):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is left at the end, without the bytes of a character that was never completed."""
        text = self._new_text().rstrip(UNFINISHED)
        self._before, self._pending = self._pending, []
        return text

    def _tokens_of_replacement(self) -> list[int]:
        """U+FFFD itself, which text may hold, without what comes before every text."""
        ids = self._tokenizer.encode(UNFINISHED)
        while len(ids) > 1 and self._tokenizer.decode(ids[1:]) == UNFINISHED:
            ids = ids[1:]
        return ids

    def _is_unfinished(self, text: str, ids: list[int]) -> bool:
        """Whether `text`, that of `ids`, ends within a character."""
        return text.endswith(UNFINISHED) and ids[-len(self._replacement) :] != self._replacement

    def _started(self, prompt: list[int]) -> int:
        """Tokens at the end of `prompt` that are the first bytes of a character."""
        for count in range(min(_LONGEST, len(prompt) + 1)):
            whole = prompt[: len(prompt) - count]
            ends = (whole[-size:] for size in range(1, _LONGEST + 1))  # one of them is the last character
            if any(not self._is_unfinished(self._tokenizer.decode(end), end) for end in ends):
                return count
        return 0  # none, or bytes that begin none

    def _context(self, prompt: list[int]) -> list[int]:
        """A few tokens of the end of `prompt` that have text: after them no token is the first of a text. Behind a
        control token a text begins."""
        prompt = self._tokenizer.behind_control(prompt)
        count = 8
        while count < len(prompt) and not self._tokenizer.decode(prompt[-count:]).strip():
            count *= 2
        within = (prompt[-count - more :] for more in range(_LONGEST))  # from the first byte of a character
        return next((ids for ids in within if not self._tokenizer.decode(ids).startswith(UNFINISHED)), prompt[-count:])

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._pending)
        if text.startswith(known):
            return text[len(known) :]
        # Bytes that cannot be read make some decoders forget the characters before them: these stand already.
        return self._tokenizer.decode(self._pending)
