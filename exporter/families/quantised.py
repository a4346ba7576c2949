"""Checkpoints whose weights are quantised already: told from damaged ones, and named.

What a family reads as it is stored (gpt-oss's MXFP4) is not met here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.errors import UnsupportedModelError

_METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes", "fp8": "FP8", "fbgemm_fp8": "FP8", "compressed-tensors": "compressed-tensors",
    "hqq": "HQQ", "eetq": "EETQ", "aqlm": "AQLM", "torchao": "torchao", "quanto": "Quanto", "vptq": "VPTQ",
    "mxfp4": "MXFP4", "modelopt": "ModelOpt", "auto-round": "AutoRound", "bitnet": "BitNet", "spqr": "SpQR",
    "higgs": "HIGGS", "exl2": "ExLlamaV2", "quark": "Quark",
}  # fmt: skip
"""`quant_method` of a ``quantization_config`` -> what people call it."""
_SUFFIXES = {
    "quant_state.bitsandbytes__nf4": "bitsandbytes", "quant_state.bitsandbytes__fp4": "bitsandbytes",
    "weight.absmax": "bitsandbytes", "weight.quant_map": "bitsandbytes", "weight_format": "bitsandbytes",
    "SCB": "bitsandbytes", "g_idx": "GPTQ", "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors", "weight_scale_inv": "FP8", "weight_scale_2": "ModelOpt",
    "weight_scale": "FP8 or compressed-tensors", "input_scale": "FP8", "W_q": "HQQ", "weight_scales": "EETQ",
    "codebooks": "AQLM", "codes": "AQLM", "Qidxs": "QuIP#", "q_weight": "ExLlamaV2", "q_perm": "ExLlamaV2",
    "_blocks": "MXFP4", "biases": "MLX", "qdata": "torchao", "_qdata": "torchao", "_data": "Quanto",
    "trellis": "ExLlamaV3", "centroids": "VPTQ",
}  # fmt: skip
"""Last part of a tensor's name -> what stores such a one beside or in place of its weight."""
_DTYPES = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E8M0": "MXFP4", "F4": "FP4", "I8": "an int8 format",
           "U8": "a 4-bit format", "U32": "MLX", "I32": "GPTQ or AWQ"}  # fmt: skip


def method_of_config(config: Mapping[str, Any]) -> str | None:
    """How ``config.json`` says that the weights are quantised, in `quant_method`'s words; None if it does not."""
    for key in ("quantization", "quantization_config", "compression_config"):
        said = config.get(key)
        if not said:
            continue
        if not isinstance(said, Mapping):
            return str(said)
        if said.get("quant_method"):
            return str(said["quant_method"])
        producer = said.get("producer")
        if isinstance(producer, Mapping) and producer.get("name"):
            return str(producer["name"])
        if any("4bit" in name or "8bit" in name for name in said):
            return "bitsandbytes"
        # MLX writes both sections, and no method in either.
        return "MLX" if key == "quantization" else "a method that config.json does not name"
    return None


def method_of_tensors(dtypes: Mapping[str, str]) -> str | None:
    """How tensors of these names and safetensors dtypes are quantised; None if they are not."""
    for suffix, name in _SUFFIXES.items():
        separated = suffix if suffix.startswith("_") else f".{suffix}"
        if any(key.endswith(separated) or key == suffix for key in dtypes):
            return name
    for dtype, name in _DTYPES.items():
        if any(found == dtype and key.endswith("weight") and "norm" not in key for key, found in dtypes.items()):
            return name
    return None


def refuse_quantised(owner: str, method: str) -> UnsupportedModelError:
    """The error for a checkpoint that `method` quantised."""
    return UnsupportedModelError(
        owner,
        got=f"weights that are quantised already ({_METHODS.get(method.lower(), method)})",
        expected="weights as the model's author trained them: float32, float16 or bfloat16, or a GGUF file",
        repair="Take the unquantised checkpoint (its name lacks GPTQ, AWQ, bnb, FP8, 4bit or MLX), or a GGUF of the "
        "model. The export quantises it, and compares.",
    )
