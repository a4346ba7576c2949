"""Core ML: one package (`.mlpackage`) with the functions `prefill` and `main` over states declared in it.

Importing it without coremltools raises MissingPackageError: whoever asks for this back end is to hear of it before any
work is done. coremltools itself, which takes seconds to load, is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.backends.coreml.program import VERSIONS, beside, build, kernels
from exporter.describe import FileDescription
from exporter.graph.contract import ProgramContract
from exporter.optional import require
from exporter.spec import CheckResult

if TYPE_CHECKING:
    from exporter.backends.coreml.package import Package

require(VERSIONS, "coreml")

__all__ = ["VERSIONS", "beside", "build", "check_file", "describe", "kernels", "read_file"]


def read_file(path: Path) -> Package:
    """See `SelfDescribing.read_file`."""
    from exporter.backends.coreml.package import Package

    return Package(path)


def check_file(file: Package, contracts: Sequence[ProgramContract]) -> list[CheckResult]:
    """See `SelfDescribing.check_file`."""
    from exporter.backends.coreml.checks import check_package

    return check_package(file, contracts)


def describe(file: Package) -> FileDescription:
    """See `SelfDescribing.describe`."""
    from exporter.backends.coreml.description import describe_package

    return describe_package(file)
