"""LEAF: keeps the libraries' own messages out of the user's terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator


def quieten_libraries() -> None:
    """Silence deprecation notes between torch, torchao and ExecuTorch: none of them is about the user's command."""
    warnings.filterwarnings("ignore")
    for name in ("torchao", "torch.utils._pytree", "coremltools"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def native_stderr_hidden() -> Iterator[None]:
    """Hide what native code prints on stderr, for imports that log which CPU files they could not open."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
