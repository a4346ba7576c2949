"""One folder a format: `kernels` are the caches its decoder is built on, `build` writes a program.

A back end is imported when a config asks for it: its libraries take seconds to load, and some are optional.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from exporter.cache.interface import CacheKernels
from exporter.describe import FileDescription
from exporter.graph.contract import ProgramContract
from exporter.model.decoder import Decoder
from exporter.programs import Limits
from exporter.progress import Detail
from exporter.spec import CheckResult, Format, Manifest, ProgramSpec

Step = Callable[[str], AbstractContextManager[Detail]]


@dataclass(frozen=True)
class Built:
    """What a back end wrote: the program as the manifest describes it, and the graph checks it passed."""

    program: ProgramSpec
    checks: tuple[CheckResult, ...]


class Backend(Protocol):
    """The interface of the package of a format."""

    VERSIONS: tuple[str, ...]
    """The distributions that the file depends on, whose versions the manifest records."""

    def kernels(self, options: Any) -> CacheKernels:
        """The cache implementation of this back end; `options` as `build` takes them."""
        ...

    def build(self, decoder: Decoder, limits: Limits, options: Any, directory: Path, step: Step) -> Built:
        """Write the program of `decoder` under `directory` and check it.

        Args:
            decoder: the model over `kernels` and the states of this format's layout: the float32 one, which may be
                changed in place, except that ExecuTorch's is quantised already.
            limits: the maxima its methods declare.
            options: what the config says about this format.
            directory: the staged bundle.
            step: reports a step of the work.

        Raises:
            GraphContractError: a check failed.
            UserError: the model or an option is none that this format can carry, or its packages are not installed.
        """
        ...

    def beside(self, manifest: Manifest) -> dict[str, str]:
        """The text files that the format wants in the bundle beside its program, by name.

        Args:
            manifest: the bundle's, with this format's program alone.
        """
        ...


class SelfDescribing(Backend, Protocol):
    """A back end whose files say by themselves what they are; a `.pte` needs a manifest beside it."""

    def read_file(self, path: Path) -> Any:
        """The program at `path`, for the other two. Raises BundleError when it cannot be read."""
        ...

    def check_file(self, file: Any, contracts: Sequence[ProgramContract]) -> list[CheckResult]:
        """The graph checks on a program, one contract a method.

        Raises:
            BundleError: what is read only now is damaged.
            GraphContractError: it is none with these methods and inputs.
        """
        ...

    def describe(self, file: Any) -> FileDescription:
        """What a program says of itself."""
        ...


def backend(format: Format) -> Backend:
    """The package of `format`."""
    module: Any = importlib.import_module(f"exporter.backends.{format}")
    return module


def self_describing(format: Literal["coreml", "coreai"]) -> SelfDescribing:
    """The package of one of the formats that are."""
    module: Any = backend(format)
    return module
