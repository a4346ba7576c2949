"""From logits to the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exporter.errors import ConfigError


def best(logits: Tensor) -> int:
    """The token of the largest of `logits`, [vocab] float32; the first of several.

    In numpy: torch's argmax takes ten times as long, 2% of a token of Gemma 3 270M.
    """
    token = int(logits.numpy().argmax())
    assert not logits[token].isnan(), "the program produced NaN logits"  # numpy takes NaN for the largest number
    return token


class Sampler:
    """Greedy at temperature 0; otherwise draws from the softmax of the logits divided by `temperature`.

    Args:
        temperature: 0 takes the best token every time.
        top_k: draw among the k best tokens.
        top_p: draw among the fewest best tokens whose probabilities, after temperature and `top_k`, reach p.
        seed: two samplers with one seed draw the same tokens from the same logits.

    Raises:
        ConfigError: a value outside its range, or `top_k` or `top_p` at temperature 0, where they would do nothing.
    """

    def __init__(
        self, *, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0
    ) -> None:
        _require(temperature >= 0 and math.isfinite(temperature), "temperature", temperature, "a finite number >= 0")
        _require(top_k is None or top_k >= 1, "top_k", top_k, "an integer >= 1")
        _require(top_p is None or 0 < top_p <= 1, "top_p", top_p, "a number above 0 and at most 1")
        _require(0 <= seed < 2**63, "seed", seed, "an integer from 0 to 2**63 - 1")
        for name, value in (("top_k", top_k), ("top_p", top_p)):
            _require(temperature > 0 or value is None, name, value, "none at temperature 0, which is greedy")
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Choose a token from `logits`, [vocab] float32."""
        greedy = best(logits)
        if self._temperature == 0:
            return greedy
        kept, ids = logits.double().sort(descending=True, stable=True)
        kept, ids = kept[: self._top_k], ids[: self._top_k]
        # Shifted by the maximum first: a tiny temperature must not turn the quotient into inf - inf.
        probabilities = ((kept - kept[0]) / self._temperature).softmax(0)
        if self._top_p is not None:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self._top_p]
        return int(ids[torch.multinomial(probabilities, 1, generator=self._generator)])


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"sampling {name}", got=str(got), expected=expected, repair=f"Change `{name}`.")
