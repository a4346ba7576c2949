"""The tokenizer of a bundle: ids with exactly one BOS where the model wants one, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from exporter.bundle import Bundle
from exporter.errors import BundleError

DIRECTORY = "tokenizer"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


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

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. BOS comes from the manifest alone, so it cannot come twice, whether the text (a
        rendered chat template) begins with it or the tokenizer's own post-processing would have added it."""
        return self.spec.with_bos(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `messages` (``role``, ``content``) rendered by the chat template, ready for the answer.

        Raises:
            BundleError: the bundle has no chat template, or it refuses the messages.
        """
        # Rendered in jinja's immutable sandbox: a template is untrusted code.
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self.spec.has_chat_template:
            raise self._error("no chat template")
        template = (self._directory / "chat_template.jinja").read_text(encoding="utf-8")
        config = self._config()
        variables: dict[str, Any] = {name: _text(config[name]) for name in SPECIAL_TOKENS if name in config}
        try:
            rendered = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=template,
                add_generation_prompt=True,
                **variables,
            )[0][0]
        except TemplateError as error:
            raise self._error(f"a chat template that refuses the messages ({error})") from error
        return self.encode(rendered)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _config(self) -> dict[str, object]:
        file = self._directory / "tokenizer_config.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _error(self, got: str) -> BundleError:
        return BundleError(
            self._owner, got=got, expected="the tokenizer of the model", repair="Export a checkpoint that has it."
        )


def _text(token: object) -> object:
    """A special token in `tokenizer_config.json` is its text, or an object that holds it."""
    return token["content"] if isinstance(token, dict) else token


class TextStream:
    """Turns tokens into text one by one, and holds back bytes that do not yet make a whole character.

    Each step decodes the tokens since the last whole character, preceded by those of the step before, because
    tokenizers treat the first token of a text differently (a stripped leading space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []

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
