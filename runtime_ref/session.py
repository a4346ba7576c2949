"""A conversation with one bundle: chunked prefill, decode, prefix reuse; limits are checked before a program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exporter.bundle import read_bundle
from exporter.errors import RuntimeLimitError
from exporter.spec import Manifest, program_for
from runtime_ref.programs import Program, choose, load_program
from runtime_ref.state import State

Observer = Callable[[int, Tensor], None]


def load(path: Path | str, *, format: str | None = None, verify_files: bool = True) -> Session:
    """Open the bundle at `path` and start an empty session with its program of `format`, by default the first.

    Raises:
        BundleError: the bundle is missing, incomplete or altered, or its program cannot be loaded.
    """
    bundle = choose(read_bundle(path, verify_files=verify_files), format)
    return Session(bundle.manifest, load_program(bundle))


def token_ids(ids: Iterable[Any]) -> list[int]:
    """`ids` as integers: a list, a NumPy array or a tensor ``[n]`` of them.

    Raises:
        RuntimeLimitError: something that is no integer, or more than one axis.
    """
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes):
        raise _no_ids(f"{ids!r:.60}")
    return [_token_id(one) for one in listed]


def _token_id(value: Any) -> int:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise _no_ids(f"{value!r:.60} among the token ids")
    return value


def _no_ids(got: str) -> RuntimeLimitError:
    return RuntimeLimitError(
        "session", got=got, expected="integers, one for each token", repair="Pass one list of ids, e.g. `ids[0]`."
    )


class Session:
    """One program, one state.

    `observer`, when set, is called after every program call with the position of the last token of the call and its
    logits [vocab] float32.
    """

    def __init__(self, manifest: Manifest, program: Program, state: State | None = None) -> None:
        self.manifest = manifest
        self.program = program
        self.state = State(manifest) if state is None else state
        self.observer: Observer | None = None
        self._positions = torch.arange(manifest.max_context_length)

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.state.length

    def prefill(self, ids: Iterable[int], chunk: int | None = None, *, reuse: bool = False) -> Tensor:
        """Run `ids` and return the logits of the last of them, [vocab] float32.

        Args:
            ids: the tokens to append, also as a NumPy array or a tensor ``[n]``; with `reuse`, the whole conversation
                from its first token.
            chunk: tokens a call, 1 to the bundle's ``max_prefill_chunk`` (the default). A last piece of one token,
                and every piece when chunk is 1, goes through `main`.
            reuse: keep the longest common prefix of `ids` and the tokens seen, rewinding to its end, and run the rest
                (at least the last token). Where the rewind is impossible, everything runs afresh.

        Raises:
            RuntimeLimitError: nothing to run, an id outside the vocabulary, a chunk out of range, or more tokens than
                the context. The session is as it was. (Whatever interrupts a running program resets the session.)
        """
        tokens = self.check(ids, chunk, offset=0 if reuse else self.length)
        if reuse:
            tokens = tokens[self._keep_prefix(tokens) :]
        return self._run(tokens, chunk or self.manifest.max_prefill_chunk)

    def decode(self, token: int) -> Tensor:
        """Run one token through `main` and return its logits, [vocab] float32. Raises as `prefill`."""
        return self._run(self.check([token], offset=self.length), 1)

    def check(self, ids: Iterable[int], chunk: int | None = None, *, offset: int = 0) -> list[int]:
        """`ids` as integers that could run after `offset` tokens; nothing runs. Raises as `prefill`."""
        tokens = token_ids(ids)
        limit, vocab, largest = (
            self.manifest.max_context_length, self.manifest.model.vocab_size, self.manifest.max_prefill_chunk
        )  # fmt: skip
        if not tokens:
            raise RuntimeLimitError(
                "session", got="no tokens", expected="at least one", repair="Give a prompt that is not empty."
            )
        outside = next((token for token in tokens if not 0 <= token < vocab), None)
        if outside is not None:
            raise RuntimeLimitError(
                "session",
                got=f"token id {outside}",
                expected=f"0 to {vocab - 1}",
                repair="Encode the prompt with the tokenizer of this bundle.",
            )
        if chunk is not None and not 1 <= chunk <= largest:
            raise RuntimeLimitError(
                "session",
                got=f"chunk {chunk}",
                expected=f"1 to {largest}",
                repair="Choose a chunk in that range, or export with a larger `max_prefill_chunk`.",
            )
        if offset + len(tokens) > limit:
            raise RuntimeLimitError(
                "session",
                got=f"{len(tokens)} tokens after {offset}",
                expected=f"at most {limit} in all, the context of this bundle",
                repair="Shorten the prompt, reset the session, or export with a longer context.",
            )
        return tokens

    def reset(self) -> None:
        """Forget the conversation."""
        self.state.reset()

    def rewind(self, count: int) -> None:
        """Drop the last `count` tokens; see `State.rewind`."""
        self.state.rewind(count)

    def fork(self) -> Session:
        """A second session that goes on from here; the two share the program and no state."""
        return Session(self.manifest, self.program, self.state.fork())

    def save(self, path: Path | str) -> None:
        """Write the conversation to a file; see `State.save`."""
        self.state.save(path)

    def load_state(self, path: Path | str) -> None:
        """Go on from a saved conversation; see `State.load`."""
        self.state.load(path)

    def _keep_prefix(self, ids: Sequence[int]) -> int:
        """Rewind to the longest usable prefix of `ids` and return its length, short of the last token."""
        seen = self.state.tokens
        common = next((i for i, pair in enumerate(zip(seen, ids, strict=False)) if pair[0] != pair[1]), None)
        keep = min(len(seen), len(ids) - 1) if common is None else min(common, len(ids) - 1)
        if self.length - keep > self.state.max_rewind:
            keep = 0
        self.state.rewind(self.length - keep)
        return keep

    def _run(self, ids: list[int], chunk: int) -> Tensor:
        try:
            # Grown once for the whole prompt: growing a chunk at a time would copy the same rows again and again.
            self.state.ensure_rows(self.length + len(ids))
            for start in range(0, len(ids), chunk):
                piece = ids[start : start + chunk]
                seq_len = self.length + len(piece)
                logits = self.program.run(
                    program_for(len(piece)).name,
                    torch.tensor([piece], dtype=torch.int64),
                    self._positions[:seq_len].unsqueeze(0),
                    self.state.tensors,
                )[0]
                self.state.advance(piece)
                if self.observer is not None:
                    self.observer(self.length - 1, logits)
        except BaseException:
            # A call that was cut short may have overwritten rows that its retry would need.
            self.state.reset()
            raise
        return logits
