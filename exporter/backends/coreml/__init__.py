"""Core ML: one package (`.mlpackage`) with the functions `prefill` and `main` over states declared in it.

Importing it without coremltools raises MissingPackageError: whoever asks for this back end is to hear of it before any
work is done. coremltools itself, which takes seconds to load, is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exporter.backends.coreml.program import VERSIONS, build, kernels
from exporter.describe import FileDescription
from exporter.graph.contract import ProgramContract
from exporter.optional import require
from exporter.spec import CheckResult

require(VERSIONS, "coreml")

__all__ = ["VERSIONS", "build", "check_file", "describe", "kernels"]


def check_file(path: Path, contracts: Sequence[ProgramContract]) -> list[CheckResult]:
    """See `SelfDescribing.check_file`."""
    from exporter.backends.coreml import checks

    return checks.check_file(path, contracts)


def describe(path: Path) -> FileDescription:
    """See `SelfDescribing.describe`."""
    from exporter.backends.coreml.description import describe_package

    return describe_package(path)
