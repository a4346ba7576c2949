"""Packages that only one format needs."""

from __future__ import annotations

import pytest

from exporter.backends import backend
from exporter.errors import MissingPackageError
from exporter.optional import require


def test_what_is_not_installed_names_its_extra() -> None:
    require(["torch"], "coreml")
    with pytest.raises(MissingPackageError, match=r"got no no-such-package; .*pip install 'ring-exporter\[coreml\]'"):
        require(["torch", "no-such-package"], "coreml")


@pytest.mark.parametrize(
    ("extra", "where"), [("coreml", "Linux on x86-64. "), ("coreai", "Linux on x86-64 with glibc 2.34. ")]
)
def test_the_platforms_are_those_of_that_extra(extra: str, where: str) -> None:
    with pytest.raises(MissingPackageError) as caught:
        require(["no-such-package"], extra)
    assert f"which exist for macOS and for {where}" in str(caught.value)


@pytest.mark.parametrize(("format", "packages"), [("coreml", {"coremltools"}), ("coreai", {"coreai-core"})])
def test_a_back_end_names_the_packages_of_its_extra(format: Format, packages: set[str]) -> None:
    """They are required when it is imported, before any work, and their versions stand in the manifest."""
    assert packages <= set(backend(format).VERSIONS)
