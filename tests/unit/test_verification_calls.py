"""Which calls verification makes: all lengths that matter, and no more than there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.backends import Effort, formats, traits
from exporter.verification import Calls
from exporter.verification.runs import long_schedule, short_schedule


def test_the_short_form_of_a_shipped_config() -> None:
    assert short_schedule(512, 32768) == [1, 1, 2, 7, 512, 128, *[1] * 8]


@given(chunk=st.integers(2, 600), room=st.integers(2, 2000))
def test_calls_fit_chunk_and_context(chunk: int, room: int) -> None:
    chunk = min(chunk, room)
    short = short_schedule(chunk, room)
    assert all(0 < piece <= chunk for piece in short) and sum(short) <= room and short[:2] == [1, 1]
    pieces = long_schedule(short, chunk, room)
    assert all(0 < piece <= chunk for piece in pieces) and sum(pieces) == room and pieces[: len(short)] == short


@pytest.mark.parametrize("effort", [traits(name).effort for name in formats()])
@given(context=st.integers(2, 4000))
def test_the_full_form_fits_every_context(effort: object, context: int) -> None:
    assert isinstance(effort, Effort)
    own = effort.within(context)
    assert own.tokens + own.greedy <= context and own.tokens >= 2 and own.greedy >= 0
    assert own.tail < own.tokens and (own.tail > 0) == (effort.tail > 0)
    assert own == effort or context < effort.tokens + 4 * effort.greedy


def test_the_first_calls_within_some_tokens() -> None:
    calls = Calls(list(range(100)), [1, 1, 2, 7, 40, 10])
    assert [calls.within(count).pieces for count in (0, 1, 10, 11, 51, 1000)] == [
        [1], [1], [1, 1, 2], [1, 1, 2, 7], [1, 1, 2, 7, 40], calls.pieces
    ]  # fmt: skip
    assert calls.within(11).ids == list(range(11)) and calls.within(1000).ids == list(range(61))
