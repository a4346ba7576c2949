"""The short form of the quality suite: the program that ships beside the float model, on a few tokens of every domain.

Letters: n scored positions, V vocab_size, D hidden_size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from exporter.cache.plain import PlainKernels
from exporter.checkpoint import Checkpoint
from exporter.model.decoder import Decoder, ReadParameter, all_read, parameter_shapes
from exporter.quality.domains import DOMAINS, PREFIX, Passage, passages_of
from exporter.quality.scores import DomainScores
from exporter.spec import DomainScore, Manifest
from exporter.text.encoder import Encoder
from runtime_ref.quality import passage_logits
from runtime_ref.session import Session

POSITIONS = 32
"""Scored in each domain."""
LEAST = 8
"""A domain with fewer has no mean to speak of: of a very short context."""
ROWS = 8
"""Of logits at a time: one may be a megabyte."""

Texts = Mapping[str, Sequence[Passage]]
"""The passages of each domain, by its name."""


OWN_TEXT, OWN_POSITIONS = "calibration file", 128
"""The name of what is no domain, a part of the user's text, and how much of it is scored."""


def short_texts(encoder: Encoder, context: int, held_out: Sequence[int] = ()) -> Texts:
    """What an export scores; `held_out` is of the user's own text. Domains of which the context leaves too little are
    left out."""
    texts = {domain.name: passages_of(domain, encoder, POSITIONS, context) for domain in DOMAINS}
    texts[OWN_TEXT] = [Passage(list(held_out[: min(PREFIX + OWN_POSITIONS, context)]))]
    return {name: own for name, own in texts.items() if sum(one.positions for one in own) >= LEAST}


class FloatLogits:
    """The float model's logits at every scored position of some texts, in a file: in memory they would be as large as
    a model.

    They come in the order of the texts.
    """

    def __init__(self, texts: Texts, file: Path, vocab_size: int) -> None:
        self.texts, self._file, self._vocab_size = texts, file, vocab_size

    def rows(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Domain, the token that is predicted, and logits ``[V]`` of it."""
        with self._file.open("rb") as stream:
            for name, passages in self.texts.items():
                for passage in passages:
                    for following in passage.ids[passage.first :]:
                        logits = np.fromfile(stream, np.float32, self._vocab_size)
                        yield name, following, torch.from_numpy(logits)


@contextmanager
def float_logits(checkpoint: Checkpoint, manifest: Manifest, texts: Texts, folder: Path) -> Iterator[FloatLogits]:
    """The float model of `checkpoint` over `texts`, a layer and a table of it read at a time, in a file under `folder`
    that goes when this is left."""
    on_floats = manifest.with_float_caches()
    decoder = Decoder.unread(checkpoint.spec, on_floats.states, PlainKernels())
    read = checkpoint.reader(parameter_shapes(checkpoint.spec))
    with tempfile.TemporaryDirectory(dir=folder) as own:
        file = Path(own) / "logits"
        with file.open("wb") as stream:
            for rows in logits_by_layers(decoder, [one for own in texts.values() for one in own], read):
                stream.write(rows.numpy().tobytes())
        yield FloatLogits(texts, file, checkpoint.spec.vocab_size)


@torch.no_grad()
def logits_by_layers(decoder: Decoder, passages: Sequence[Passage], read: ReadParameter) -> Iterator[torch.Tensor]:
    """Logits ``[n, V]`` at the scored positions of `passages`, a few rows at a time, each passage from a context of its
    own."""
    lengths = [len(passage.ids) - 1 for passage in passages]  # nothing follows the last token

    with decoder.reading("embed_tokens", read):
        hidden = [decoder.embed(torch.tensor([passage.ids[:-1]])) for passage in passages]
    calls = [decoder.call(length, 0, write_first=False) for length in lengths]
    for _ in decoder.through_layers(
        hidden, calls, lambda n: decoder.fresh_states(n, lengths), lambda n: decoder.reading(f"layers.{n}", read)
    ):
        pass
    scored = torch.cat([rows[0, one.first - 1 :] for rows, one in zip(hidden, passages, strict=True)])
    with decoder.reading("norm", read), decoder.reading("lm_head", read):
        for rows in scored.split(ROWS):
            yield decoder.logits(rows[None])[0]


def score_session(session: Session, floats: FloatLogits) -> dict[str, DomainScore]:
    """What the program of `session` says of the same texts, token by token behind the first ones of a passage."""

    rows = (row for own in floats.texts.values() for passage in own for row in passage_logits(session, passage))
    return _scores(floats, rows)


def score_decoder(decoder: Decoder, floats: FloatLogits) -> dict[str, DomainScore]:
    """The same of an eager decoder that has its weights."""
    passages = [one for own in floats.texts.values() for one in own]
    rows = (row for rows in logits_by_layers(decoder, passages, all_read) for row in rows)
    return _scores(floats, rows)


def _scores(floats: FloatLogits, said: Iterator[torch.Tensor]) -> dict[str, DomainScore]:
    """`said` gives logits ``[V]`` of every predicted position, in the order of the texts."""
    found = {name: DomainScores(name) for name in floats.texts}
    for (name, following, want), got in zip(floats.rows(), said, strict=True):
        found[name].add(want[None], got[None], torch.tensor([following]))
    return {name: scores.score() for name, scores in found.items()}
