"""Teacher-forced scores of a given sequence, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exporter.errors import ConfigError
from exporter.outputs import cannot_write, written
from runtime_ref.ids import whole
from runtime_ref.session import Observer, Session

TOP = 16


def score(
    session: Session, ids: Sequence[int], *, prefill: int, chunk: int, keep_logits: bool = False,
    watch: Observer | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Run `ids` through a fresh `session`, the first `prefill` of them in chunks of `chunk`, the others one by one.

    `watch` is called as a session's observer is, with positions and logits, so that none need be kept.

    Returns:
        For each of the n positions whose logits a program produced (the last of every prefill chunk, then every one):
        `position` [n] int64; `logprob` [n] float32 of the true next token, NaN after the last; `argmax` [n] int64;
        `top_ids` [n, 16] int64 and `top_logits` [n, 16] float32, descending; with `keep_logits`, `logits`
        [n, vocab] float32. A vocabulary below 16 gives as many columns as it has.

    Raises:
        ConfigError: `prefill` outside 0..len(ids).
        RuntimeLimitError: as `Session.prefill`, for the whole of `ids`; nothing was run.
    """
    assert session.length == 0, "scores start from an empty session"
    ids = session.check(ids, chunk)
    if not 0 <= whole(prefill, "score prefill") <= len(ids):
        raise ConfigError(
            "score prefill", got=str(prefill), expected=f"0 to {len(ids)}, the ids given", repair="Change `prefill`."
        )
    columns: dict[str, list[np.generic | np.ndarray]] = {
        name: [] for name in ("position", "logprob", "argmax", "top_ids", "top_logits")
    }
    if keep_logits:
        columns["logits"] = []

    def record(position: int, logits: Tensor) -> None:
        top = logits.topk(min(TOP, len(logits)))
        following = torch.log_softmax(logits.double(), 0)[ids[position + 1]] if position + 1 < len(ids) else torch.nan
        columns["position"].append(np.int64(position))
        columns["logprob"].append(np.float32(following))
        columns["argmax"].append(np.int64(logits.argmax()))
        columns["top_ids"].append(top.indices.numpy())
        columns["top_logits"].append(top.values.numpy())
        if keep_logits:
            columns["logits"].append(logits.numpy())
        if watch is not None:
            watch(position, logits)

    session.observer = record
    if prefill:
        session.prefill(ids[:prefill], chunk)
    for token in ids[prefill:]:
        session.decode(token)
    session.observer = None
    return {name: np.stack(values) for name, values in columns.items()}


def write_scores(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an ``.npz`` to `path`.

    Raises:
        ConfigError: the file cannot be written; an older one at `path` is then still there.
    """
    try:
        with written(path) as partial, partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise cannot_write("--out", path, error) from error
