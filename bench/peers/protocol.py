"""What every peer's worker does: load, fill, decode, score, and one JSON line on standard output.

A worker runs in its peer's own environment, so this file needs Python and numpy alone. Timing is the same for all:
`prefill` is N tokens over the seconds from an empty cache to the first greedy token, `decode` is one over the median
seconds of the greedy tokens after it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

DECODED = 32


class Peer(Protocol):
    """A loaded model, made from its place and the request. `files` are its weights and programs, for their size."""

    @property
    def files(self) -> Sequence[Path]: ...

    def run(self, ids: Sequence[int], count: int) -> list[float]:
        """Reset, run `ids`, then `count` greedy tokens; end tokens do not stop it.

        Returns:
            Seconds of the prompt up to its greedy token, then of each of the `count - 1` tokens after that one.
        """
        ...

    def rows(self, ids: Sequence[int], prefix: int) -> Iterator[Any]:
        """Reset, run ``ids[:prefix]``, then each later token but the last by itself.

        Yields:
            Logits [vocab] before each token of ``ids[prefix:]``; they may be the same memory every time.
        """
        ...


def resident(key: str) -> int:
    """A line of this process's account, e.g. ``VmRSS`` or its peak ``VmHWM``, in bytes. (``ru_maxrss`` may be the
    parent's.)"""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


def resident_parts() -> dict[str, int]:
    """Of this process now, bytes: ``anonymous``, what it wrote, shared memory included, and ``file``, pages of mapped
    files, which the system can drop and read again."""
    return {"anonymous": resident("RssAnon") + resident("RssShmem"), "file": resident("RssFile")}


def log_probabilities(logits: Any) -> Any:
    """The log-softmax of logits [vocab], in float64; normalises rounded log-probabilities again."""
    values = np.asarray(logits, dtype=np.float64)
    values = values - values.max()
    return values - np.log(np.exp(values).sum())


def divergence(expected: Any, logits: Any) -> float:
    """KL divergence in nats of the distribution of `logits` [vocab] from the log-probabilities `expected` [vocab]."""
    wanted = log_probabilities(expected)
    return float(np.exp(wanted) @ (wanted - log_probabilities(logits)))


def mean_scores(rows: Iterable[Any], true: Sequence[int], expected: Sequence[Any]) -> tuple[float, float]:
    """Mean negative log-likelihood and mean KL divergence from float32, in nats.

    Args:
        rows: n times logits [vocab], which may be the same memory.
        true: the n tokens that followed.
        expected: float32's log-probabilities there, [n, vocab].
    """
    loss = distance = 0.0
    for row, token, wanted in zip(rows, true, expected, strict=True):
        loss -= float(log_probabilities(row)[token])
        distance += divergence(wanted, row)
    return loss / len(true), distance / len(true)


def measure(load: Callable[[Path, dict[str, Any]], Peer], packages: Sequence[str], arguments: Sequence[str]) -> None:
    """Run one worker: ``worker.py MODEL REQUEST.json``; imports are done by now.

    The request has ``ids``, ``threads``, ``lengths``, ``repeats`` (of those up to 2048), ``score`` (None or prefix and
    count) and ``expected`` (float32's log-probabilities of the scored tokens, a file of float16).
    """
    stdout = os.dup(1)
    os.dup2(2, 1)  # libraries print; standard output carries the result alone
    model, request = Path(arguments[0]), json.loads(Path(arguments[1]).read_text())
    ids = request["ids"]
    bare, bare_parts = resident("VmRSS"), resident_parts()
    start = time.perf_counter()
    peer = load(model, request)
    load_seconds = time.perf_counter() - start
    peer.run(ids[:128], 1)
    first_token_seconds = time.perf_counter() - start

    prefill, decode, peaks, parts = {}, {}, {}, {}
    for length in sorted(request["lengths"]):
        repeats = request["repeats"] if length <= 2048 else 1
        runs = [peer.run(ids[:length], 1 if index < repeats - 1 else DECODED + 1) for index in range(repeats)]
        prefill[length] = length / statistics.median(run[0] for run in runs)
        decode[length] = 1 / statistics.median(runs[-1][1:])
        peaks[length], parts[length] = resident("VmHWM"), resident_parts()
    peak = resident("VmHWM")
    nll = kl = None
    if request["score"]:  # after the peaks: float32's log-probabilities are not part of them
        prefix, count = request["score"]
        text = ids[: prefix + count]
        nll, kl = mean_scores(peer.rows(text, prefix), text[prefix:], np.load(request["expected"], mmap_mode="r"))
    result = {
        "load_seconds": load_seconds,
        "first_token_seconds": first_token_seconds,
        "prefill": prefill,
        "decode": decode,
        "peaks": peaks,
        "resident": parts,
        "peak_bytes": peak,
        "bare_bytes": bare,
        "bare": bare_parts,
        "file_bytes": sum(file.stat().st_size for file in peer.files),
        "nll": nll,
        "kl": kl,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    sys.stdout.flush()
    os.write(stdout, json.dumps(result).encode() + b"\n")
