"""LEAF: the domains: kinds of text in several languages and scripts. None of their texts calibrates anything
(docs/quality.md says where each is from)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from exporter.text.encoder import Encoder

TEXTS = Path(__file__).parent / "texts"
PREFIX = 16
"""Tokens of a passage, BOS included, whose predictions are not scored: too little was read before them."""


class Domain(NamedTuple):
    name: str
    file: str


DOMAINS = (
    Domain("technical English", "technical_english.txt"),
    Domain("English novel", "novel.txt"),
    Domain("dialogue", "dialogue.json"),
    Domain("Python source", "python_source.txt"),
    Domain("C source", "c_source.txt"),
    Domain("tables, numbers", "tables_numbers.txt"),
    Domain("French", "french.txt"),
    Domain("German", "german.txt"),
    Domain("Spanish", "spanish.txt"),
    Domain("Russian", "russian.txt"),
    Domain("Chinese", "chinese.txt"),
    Domain("Japanese", "japanese.txt"),
    Domain("Hindi", "hindi.txt"),
    Domain("Arabic", "arabic.txt"),
)


class Passage(NamedTuple):
    """Token ids read from the beginning of a context; those from `first` on are predicted and scored."""

    ids: list[int]
    first: int = PREFIX

    @property
    def positions(self) -> int:
        return max(len(self.ids) - self.first, 0)


def passages_of(domain: Domain, encoder: Encoder, positions: int, context: int) -> list[Passage]:
    """Passages with `positions` scored tokens in all, or as many as the text has.

    A text is one passage, a new one when the context is full. Each conversation of the dialogue is one; a model without
    a chat template has none.

    Args:
        domain: which text.
        encoder: of the bundle's tokenizer.
        positions: how many predictions to score.
        context: the most tokens that the model takes.
    """
    found: list[Passage] = []
    for ids in _texts(domain, encoder, context):
        left = positions - sum(one.positions for one in found)
        passage = Passage(ids[: PREFIX + left])
        if left > 0 and passage.positions:
            found.append(passage)
    return found


def _texts(domain: Domain, encoder: Encoder, context: int) -> Iterator[list[int]]:
    text = (TEXTS / domain.file).read_text(encoding="utf-8")
    if domain.file.endswith(".json"):
        if encoder.spec.has_chat_template:
            for conversation in json.loads(text):
                yield encoder.encode_chat(conversation, add_generation_prompt=False)[:context]
        return
    ids = encoder.encode(text)
    head = encoder.spec.with_bos([])
    yield ids[:context]
    step = context - len(head)
    for start in range(context, len(ids), max(step, 1)):
        yield [*head, *ids[start : start + step]]
