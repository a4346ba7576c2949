"""Speed and memory of a bundle on this machine, and how near its decoding comes to the memory's bandwidth.

A decoded token must read every weight and the live cache once: their bytes over the bandwidth measured in the same run
are the least time it can take.

Memory is counted in two ways: the peak of all that is resident, and after each length apart what the process wrote
(anonymous) and pages of files, which the system can drop. ExecuTorch's Python binding locks what it reads of a file, as
far as it may, so all of the file is resident; an app maps its program without locking.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from exporter.bundle import Bundle
from exporter.english import english_text
from exporter.errors import ConfigError, RuntimeLimitError
from exporter.lengths import BENCH_CONTEXTS, BENCH_PREFILLS
from exporter.machine import ResidentParts, peak_memory_bytes, resident_bytes, resident_parts
from exporter.units import BYTES
from runtime_ref.programs import load_program, prepare_runtime
from runtime_ref.sampling import best
from runtime_ref.score import score
from runtime_ref.session import Session
from runtime_ref.tokenizer import Tokenizer

FIRST_PROMPT = 128
REPEATS, DECODED, SHORTEST = 3, 32, 2
THREADS_PER_CORE = 4
"""More are a slip of the hand; thousands end a runtime without a word."""
SCORE_PREFIX, SCORED = 512, 1000
BANDWIDTH_BYTES, BANDWIDTH_PASSES = BYTES["GiB"], 5


@dataclass(frozen=True)
class Length:
    """What was measured with `tokens` in the cache.

    Attributes:
        prefill: tokens a second from an empty cache, the median of the repeats.
        decode: greedy tokens a second after them, by the median token; None if it was not asked for.
        live_bytes: rows of state in use.
        limit: decoded tokens a second if only reading weights and live state once took time.
        peak_bytes: the process's peak so far; lengths are measured from the shortest to the longest.
        resident: what is resident after this length, in its parts; None on systems that do not tell.
    """

    tokens: int
    prefill: float
    decode: float | None
    live_bytes: int
    limit: float
    peak_bytes: int
    resident: ResidentParts | None


@dataclass(frozen=True)
class Bench:
    """One run of one program: seconds and bytes.

    Attributes:
        bare_bytes: resident before the program is loaded, with the interpreter and all imports.
        bare: that in its parts; None on systems that do not tell.
        load_seconds: opening the program, the file in the system's cache.
        first_token_seconds: that and a prompt of 128 tokens, the process's first call.
        program_bytes: the program's file, or all files of its directory.
        token_bytes: of the program, what a decoded token reads.
        bandwidth: bytes a second read from memory by as many threads.
        nll: mean negative log-likelihood of `scored` true next tokens, each run through `main`; None if not asked for.
        export_kl: mean KL divergence from the float model over `export_positions`, as the manifest recorded it at
            export; None if it did not.
    """

    name: str
    format: str
    weights: str
    threads: int
    bare_bytes: int
    bare: ResidentParts | None
    load_seconds: float
    first_token_seconds: float
    lengths: tuple[Length, ...]
    peak_bytes: int
    program_bytes: int
    token_bytes: int
    bandwidth: float
    nll: float | None
    scored: int
    export_kl: float | None
    export_positions: int


def bench(
    bundle: Bundle, ids: Sequence[int], *, threads: int, prefills: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None, scoring: bool = True, watch: Callable[[Tensor], None] | None = None,
) -> Bench:  # fmt: skip
    """Measure the one program of `bundle`, in a process that has loaded no other.

    Args:
        bundle: the bundle, with the manifest of one format.
        ids: tokens of a text; repeated where it is too short.
        threads: of the runtime.
        prefills: prompt lengths, each run `REPEATS` times; by default the usual ones that fit.
        contexts: tokens in the cache before `DECODED` are decoded; by default the usual ones that fit.
        scoring: whether to measure the likelihood of the text as well.
        watch: is shown the logits [vocab] float32 before each scored token, in their order.

    Raises:
        ConfigError: `threads` below 1, a length below 1, or no usual length fits.
        RuntimeLimitError: a length beyond the bundle's context.
    """
    manifest = bundle.manifest
    limit = manifest.max_context_length - DECODED
    if limit < SHORTEST:
        raise RuntimeLimitError(
            f"bench of {manifest.name}",
            got=f"a context of {manifest.max_context_length} tokens",
            expected=f"at least {SHORTEST + DECODED}: a prompt, and {DECODED} decoded tokens",
            repair="Export with a longer context.",
        )
    prefills, contexts = _fitting(prefills, BENCH_PREFILLS, limit), _fitting(contexts, BENCH_CONTEXTS, limit)
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise ConfigError(
            "bench --threads", got=str(threads), expected=f"1 to {most}", repair="Take the cores you have."
        )
    ids = (list(ids) * (limit // len(ids) + 1))[:limit]

    prepare_runtime(manifest.program.format, threads)
    bare_bytes, bare = resident_bytes(), resident_parts()
    start = time.perf_counter()
    session = Session(manifest, load_program(bundle))
    load_seconds = time.perf_counter() - start
    best(session.prefill(ids[:FIRST_PROMPT]))
    first_token_seconds = time.perf_counter() - start

    measured = []
    for tokens in sorted({*prefills, *contexts}):
        fills = [_fill(session, ids[:tokens]) for _ in range(REPEATS if tokens in prefills else 1)]
        live = sum(kind.used_bytes for kind in session.state.memory())
        decode = 1 / statistics.median(_steps(session)) if tokens in contexts else None
        memory = peak_memory_bytes(), resident_parts()
        measured.append((tokens, tokens / statistics.median(fills), decode, live, memory))
    peak = peak_memory_bytes()
    nll, scored = _score(session, ids, watch) if scoring else (None, 0)

    rate = bandwidth(threads)  # last: its memory is not part of the peak
    weights = token_bytes(bundle)
    recorded = manifest.from_float
    return Bench(
        name=manifest.name,
        format=manifest.program.format,
        weights=manifest.program.weights,
        threads=threads,
        bare_bytes=bare_bytes,
        bare=bare,
        load_seconds=load_seconds,
        first_token_seconds=first_token_seconds,
        lengths=tuple(
            Length(tokens, prefill, decode, live, rate / (weights + live), *memory)
            for tokens, prefill, decode, live, memory in measured
        ),
        peak_bytes=peak,
        program_bytes=program_bytes(bundle),
        token_bytes=weights,
        bandwidth=rate,
        nll=nll,
        scored=scored,
        export_kl=None if recorded is None else recorded.mean_kl_divergence,
        export_positions=0 if recorded is None else recorded.positions,
    )


def english_tokens(bundle: Bundle) -> list[int]:
    """English text in tokens of the bundle's tokenizer, BOS included where the model wants one.

    Runs in another process: memory that a tokenizer frees would be reused by the program and hide what it needs.

    Raises:
        BundleError: the bundle has no usable tokenizer.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_encode_english, bundle).result()


def _encode_english(bundle: Bundle) -> list[int]:
    return Tokenizer(bundle).encode(english_text())


def _fitting(lengths: Sequence[int] | None, usual: Sequence[int], limit: int) -> Sequence[int]:
    if lengths is None:
        fitting = [tokens for tokens in usual if tokens <= limit]
        return fitting or [limit // 2]
    if not lengths or min(lengths) < 1:
        raise ConfigError("bench", got=f"lengths {list(lengths)}", expected="positive ones", repair="Ask for 128,512.")
    if max(lengths) > limit:
        raise RuntimeLimitError(
            "bench",
            got=f"a length of {max(lengths)} tokens",
            expected=f"at most {limit}, the context of this bundle less {DECODED} decoded tokens",
            repair="Ask for shorter ones, or export with a longer context.",
        )
    return lengths


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _fill(session: Session, ids: Sequence[int]) -> float:
    session.reset()
    return _seconds(lambda: session.prefill(ids))


def _steps(session: Session) -> list[float]:
    """Seconds of each of `DECODED` greedy tokens, the choice of the next included."""
    token, seconds = session.state.tokens[-1], []
    for _ in range(DECODED):
        start = time.perf_counter()
        token = best(session.decode(token))
        seconds.append(time.perf_counter() - start)
    return seconds


def _score(session: Session, ids: Sequence[int], watch: Callable[[Tensor], None] | None) -> tuple[float, int]:
    """Mean NLL of the tokens after the prefix, and how many they are: fewer than usual in a short context."""
    session.reset()
    prefix = min(SCORE_PREFIX, len(ids) // 2)
    text = ids[: prefix + SCORED]

    def show(position: int, logits: Tensor) -> None:
        if watch is not None and prefix - 1 <= position < len(text) - 1:
            watch(logits)

    arrays = score(session, text, prefill=prefix, chunk=session.manifest.max_prefill_chunk, watch=show)
    found = arrays["logprob"][(arrays["position"] >= prefix - 1) & ~np.isnan(arrays["logprob"])]
    return -float(found.mean(dtype=np.float64)), len(found)


def bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory: the best of several passes over 1 GiB."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    seconds = min(map(_seconds, [partial(torch.sum, data)] * BANDWIDTH_PASSES))
    torch.set_num_threads(before)
    return BANDWIDTH_BYTES / seconds


def program_bytes(bundle: Bundle) -> int:
    """The bytes of the bundle's one program, a file or a directory."""
    name = bundle.manifest.program.file
    files = bundle.manifest.files.items()
    return sum(entry.bytes for file, entry in files if file == name or file.startswith(f"{name}/"))


def token_bytes(bundle: Bundle) -> int:
    """What a decoded token reads of the program: all of it but the weights it does not go through, as its recipe says.
    (Of a mixture of experts a program goes through all.)"""
    return program_bytes(bundle) - bundle.manifest.program.recipe.unread_bytes
