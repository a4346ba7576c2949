"""Element types of a Core ML package and the torch tensors that carry them.

torch has arithmetic only for signed and one-byte integers, so `uint16` and `uint32` values are carried by wider signed
tensors, and types below a byte by whole bytes. A carrier holds exactly the declared type's values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ElementType:
    """One element type: its name in MIL text, the bits a stored element takes, and its carrier."""

    name: str
    bits: int
    carrier: torch.dtype
    signed: bool = True

    @property
    def is_float(self) -> bool:
        return self.carrier.is_floating_point


FP16 = ElementType("fp16", 16, torch.float16)
FP32 = ElementType("fp32", 32, torch.float32)
BOOL = ElementType("bool", 8, torch.bool, signed=False)
STRING = ElementType("string", 0, torch.uint8, signed=False)

# By the number in MIL.proto's enum DataType.
BY_NUMBER: dict[int, ElementType] = {
    1: BOOL,
    2: STRING,
    10: FP16,
    11: FP32,
    21: ElementType("int8", 8, torch.int8),
    22: ElementType("int16", 16, torch.int16),
    23: ElementType("int32", 32, torch.int32),
    24: ElementType("int64", 64, torch.int64),
    25: ElementType("int4", 4, torch.int8),
    31: ElementType("uint8", 8, torch.uint8, signed=False),
    32: ElementType("uint16", 16, torch.int32, signed=False),
    33: ElementType("uint32", 32, torch.int64, signed=False),
    35: ElementType("uint4", 4, torch.uint8, signed=False),
    36: ElementType("uint2", 2, torch.uint8, signed=False),
    37: ElementType("uint1", 1, torch.uint8, signed=False),
    38: ElementType("uint6", 6, torch.uint8, signed=False),
    39: ElementType("uint3", 3, torch.uint8, signed=False),
}
BY_NAME = {element.name: element for element in BY_NUMBER.values()}

# By the number in a weight file's entry.
BY_BLOB_NUMBER: dict[int, ElementType] = {
    1: FP16, 2: FP32, 3: BY_NAME["uint8"], 4: BY_NAME["int8"], 6: BY_NAME["int16"], 7: BY_NAME["uint16"],
    8: BY_NAME["int4"], 9: BY_NAME["uint1"], 10: BY_NAME["uint2"], 11: BY_NAME["uint4"], 12: BY_NAME["uint3"],
    13: BY_NAME["uint6"], 14: BY_NAME["int32"], 15: BY_NAME["uint32"],
}  # fmt: skip


def storage_bytes(element: ElementType, count: int) -> int:
    """Bytes that `count` elements take; elements below a byte are packed without gaps."""
    return (count * element.bits + 7) // 8


def decode(raw: bytes | bytearray, element: ElementType, count: int) -> torch.Tensor:
    """`count` little-endian elements to their carrier, ``[count]``.

    Elements below a byte are packed from each byte's least significant bit upward; one that crosses a byte has its low
    bits in the first (`uint3`, `uint6`).
    """
    assert len(raw) >= storage_bytes(element, count)
    if count == 0:
        return torch.zeros(0, dtype=element.carrier)
    buffer = raw if isinstance(raw, bytearray) else bytearray(raw)  # torch wants writable memory
    if element.bits < 8:
        return _unpack(torch.frombuffer(buffer, dtype=torch.uint8), element, count)
    stored = {"uint16": torch.uint16, "uint32": torch.uint32}.get(element.name, element.carrier)
    tensor = torch.frombuffer(buffer, dtype=stored, count=count)
    return tensor if stored == element.carrier else tensor.to(element.carrier)


def _unpack(packed: torch.Tensor, element: ElementType, count: int) -> torch.Tensor:
    """`packed`: bytes, uint8 ``[n]``."""
    bits = element.bits
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        values = ((packed[:, None] >> shifts) & (2**bits - 1)).flatten()[:count]
    else:
        each_bit = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        weights = 2 ** torch.arange(bits, dtype=torch.uint8)
        grouped = each_bit.flatten()[: count * bits].view(count, bits)
        values = (grouped * weights).sum(1, dtype=torch.uint8)
    if not element.signed:
        return values
    # Two's complement of `bits` bits: the top half of the codes are negative.
    return (values.to(torch.int16) - (values >= 2 ** (bits - 1)).to(torch.int16) * 2**bits).to(torch.int8)
