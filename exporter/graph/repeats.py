"""Whether two constants of a file hold the same numbers."""

from __future__ import annotations

import hashlib

import numpy as np

SMALL = 4096
"""Smaller constants may hold the same few numbers by chance."""


def orderless_digest(content: memoryview) -> bytes:
    """A digest that does not depend on the order of the numbers, so that a transposed copy is recognised. It counts
    half bytes, the smallest numbers there are."""
    counts = np.zeros(256, dtype=np.int64)
    values = np.frombuffer(content, dtype=np.uint8)
    for start in range(0, len(values), 1 << 24):  # bincount's copy is eight times as large
        counts += np.bincount(values[start : start + (1 << 24)], minlength=256)
    table = counts.reshape(16, 16)
    return hashlib.blake2b((table.sum(0) + table.sum(1)).tobytes(), digest_size=16).digest()
