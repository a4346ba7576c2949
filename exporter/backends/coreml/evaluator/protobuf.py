"""The message classes of Core ML's format, as coremltools generated them, and nothing else of coremltools.

Importing `coremltools` itself would bring its converters in, take seconds and print a page of warnings. The generated
classes form a package of their own (``coremltools/proto``) that depends on protobuf alone, so they are loaded from
there. Protobuf keeps one class for each message however often its file is loaded, so both copies agree.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from exporter.errors import MissingPackageError

PACKAGE = "_coreml_messages"


@cache
def messages() -> ModuleType:
    """The module that defines ``Model``.

    Raises:
        MissingPackageError: coremltools is not installed.
    """
    found = importlib.util.find_spec("coremltools")
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(
            "format coreml",
            got="no coremltools",
            expected="coremltools, which brings the message classes of Core ML's format",
            repair="pip install 'ring-exporter[coreml]'.",
        )
    folder = Path(found.submodule_search_locations[0]) / "proto"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, f"no package in {folder}"
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.Model_pb2")
