"""LEAF: lengths in tokens, the usual ones and those that a command line asks for."""

from __future__ import annotations

from exporter.errors import ConfigError

CONTEXTS = (512, 2048, 8192, 32768, 131072)
"""What a state's cost is shown at."""
BENCH_PREFILLS = (128, 512, 2048)
"""Prompts whose speed is measured."""
BENCH_CONTEXTS = (128, 512, 2048, 8192, 32000)
"""Tokens in the cache where the speed of decoding is measured; the last leaves room in a context of 32768."""


def usual_contexts(limit: int) -> tuple[int, ...]:
    """The usual ones below `limit`, and `limit`."""
    return (*(context for context in CONTEXTS if context < limit), limit)


def parse_lengths(option: str, text: str) -> tuple[int, ...]:
    """``"8192,32768"`` to numbers of tokens.

    Args:
        option: the option of the command line that says so.
        text: what it says.

    Raises:
        ConfigError: something that is no positive whole number.
    """
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            option, got=repr(text), expected="positive whole numbers with commas", repair="Write 8192,32768."
        )
    return lengths
