"""English text that comes with every Python, for comparing models on real language."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

from exporter.spec import TokenizerSpec
from exporter.text.files import encode, load_tokenizer

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
    return spec.with_bos(encode(load_tokenizer(tokenizer_file), english_text()).ids)[:count]
