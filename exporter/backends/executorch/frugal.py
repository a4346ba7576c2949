"""Weights once in memory while a program is lowered: the decoder's own.

ExecuTorch copies a method's constants where delegates are cut out of it, and each delegate's again before XNNPACK's
back end sees it; that one copies every weight into a store, so those of two methods would be there twice more until the
file is written. Constants are only read, so a copy may share their memory, and ExecuTorch's stores take files as well
as bytes: ours has one for each weight, whoever asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore

MIN_BYTES = 2**16  # smaller ones are not worth a file


class StoreOnDisk(NamedDataStore):
    """A store whose large data are files in `folder`."""

    folder: Path

    def add_named_data(self, key: str, data: Any, *arguments: Any, **options: Any) -> None:
        """See `NamedDataStore`; arguments after `data` are handed on."""
        if isinstance(data, bytes) and len(data) >= MIN_BYTES:
            digest = hashlib.sha256(data)
            path = self.folder / digest.hexdigest()
            if not path.exists():
                path.write_bytes(data)
            data = FileBackedData(str(path), sha256=digest.digest())
        super().add_named_data(key, data, *arguments, **options)


_copied = torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__


def _copy_of_tensor(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.nbytes < MIN_BYTES:
        return _copied[0](tensor, memo)  # a fake one has no memory to share
    return memo.setdefault(id(tensor), tensor.detach())


def _copy_of_parameter(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    if type(parameter) is not torch.nn.Parameter or parameter.is_meta or parameter.nbytes < MIN_BYTES:
        return _copied[1](parameter, memo)
    return memo.setdefault(id(parameter), torch.nn.Parameter(parameter.detach(), parameter.requires_grad))


@contextlib.contextmanager
def weights_held_once(folder: Path) -> Iterator[None]:
    """Inside, copies of large tensors share their memory, and delegates keep their weights in `folder`, which must be
    there until the program is written."""
    store = type("Store", (StoreOnDisk,), {"folder": folder})
    with (
        mock.patch.object(xnnpack_preprocess, "NamedDataStore", store),
        mock.patch.object(torch.Tensor, "__deepcopy__", _copy_of_tensor),
        mock.patch.object(torch.nn.Parameter, "__deepcopy__", _copy_of_parameter),
    ):
        yield
