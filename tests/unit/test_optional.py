"""Packages that only one format needs."""

from __future__ import annotations

import dataclasses

import pytest

from exporter import backends
from exporter.backends import build_module, checks_module, description_module, file_module, traits
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
def test_a_format_names_the_packages_of_its_extra(
    format: str, packages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are required when one of its modules is asked for, before any work, and their versions stand in the
    manifest."""
    own = traits(format)
    assert packages <= set(own.distributions) and own.extra == format
    absent = dataclasses.replace(own, distributions=("no-such-package",))
    monkeypatch.setattr(backends, "traits", lambda name: absent)
    for module in (build_module, file_module, description_module, checks_module):
        with pytest.raises(MissingPackageError, match=rf"format {format}: got no no-such-package"):
            module(format)
