"""litert-torch's own exporter, without TensorFlow and without the tokenizer.

litert-torch 0.10 imports TensorFlow without declaring it, for the file format of an image model, which is not exported
here; LiteRT has the same module. It fails on a tokenizer without a pre-tokenizer, such as Gemma's from a GGUF, and
spends minutes on converting others; only token ids are needed here.

``python convert_litert.py CHECKPOINT DIRECTORY ROWS``, the rows of the caches.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

from ai_edge_litert import schema_py_generated

PREFILLS = [128, 512]
"""Tokens a prefill call takes: a program for each."""


def stand_in_for_tensorflow() -> None:
    for name in ("tensorflow", "tensorflow.lite", "tensorflow.lite.python"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # torch asks for it
        sys.modules[name] = module
    sys.modules["tensorflow.lite.python"].__dict__["schema_py_generated"] = schema_py_generated


def convert(checkpoint: str, directory: Path, rows: int) -> None:
    """Write ``model_quantized.tflite``: int8 weights, caches of `rows` rows."""
    from litert_torch.generative.export_hf.core import export_lib
    from litert_torch.generative.export_hf.export import export

    export_lib.export_tokenizer = lambda source, config, artifacts: artifacts
    export(
        model=checkpoint,
        output_dir=str(directory),
        quantization_recipe="dynamic_wi8_afp32",
        prefill_lengths=PREFILLS,
        cache_length=rows,
        bundle_litert_lm=False,
        keep_temporary_files=True,
    )
    (directory / "model.tflite").unlink()  # in floats


if __name__ == "__main__":
    stand_in_for_tensorflow()
    convert(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
