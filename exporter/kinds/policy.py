"""How the caller keeps its state, as a config says it."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field

from exporter.data import Spec

CacheDType = Literal["float32", "float16", "int8"]


class CacheSettings(Protocol):
    """What kinds ask of a policy, or of an architecture's cache; see `CachePolicy`."""

    @property
    def dtype(self) -> str: ...

    @property
    def global_dtype(self) -> str | None: ...

    @property
    def ring_slack(self) -> int: ...


class CachePolicy(Spec):
    """How the caller's state is laid out. `ring_slack` rows beyond the window buy that many tokens of rewind.

    `dtype` is that of keys and values, `global_dtype` that of global layers where it differs; int8 is symmetric per row
    and KV head, with float32 scales beside it. What is no row of a token, such as the inputs of a convolution, is
    float32 in any case. Formats in `STATE_DTYPES` keep to their own.
    """

    dtype: CacheDType = "float32"
    global_dtype: CacheDType | None = None
    ring_slack: int = Field(default=0, ge=0)
    initial_rows: int = Field(default=64, ge=1)
    growth: Literal["double", "1.5x"] = "double"

    @property
    def dtypes(self) -> tuple[CacheDType, CacheDType]:
        """Of sliding and of global layers."""
        return self.dtype, self.global_dtype or self.dtype

    @property
    def caches(self) -> str:
        """The dtypes in words."""
        return dtypes_in_words(self.dtype, self.global_dtype)

    def grown_rows(self, rows: int, needed: int, max_rows: int) -> int:
        """The rows a growing state takes next: the smallest step of the policy that holds `needed`."""
        while rows < needed:
            rows = rows * 2 if self.growth == "double" else rows + (rows + 1) // 2
        return min(rows, max_rows)


def dtypes_in_words(dtype: str, global_dtype: str | None) -> str:
    return dtype if global_dtype in (None, dtype) else f"{dtype} (global layers {global_dtype})"
