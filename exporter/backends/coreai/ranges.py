"""The range of every dynamic axis, in an asset's metadata: its program records which axes are dynamic, but no range.

An app reads them from ``AIModelAsset(contentsOf:).metadata``, ``exporter inspect`` from the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exporter.graph.contract import ProgramContract

METADATA, KEY = "metadata.json", "dynamicRanges"

Ranges = dict[str, dict[str, list[list[int]]]]
"""By function and argument, the lowest and the highest length of every axis."""


def ranges_of(contracts: Iterable[ProgramContract]) -> Ranges:
    """The declared ranges of the arguments that have a dynamic axis."""
    return {
        contract.method: {
            tensor.name: [list(contract.range_of(n)) for n in tensor.shape]
            for tensor in contract.interface.inputs
            if any(isinstance(n, str) for n in tensor.shape)
        }
        for contract in contracts
    }


def record_ranges(asset: Any, contracts: Iterable[ProgramContract]) -> None:
    """Write them into the metadata of a saved asset."""
    ranges = ranges_of(contracts)
    asset.update_metadata(lambda metadata: metadata.set_custom(KEY, ranges))


def recorded_ranges(path: Path) -> Ranges:
    """The ranges recorded in the asset at `path`, which must be readable; empty for an asset of another exporter."""
    file = path / METADATA
    metadata = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found: Ranges = metadata.get("creatorDefinedMetadata", {}).get(KEY, {})
    return found
