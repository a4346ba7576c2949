"""What the tests of a `.pte` over caches that round have in common."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conftest import CHUNK, CONTEXT

import runtime_ref
from exporter import pipeline, verification
from exporter.bundle import read_bundle
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.errors import BundleError
from exporter.progress import Progress
from exporter.source import open_source, read_decoder
from exporter.spec import Comparison, Manifest
from runtime_ref.session import Session

# Chunks of every kind, over rings of 11 rows, to the end of the context.
PIECES = [1, 1, 2, 7, 8, 9, 20, CHUNK, 1, 1, 3, 17, 1, 5, 11, 1, 13, 2, 1, 16]


def ids_of(count: int) -> list[int]:
    return random.Random(0).choices(range(256), k=count)


def eager_over(manifest: Manifest, bundle: Path) -> Session:
    source = open_source(load_config(bundle.with_suffix(".yaml")))
    return verification.eager_session(
        manifest, read_decoder(source, manifest.states, PlainKernels(), Progress.silent())
    )


def compared_with_eager(bundle: Path) -> list[Comparison]:
    """The program with eager, the program with the float model, and eager with that, over 14 turns of the rings."""
    manifest = read_bundle(bundle).manifest
    session, eager = runtime_ref.load(bundle), eager_over(manifest, bundle)
    original = eager_over(manifest.with_float_caches(), bundle)
    assert sum(PIECES) == CONTEXT
    calls = verification.Calls(ids_of(CONTEXT), PIECES)
    found = verification.compare_with_eager(*(verification.run(one, calls) for one in (session, eager, original)))
    print(*found)
    return found


def assert_another_cache_is_refused(bundle: Path, dtype: str) -> None:
    config = load_config(bundle.with_suffix(".yaml"), {"cache.dtype": "float32", "cache.global_dtype": None})
    with pytest.raises(BundleError, match=rf"cache\.dtype float32 in the config; expected {dtype}"):
        pipeline.verify_bundle(bundle, config, Progress.silent())


def clean_and_poisoned(bundle: Path, integer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the same calls on a fresh state, and on one filled with NaN, or with `integer` where it holds those."""
    clean, poisoned = runtime_ref.load(bundle), runtime_ref.load(bundle)
    for session in (clean, poisoned):
        session.state.ensure_rows(60)
    for tensor in poisoned.state.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else integer)
    ids, start, logits = ids_of(60), 0, []
    for size in (1, 1, 2, 3, 1, 20, 1, 30, 1):
        part = ids[start : start + size]
        start += size
        logits.append((clean.prefill(part, size), poisoned.prefill(part, size)))
    return logits


def assert_rewinds_forks_and_is_saved(bundle: Path, folder: Path) -> None:
    session = runtime_ref.load(bundle)
    session.prefill(ids_of(50), 20)
    session.save(folder / "talk")
    fork, loaded = session.fork(), runtime_ref.load(bundle)
    loaded.load_state(folder / "talk")
    expected = [session.decode(token) for token in (1, 2, 3, 4)]
    rewound = session.fork()
    rewound.rewind(2)
    for other, tail in ((fork, (1, 2, 3, 4)), (loaded, (1, 2, 3, 4)), (rewound, (3, 4))):
        for token, want in zip(tail, expected[-len(tail) :], strict=True):
            torch.testing.assert_close(other.decode(token), want, rtol=0, atol=1e-5)
    assert sum(t.nbytes for t in session.state.tensors) == sum(k.allocated_bytes for k in session.state.memory())
