"""English text that comes with every Python, for comparing models on real language."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer

from exporter.spec import TokenizerSpec

# Chapters of the language reference that are mostly prose.
CHAPTERS = (
    "execmodel",
    "naming",
    "objects",
    "exceptions",
    "import",
    "context-managers",
    "types",
    "with",
    "class",
    "if",
)


def english_text() -> str:
    """The chosen chapters of Python's own documentation, as installed with the interpreter."""
    return "\n\n".join(topics.topics[name].strip() for name in CHAPTERS if name in topics.topics)


def english_ids(tokenizer_file: Path, spec: TokenizerSpec, count: int) -> list[int]:
    """The first `count` token ids of the text, after BOS where the model wants one."""
    encoded = Tokenizer.from_file(str(tokenizer_file)).encode(english_text(), add_special_tokens=False).ids
    return spec.with_bos(encoded)[:count]
