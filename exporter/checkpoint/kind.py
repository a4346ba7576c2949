"""What a file is, by its first bytes: a name may say anything, and a pickle must not be opened to find out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from exporter.errors import CheckpointError

Kind = Literal["gguf", "safetensors", "pickle"]
GGUF_MAGIC = b"GGUF"
_ZIP, _PICKLE_PROTOCOL = b"PK\x03\x04", 0x80
# The format's own bound; a length beyond it is no length.
MAX_SAFETENSORS_HEADER = 100_000_000


def kind_of(path: Path) -> Kind | None:
    """The kind of `path`; None for anything else. ``torch.save`` writes a zip of pickles, or a pickle of protocol 2 or
    above."""
    with path.open("rb") as file:
        first = file.read(9)
    # A header's length, little endian, and the brace of its JSON; the length's lowest byte may be a pickle's first.
    if first[8:] == b"{" and int.from_bytes(first[:8], "little") <= MAX_SAFETENSORS_HEADER:
        return "safetensors"
    if first.startswith(GGUF_MAGIC):
        return "gguf"
    if first.startswith(_ZIP) or first[:1] == bytes([_PICKLE_PROTOCOL]):
        return "pickle"
    return None


def refuse_kind(path: Path) -> CheckpointError:
    """Why `path` is not opened where it is: a GGUF file stands alone, a safetensors file in its directory, a pickle
    nowhere."""
    kind = kind_of(path)
    if kind == "pickle":
        got = "a pickled PyTorch file, which runs code when it is opened"
        expected = "model.safetensors in its directory, or a GGUF file"
        repair = "Take the safetensors version of the model, or convert it where you trust it."
    elif kind == "safetensors":
        got = "a weight file without its config"
        expected = "the Hugging Face directory that holds it, with config.json"
        repair = "Name the directory."
    elif kind == "gguf":
        got, expected, repair = "a GGUF file in a directory", "model.safetensors there", "Name the file itself."
    else:
        with path.open("rb") as file:
            first = file.read(8)
        got = f"a file that begins with {first!r}" if first else "an empty file"
        expected = f"a GGUF file, which begins with {GGUF_MAGIC!r}, or a Hugging Face directory"
        repair = "Check the path, or download the file again."
    return CheckpointError(f"checkpoint {path.name}", got=got, expected=expected, repair=repair)
