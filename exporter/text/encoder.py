"""LEAF: text and conversations as a model takes them: ids with exactly one BOS where it wants one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from exporter.spec import TokenizerSpec
from exporter.text.chat import ChatEncoder
from exporter.text.files import TEMPLATE, TOKENIZER, encode, library_calls, load_tokenizer, read_template
from exporter.text.files import special_tokens as read_special_tokens
from exporter.text.template import ChatTemplate


class Encoder:
    """Args:
        directory: of a tokenizer's files, as a bundle has them.
        spec: what the bundle says of it.

    Raises:
        Fault: there is no tokenizer that can be read.
    """

    def __init__(self, directory: Path, spec: TokenizerSpec) -> None:
        self.spec = spec
        self._directory = directory
        self.tokenizer = load_tokenizer(directory / TOKENIZER)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, in which control tokens may be spelled. BOS comes from `spec` alone, so it cannot
        come twice, whether the text (a rendered chat template) begins with it or the tokenizer's own post-processing
        would have added it.

        Raises:
            Fault: it is no text that the tokenizer can take.
        """
        return self.spec.with_bos(encode(self.tokenizer, text).ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `messages` (``role``, ``content``) rendered by the chat template, which the spec must have.

        Args:
            messages: each with what the template takes.
            add_generation_prompt: end with what begins an answer.
            parse_special: control tokens that a message spells are control tokens.

        Raises:
            Fault: the template refuses the messages.
        """
        assert self.spec.has_chat_template
        ids = self._chat.encode(messages, add_generation_prompt=add_generation_prompt, parse_special=parse_special).ids
        bos = self.spec.bos_token_id
        if bos in ids and not self.decode(ids[: ids.index(bos)]).strip():
            return ids  # the template's own, after blanks at most
        return self.spec.with_bos(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that form no character become U+FFFD.

        Raises:
            Fault: the tokenizer cannot decode what it encodes.
        """
        with library_calls("a tokenizer that decodes"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def _chat(self) -> ChatEncoder:
        template = ChatTemplate(read_template(self._directory / TEMPLATE), read_special_tokens(self._directory))
        bos = self.spec.bos_token_id
        return ChatEncoder(self.tokenizer, template, {*self.spec.eos_token_ids} | ({bos} if bos is not None else set()))
