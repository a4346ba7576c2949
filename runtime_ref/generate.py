"""Streaming text generation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from exporter.errors import ConfigError
from runtime_ref.sampling import Sampler
from runtime_ref.session import Session
from runtime_ref.tokenizer import TextStream, Tokenizer


class Generation:
    """Iterate over it for the text, in pieces of whole characters; afterwards its attributes say what happened.

    Attributes:
        tokens: the generated ids, a final EOS not among them.
        reason: why it ended; empty before the end.
        prefill_seconds, decode_seconds: time spent in the programs.
        decode_calls: calls of `main` that `decode_seconds` covers.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        max_new_tokens: int,
        chunk: int | None = None,
    ) -> None:
        """Check everything that can be checked before the first program call.

        Args:
            session: goes on from its tokens; `prompt` is appended.
            prompt: token ids, BOS included where the model wants one.
            chunk: tokens a prefill call; None means the bundle's largest.

        Raises:
            ConfigError: `max_new_tokens` below 1.
            RuntimeLimitError: as `Session.prefill`.
        """
        if max_new_tokens < 1:
            raise ConfigError(
                "generate max_new_tokens",
                got=str(max_new_tokens),
                expected="an integer >= 1",
                repair="Ask for at least one token.",
            )
        self._prompt, self._chunk = session.check(prompt, chunk, offset=session.length), chunk
        self._session, self._stream, self._sampler = session, TextStream(tokenizer, self._prompt), sampler
        self._eos = frozenset(tokenizer.spec.eos_token_ids)
        self._max_new_tokens = max_new_tokens
        self.tokens: list[int] = []
        self.reason = ""
        self.prefill_seconds = self.decode_seconds = 0.0
        self.decode_calls = 0

    def __iter__(self) -> Iterator[str]:
        """Run to the end. A token sampled when the context is full is returned, but never run."""
        started = time.perf_counter()
        logits = self._session.prefill(self._prompt, self._chunk)
        self.prefill_seconds = time.perf_counter() - started
        while True:
            token = self._sampler(logits)
            if token in self._eos:
                self.reason = f"end token {token}"
                break
            self.tokens.append(token)
            text = self._stream.push(token)
            if text:
                yield text
            if len(self.tokens) == self._max_new_tokens:
                self.reason = f"{self._max_new_tokens} new tokens"
                break
            if self._session.length == self._session.manifest.max_context_length:
                self.reason = f"the context of {self._session.length} tokens is full"
                break
            started = time.perf_counter()
            logits = self._session.decode(token)
            self.decode_seconds += time.perf_counter() - started
            self.decode_calls += 1
        rest = self._stream.finish()
        if rest:
            yield rest

    def report(self) -> str:
        """One line: why it ended, and tokens a second."""
        parts = [
            f"{len(self.tokens)} tokens, ended by {self.reason}",
            f"prefill {len(self._prompt)} tokens, {len(self._prompt) / self.prefill_seconds:.1f} tokens/s",
        ]
        if self.decode_calls:
            parts.append(f"decode {self.decode_calls / self.decode_seconds:.1f} tokens/s")
        return " | ".join(parts)
