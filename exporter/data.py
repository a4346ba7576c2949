"""LEAF: frozen data, and the dtypes that manifests name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

DType = Literal["float32", "float16", "int8"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "int8": 1}


class Spec(BaseModel):
    """Frozen data; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
