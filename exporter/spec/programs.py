"""LEAF: the programs that a bundle may have. All that traces, checks, runs or times a program reads its `ProgramKind`.

Letters: Q query_len, S seq_len.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from exporter.errors import RuntimeLimitError

Logits = Literal["last", "all"]


@dataclass(frozen=True, kw_only=True)
class ProgramKind:
    """One program.

    Args:
        name: its name in files and manifests.
        min_query_len: the fewest tokens a call takes.
        max_query_len: the most; None is the export's `max_prefill_chunk`.
        write_first: whether rings are written before they are read, which takes exactly one token a call.
        logits: of which tokens a call gives logits, the last one or all Q.
    """

    name: str
    min_query_len: int
    max_query_len: int | None
    write_first: bool
    logits: Logits

    def __post_init__(self) -> None:
        one_token = self.min_query_len == self.max_query_len == 1
        assert one_token or not self.write_first, "a chunk written first replaces rows its own early tokens need"

    def query_range(self, max_prefill_chunk: int, max_context_length: int) -> tuple[int, int]:
        """The inclusive range of Q in an export with these maxima."""
        most = max_prefill_chunk if self.max_query_len is None else self.max_query_len
        return self.min_query_len, min(most, max_context_length)

    def takes(self, query_len: int) -> bool:
        """Whether a call may have `query_len` tokens, as far as the kind of program says."""
        return self.min_query_len <= query_len and (self.max_query_len is None or query_len <= self.max_query_len)

    def check_call(self, query_len: int, seq_len: int) -> None:
        """The calling convention, the same for every format.

        Raises:
            RuntimeLimitError: another number of tokens than the program takes.
        """
        assert seq_len >= query_len, f"{seq_len} tokens after a call with {query_len}"
        if self.takes(query_len):
            return
        most = "more" if self.max_query_len is None else str(self.max_query_len)
        single = self.max_query_len == self.min_query_len
        others = [kind.name for kind in PROGRAMS.values() if kind.takes(query_len)]
        raise RuntimeLimitError(
            f"program {self.name}",
            got=f"{query_len} token{'' if query_len == 1 else 's'}",
            expected=f"exactly {self.min_query_len}" if single else f"{self.min_query_len} or {most}",
            repair=f"Run {'single tokens' if query_len == 1 else 'chunks'} through `{'` or `'.join(others)}`."
            if others
            else "Give it at least one token.",
        )


PREFILL = ProgramKind(name="prefill", min_query_len=2, max_query_len=None, write_first=False, logits="last")
"""A chunk of a prompt: rings are read, then written."""
MAIN = ProgramKind(name="main", min_query_len=1, max_query_len=1, write_first=True, logits="last")
"""One token: rings are written, then read."""

PROGRAMS: dict[str, ProgramKind] = {kind.name: kind for kind in (PREFILL, MAIN)}
"""Every kind, in the order in which they are traced, checked and written. Every bundle has all of them."""


def program_for(query_len: int, names: Iterable[str] = PROGRAMS) -> ProgramKind:
    """The first program among `names` that takes a call of `query_len` tokens and gives the last one's logits."""
    return next(kind for name in names if (kind := PROGRAMS[name]).logits == "last" and kind.takes(query_len))
