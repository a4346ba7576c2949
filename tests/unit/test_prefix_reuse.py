"""Prefix reuse at every place where a second prompt may part from the first, past the wrap and past a growth."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from toy import VOCAB, oracle, toy_manifest, toy_program

from exporter.errors import RuntimeLimitError
from runtime_ref.session import Session

WINDOW, FIRST, SECOND = 8, 50, 60
IDS = torch.randint(0, VOCAB, (FIRST,), generator=torch.Generator().manual_seed(3)).tolist()
OTHER = torch.randint(1, VOCAB, (SECOND,), generator=torch.Generator().manual_seed(4)).tolist()


def counted_session(slack: int) -> tuple[Session, list[int]]:
    """A session after the first prompt, and the tokens of each call from then on."""
    manifest = toy_manifest(("ring", "full", "ring"), window=WINDOW, slack=slack)
    session, calls = Session(manifest, toy_program(manifest)), []
    session.prefill(IDS)
    program = session.program

    class Spy:
        def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
            calls.append(input_ids.shape[1])
            return program.run(method, input_ids, position_ids, states)

    session.program = Spy()
    return session, calls


@pytest.mark.parametrize("slack", [0, 1, 3, WINDOW])
def test_exactly_what_is_still_there_is_reused(slack: int) -> None:
    """Of the 50 tokens a ring of C rows holds the last C; the next token needs W - 1 of them before it."""
    for shared in (0, 1, 20, *range(FIRST - 2 * WINDOW, FIRST + 1)):
        session, calls = counted_session(slack)
        assert len(session.state.growths) == 1 and 3 * (WINDOW + slack) < FIRST
        tail = [token if token != IDS[min(shared, FIRST - 1)] else token - 1 for token in OTHER[: SECOND - shared]]
        prompt = [*IDS[:shared], *tail]
        kept = shared if shared == FIRST or shared >= FIRST - slack - 1 else 0
        logits = session.prefill(prompt, reuse=True)
        assert sum(calls) == SECOND - kept, shared
        assert session.state.tokens == prompt
        torch.testing.assert_close(logits, oracle(session.manifest, prompt)[-1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("slack", [0, 1, 3, WINDOW])
def test_a_rewind_reaches_as_far_as_the_slack_and_no_further(slack: int) -> None:
    """One token more than the slack: the slot that the next token overwrites is free to be stale."""
    session, _ = counted_session(slack)
    assert session.state.max_rewind == slack + 1
    with pytest.raises(RuntimeLimitError, match=f"position {FIRST - WINDOW - slack} is the oldest still resident"):
        session.rewind(slack + 2)
    assert session.length == FIRST
    session.rewind(slack + 1)
    kept = IDS[: FIRST - slack - 1]
    for token in OTHER[:12]:
        kept = [*kept, token]
        torch.testing.assert_close(session.decode(token), oracle(session.manifest, kept)[-1], atol=1e-3, rtol=1e-4)
