"""The tokenizer of a bundle: ids with exactly one BOS where the model wants one, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from exporter.bundle import Bundle
from exporter.chat import render, variables
from exporter.errors import BundleError, ConfigError
from exporter.special_tokens import control_ids
from runtime_ref.plain_text import PlainText

DIRECTORY = "tokenizer"


class Tokenizer:
    """Reads ``tokenizer/tokenizer.json`` of a bundle, and the chat template beside it.

    Raises:
        BundleError: the file is missing or is no tokenizer.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.spec = bundle.manifest.tokenizer
        self._directory = bundle.path / DIRECTORY
        self._owner = f"bundle {bundle.path.name}"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._directory / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise self._error(f"no usable {DIRECTORY}/tokenizer.json ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; what spells a control token is that token. BOS comes from the manifest alone, so it
        cannot come twice, whether the text begins with it or the tokenizer's own post-processing would have added it.
        """
        check_text(text)
        return self.spec.with_bos(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False) -> list[int]:
        """Token ids of `messages` (``role``, ``content``) rendered by the chat template, ready for the answer.

        Control tokens come from the template alone: what a message spells like one stays text, or it could end its
        turn and begin one of the system's. With `parse_special` it is that token.

        Raises:
            BundleError: the bundle has no chat template, or it fails for the messages.
            ConfigError: halves of characters in them.
        """
        check_text(json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str))
        if not self.spec.has_chat_template:
            raise self._error("no chat template")
        try:
            template = (self._directory / "chat_template.jinja").read_text(encoding="utf-8")
            known = variables(self._json("tokenizer_config.json"), self._json("special_tokens_map.json"))
        except (OSError, ValueError) as error:
            raise self._error(f"no usable chat template ({error})") from error
        if parse_special:
            return self.encode(render(self._owner, template, messages, known, answering=True))
        plain = PlainText(self._tokenizer, template, messages)
        return self.spec.with_bos(plain.encode(render(self._owner, template, plain.messages, known, answering=True)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def text_before(self, ids: Sequence[int]) -> list[int]:
        """The last of `ids` that are text and that the text after them depends on: none behind a control token."""
        control = control_ids(self._tokenizer, None)
        last = list(ids[-TextStream.BEFORE :])
        behind = max((place + 1 for place, id in enumerate(last) if id in control), default=0)
        return last[behind:]

    def _json(self, name: str) -> dict[str, Any]:
        file = self._directory / name
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(values, dict):
            raise ValueError(f"{name} holds a {type(values).__name__}")
        return values

    def _error(self, got: str) -> BundleError:
        return BundleError(
            self._owner, got=got, expected="the tokenizer of the model", repair="Export a checkpoint that has it."
        )


def check_text(text: str) -> None:
    """Whether `text` is one: bytes of a command line that are no UTF-8 arrive as halves of characters.

    Raises:
        ConfigError: it holds some.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            "text", got=f"{text[error.start : error.end]!r} in it", expected="Unicode", repair="Give it as UTF-8."
        ) from error


class TextStream:
    """Turns tokens into text one by one, and holds back bytes that do not yet make a whole character.

    Each step decodes the tokens since the last whole character, preceded by those of the step before, because
    tokenizers treat the first token of a text differently (a stripped leading space).
    """

    BEFORE = 8
    """Tokens of a prompt that are decoded too; a character has four bytes at most."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: what the text goes on from, so that it keeps its first space."""
        self._tokenizer = tokenizer
        before = tokenizer.text_before(prompt)
        # A prompt of ids may end inside a character.
        whole = next((n for n in range(4) if not tokenizer.decode(before[: len(before) - n]).endswith("\ufffd")), 0)
        self._before, self._pending = before[: len(before) - whole], before[len(before) - whole :]

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is left at the end, without the bytes of a character that was never completed."""
        text = self._new_text().rstrip("\ufffd")
        self._before, self._pending = self._pending, []
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._pending)[len(known) :]
