"""Two grids of one file each, found beside the others in the modules that import `toy_grids`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter import grids

INT6 = '''
"""-31 .. 31 with a scale a row, in whole bytes."""

import torch

from exporter.grids.base import Grid, Steps, Stored


def scales(weight):
    return (weight.abs().amax(1) / 31).clamp(min=1e-30)


def store(weight, group_size):
    own = scales(weight)[:, None]
    return Stored((weight / own).round().clamp(-31, 31).to(torch.int8), own)


GRID = Grid(name="int6", codes="int8", store=store, steps=Steps(limits=(-31, 31), of_rows=scales))
'''
TERNARY = '''
"""-1, 0, 1 with a scale a group, in half bytes; nothing GPTQ can go to."""

import torch

from exporter.grids.base import Grid, Stored


def store(weight, group_size):
    groups = weight.reshape(len(weight), -1, group_size)
    own = groups.abs().amax(-1).bfloat16().float().clamp(min=1e-30)
    return Stored((groups / own[..., None]).round().clamp(-1, 1).to(torch.int8).view(weight.shape), own)


GRID = Grid(name="ternary", codes="int4", store=store, grouped=True)
'''


@pytest.fixture(autouse=True)
def toy_grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "int6.py").write_text(INT6)
    (tmp_path / "ternary.py").write_text(TERNARY)
    monkeypatch.setattr(grids, "__path__", [*grids.__path__, str(tmp_path)])
    yield
    for name in ("int6", "ternary"):
        sys.modules.pop(f"exporter.grids.{name}", None)
