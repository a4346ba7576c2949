"""The text that calibrates: passages in many languages and kinds of text, or the user's own.

No text that comes with the exporter is one that quality is judged on (`exporter.quality`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from exporter.errors import ConfigError
from exporter.text.encoder import Encoder
from exporter.text.files import Fault

TEXTS = Path(__file__).parent / "texts"
TOKENS = 384
"""Of one passage."""
OWN_PASSAGES = 24
"""Of a user's file, evenly apart; the last is judged and does not calibrate."""


class Calibration(NamedTuple):
    """int64 ``[1, T]`` each: texts that have nothing to do with each other, after BOS where the model wants one.

    Attributes:
        passages: what calibrates.
        held_out: of a user's own text, the ids of a passage that did not calibrate.
    """

    passages: list[torch.Tensor]
    held_out: tuple[int, ...] = ()


def calibration(encoder: Encoder, context: int, own: Path | None = None) -> Calibration:
    """The passages of the user's file `own`, or of the texts that come with the exporter. Conversations among those go
    through the chat template, if there is one.

    Args:
        encoder: of the bundle's tokenizer.
        context: the most tokens that the model takes.
        own: a text in UTF-8.

    Raises:
        ConfigError: the file cannot be read, or is too short to calibrate and judge.
    """
    tokens = min(TOKENS, context)
    if own is None:
        return Calibration([torch.tensor([ids[:tokens]]) for ids in _texts(encoder)])
    return _own(encoder, own, tokens)


def _texts(encoder: Encoder) -> Iterator[list[int]]:
    for file in sorted(TEXTS.glob("*.txt")):
        yield encoder.encode(file.read_text(encoding="utf-8"))
    if encoder.spec.has_chat_template:
        for messages in json.loads((TEXTS / "chat.json").read_text(encoding="utf-8")):
            try:
                yield encoder.encode_chat(messages, add_generation_prompt=False)
            except Fault:  # a template of some other purpose; the other texts calibrate
                return


def _own(encoder: Encoder, file: Path, tokens: int) -> Calibration:
    try:
        ids = encoder.encode(file.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError, Fault) as error:
        raise ConfigError(
            "config, calibration", got=f"{file.name}: {error}", expected="a text in UTF-8", repair="Check the path."
        ) from error
    bos = encoder.spec.with_bos([])
    ids = ids[len(bos) :]
    size = tokens - len(bos)
    count = min(OWN_PASSAGES, len(ids) // size)
    if count < 2:
        raise ConfigError(
            "config, calibration",
            got=f"{file.name} with {len(ids)} tokens",
            expected=f"at least {2 * size}, a passage to calibrate on and one to judge by",
            repair="Give a longer text, or leave calibration out.",
        )
    starts = [(len(ids) - size) * n // (count - 1) for n in range(count)]
    *own, held_out = [[*bos, *ids[start : start + size]] for start in starts]
    return Calibration([torch.tensor([one]) for one in own], tuple(held_out))
