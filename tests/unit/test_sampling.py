"""Samplers draw what they say they draw."""

import math
from collections import Counter

import pytest
import torch

from exporter.errors import ConfigError
from runtime_ref.sampling import Sampler

LOGITS = torch.tensor([0.1, 0.4, 0.3, 0.2, 0.0]).log()  # probabilities; the last one is impossible


def drawn(sampler: Sampler, count: int = 4000) -> dict[int, float]:
    return {token: n / count for token, n in Counter(sampler(LOGITS) for _ in range(count)).items()}


def test_greedy_takes_the_best() -> None:
    assert drawn(Sampler(), 5) == {1: 1.0}


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(temperature=1.0), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampler(temperature=0.5), {0: 1 / 30, 1: 16 / 30, 2: 9 / 30, 3: 4 / 30}),
        (Sampler(temperature=1.0, top_k=2), {1: 4 / 7, 2: 3 / 7}),
        (Sampler(temperature=1.0, top_k=99), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampler(temperature=1.0, top_p=0.69), {1: 4 / 7, 2: 3 / 7}),
        (Sampler(temperature=1.0, top_p=0.71), {1: 4 / 9, 2: 3 / 9, 3: 2 / 9}),
        (Sampler(temperature=1.0, top_p=1.0), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampler(temperature=1.0, top_p=1e-9), {1: 1.0}),
        (Sampler(temperature=1.0, top_k=3, top_p=0.75), {1: 4 / 7, 2: 3 / 7}),
        (Sampler(temperature=5e-324), {1: 1.0}),
    ],
)
def test_frequencies(sampler: Sampler, expected: dict[int, float]) -> None:
    assert drawn(sampler) == pytest.approx(expected, abs=0.03)


def test_a_seed_repeats() -> None:
    first, again, other = (Sampler(temperature=1.0, seed=seed) for seed in (5, 5, 6))
    draws = [[sampler(LOGITS) for _ in range(30)] for sampler in (first, again, other)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.01}, "top_p"),
        ({"temperature": 1.0, "top_p": math.nan}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.5}, "top_p"),
    ],
)
def test_nonsense_is_refused(values: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=f"sampling {name}"):
        Sampler(**values)  # type: ignore[arg-type]


def test_nan_logits_are_no_token() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        Sampler()(torch.tensor([0.0, math.nan]))
