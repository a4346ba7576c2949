"""The rows a growing state goes through, by the name of the policy."""

from __future__ import annotations

from typing import Literal

import pytest

from exporter.spec import CachePolicy


def test_states_that_grow_start_at_64_rows_and_double() -> None:
    policy = CachePolicy()
    assert (policy.initial_rows, policy.growth) == (64, "double")


@pytest.mark.parametrize(
    ("growth", "first", "steps"),
    [
        ("double", 64, [64, 128, 256, 512, 1000]),
        ("1.5x", 64, [64, 96, 144, 216, 324, 486, 729, 1000]),
        ("double", 1, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]),
        ("1.5x", 1, [1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93, 140, 210, 315, 473, 710, 1000]),
    ],
)
def test_every_step_up_to_the_ceiling(growth: Literal["double", "1.5x"], first: int, steps: list[int]) -> None:
    """A token at a time; half of an odd number is rounded up, so that a single row grows too."""
    policy, rows, seen = CachePolicy(growth=growth, initial_rows=first), first, [first]
    for needed in range(1, 1001):
        rows = policy.grown_rows(rows, needed, 1000)
        assert rows >= needed
        if rows != seen[-1]:
            seen.append(rows)
    assert seen == steps
