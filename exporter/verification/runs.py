"""Runs models on the calls that verification makes: a session's program, or an eager model layer by layer.

Letters: V vocab_size, D hidden_size, n calls. What the runs said is compared in `compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, repeat
from typing import NamedTuple

import torch

from exporter.bundle import Bundle
from exporter.english import english_ids
from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.programs import run_kind
from exporter.quantization.modules import floats_held
from exporter.spec import PROGRAMS, Manifest, ProgramKind, program_for
from runtime_ref.programs import EagerProgram, load_program
from runtime_ref.session import Session
from runtime_ref.state import State


class Calls(NamedTuple):
    """Tokens, and how many of them each call takes; those that no call takes are left out."""

    ids: list[int]
    pieces: list[int]

    def spans(self) -> Iterator[tuple[int, int]]:
        """First and past-the-last position of every call."""
        ends = list(accumulate(self.pieces))
        return zip([0, *ends], ends, strict=False)

    def within(self, tokens: int) -> Calls:
        """The first of them, as many as go through no more than `tokens`; at least one."""
        pieces = self.pieces[: max(1, sum(end <= tokens for end in accumulate(self.pieces)))]
        return Calls(self.ids[: sum(pieces)], pieces)

    def described(self) -> str:
        return f"{len(self.pieces)} calls over {sum(self.pieces)} tokens"


def open_session(bundle: Bundle) -> Session:
    """A session over the program of a bundle that has one."""
    return Session(bundle.manifest, load_program(bundle))


def eager_session(manifest: Manifest, decoder: Decoder) -> Session:
    """A session over the eager model, with a state of its own."""

    def method(kind: ProgramKind) -> Callable[..., torch.Tensor]:
        return lambda input_ids, position_ids, *states: run_kind(decoder, kind, input_ids, position_ids, states)

    return Session(manifest, EagerProgram({name: method(kind) for name, kind in PROGRAMS.items()}))


def english_calls(bundle: Bundle, count: int | None = None) -> Calls:
    """English text, as the tokenizer in the bundle has it, and the calls of the short form, or of the long one that
    goes through `count` tokens. Where there is less text or context there are fewer."""
    manifest = bundle.manifest
    most = manifest.max_context_length if count is None else count
    ids = english_ids(bundle.path / "tokenizer" / "tokenizer.json", manifest.tokenizer, most)
    pieces = short_schedule(manifest.max_prefill_chunk, len(ids))
    return Calls(ids, pieces if count is None else long_schedule(pieces, manifest.max_prefill_chunk, len(ids)))


def short_schedule(chunk: int, room: int) -> list[int]:
    """Lengths of calls, of `chunk` at most and `room` in all, that touch every case: a first token through main, small
    and full chunks, a wrap, decode."""
    pieces = []
    for piece in (1, 1, 2, 7, chunk, max(2, chunk // 4), *[1] * 8):
        size = min(piece, chunk, room)
        if size:
            pieces.append(size)
            room -= size
    return pieces


def long_schedule(pieces: list[int], chunk: int, count: int) -> list[int]:
    """`pieces`, then chunks of 61 (no divisor of any window) up to `count` tokens."""
    step, left = min(61, chunk), count - sum(pieces)
    return pieces + [step] * (left // step) + ([left % step] if left % step else [])


class Run(NamedTuple):
    """What a model made of some calls: its state after the last, and the logits ``[V]`` of each.

    Of an eager model also what its layers gave of each call's last token, ``[1, n, D]``; and `beside`, the logits that
    its own norm and head make of what another model's layers gave.
    """

    state: State
    logits: list[torch.Tensor]
    hidden: torch.Tensor | None = None
    beside: list[torch.Tensor] | None = None


def run(session: Session, calls: Calls) -> Run:
    """The calls through the program of `session`, from a fresh state."""
    session.state = State(session.manifest)
    return Run(session.state, [session.prefill(calls.ids[start:end], end - start) for start, end in calls.spans()])


@torch.no_grad()
def run_by_layers(
    manifest: Manifest, decoder: Decoder, calls: Calls, read: ReadParameter = all_read,
    other: torch.Tensor | None = None,
) -> Run:  # fmt: skip
    """`run` of an eager model, one layer after the other: each does its part of all calls before the next one is
    looked at, so of an unread `decoder` no more than a layer or a table is held, and the head is read once. `other` is
    the `hidden` of another model's run."""
    state, spans = State(manifest), list(calls.spans())
    state.ensure_rows(spans[-1][1])
    state.advance(calls.ids[: spans[-1][1]])
    with decoder.reading("embed_tokens", read):
        hidden = [decoder.embed(torch.tensor([calls.ids[start:end]])) for start, end in spans]

    @contextmanager
    def around(n: int) -> Iterator[None]:
        with decoder.reading(f"layers.{n}", read), floats_held(decoder.layers[n]):
            yield

    made = [decoder.call(end - start, start, program_for(end - start).write_first) for start, end in spans]
    for _ in decoder.through_layers(hidden, made, lambda n: repeat(decoder.states_of(n, state.tensors)), around):
        pass
    last = torch.cat([rows[:, -1:] for rows in hidden], 1)
    with decoder.reading("norm", read), decoder.reading("lm_head", read):
        beside = None if other is None else list(decoder.logits(other)[0])
        return Run(state, list(decoder.logits(last)[0]), last, beside)
