"""LEAF: the typed errors of both packages.

A `UserError` is a mistake the caller can repair: the command line prints it without a traceback and exits with
code 2. A broken invariant of ours is an `assert`, never a `UserError`.
"""

from __future__ import annotations

from functools import partial


class UserError(Exception):
    """A mistake in the user's input.

    Args:
        owner: who refuses, e.g. ``"config"`` or ``"checkpoint model.safetensors"``.
        got: what arrived.
        expected: what would have been accepted.
        repair: what to do about it.
    """

    exit_code = 2

    def __init__(self, owner: str, *, got: str, expected: str, repair: str) -> None:
        self.owner, self.got, self.expected, self.repair = owner, got, expected, repair
        super().__init__(f"{owner}: got {got}; expected {expected}. {repair}")

    def __reduce__(self) -> tuple[partial[UserError], tuple[()]]:
        """Pickled with all its parts, so that it comes back unchanged from another process."""
        parts = {"got": self.got, "expected": self.expected, "repair": self.repair}
        return partial(type(self), self.owner, **parts), ()


class ConfigError(UserError):
    """The YAML, or a command-line value."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, of a refused kind, or not as its own config says."""


class UnsupportedModelError(UserError):
    """A model whose config asks for arithmetic that the spec cannot express."""


class BundleError(UserError):
    """A bundle that is missing, incomplete, altered, or cannot be written."""


class RuntimeLimitError(UserError):
    """A call that would go past a limit of the bundle (context, chunk, vocabulary); the session is unharmed."""


class GraphContractError(UserError):
    """An exported program that lacks a property its bundle promises."""


class VerificationError(UserError):
    """A program whose results are not those of the model it came from."""


class MissingPackageError(UserError):
    """An optional package that is not installed, or has no build for this platform."""
