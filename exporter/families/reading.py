"""Reading the two spellings of a model's description: Hugging Face's ``config.json`` and GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.spec import Activation, RopeSpec

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip


def contradiction(got: str, expected: str) -> CheckpointError:
    """A model description that cannot be what its author meant."""
    return CheckpointError("model config", got=got, expected=expected, repair="Correct it, or fetch the file again.")


def unsupported(got: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "model config", got=got, expected=expected, repair="Export another model, or add the arithmetic to a family."
    )


def activation(name: Any) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise unsupported(f"hidden activation {name!r}", f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def refuse_flags(config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise for config flags that switch on arithmetic the spec has no word for."""
    for name in names:
        if config.get(name):
            raise unsupported(f"{name} = {config[name]!r}", "a model without it")


def window_length(value: Any) -> int | None:
    """``sliding_window``: None (full attention) or a positive number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise contradiction(f"sliding_window = {value!r}", "null or a positive number")
    return value


def explicit_layer_types(config: Mapping[str, Any], num_layers: int) -> list[LayerType] | None:
    """``layer_types`` as the config lists them, checked; None when it does not."""
    names = config.get("layer_types")
    if names is None:
        return None
    if not isinstance(names, list | tuple) or len(names) != num_layers:
        length = f"length {len(names)}" if isinstance(names, list | tuple) else f"type {type(names).__name__}"
        raise contradiction(f"layer_types of {length}", f"one for each of {num_layers} layers")
    if unknown := sorted({str(name) for name in names} - set(LAYER_TYPES)):
        raise unsupported(f"layer_types {', '.join(unknown)}", " or ".join(LAYER_TYPES))
    return list(names)


def pattern_layer_types(pattern: Any, num_layers: int) -> list[LayerType]:
    """Every `pattern`-th layer is global, the others slide."""
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise contradiction(f"sliding_window_pattern = {pattern!r}", "a positive number")
    return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]


def rope_parameters(config: Mapping[str, Any], layer_type: LayerType, default_theta: float) -> dict[str, Any]:
    """The RoPE parameters of one kind of layer, with `rope_theta` filled in.

    Transformers spelt them ``rope_theta`` beside ``rope_scaling`` (up to v4), then ``rope_parameters``, flat or one
    dictionary a layer type (v5); what stands inside wins over what stands beside.
    """
    parameters = section(config, "rope_parameters")
    if any(key in parameters for key in LAYER_TYPES):
        parameters = section(parameters, layer_type)
    result = {**parameters, **section(config, "rope_scaling")}
    for key, default in (("rope_theta", default_theta), ("partial_rotary_factor", 1.0)):
        if result.get(key) is None:
            beside = config.get(key)
            result[key] = default if beside is None else beside
    if result.get("original_max_position_embeddings") is None:
        result["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
    return result


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_spec(parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """A `RopeSpec` of `rope_parameters`' result (meaning of the keys: ``transformers.modeling_rope_utils``)."""
    if unknown := sorted(set(parameters) - _ROPE_KEYS):
        raise unsupported(f"RoPE parameters {', '.join(unknown)}", f"among {', '.join(sorted(_ROPE_KEYS))}")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    plain = RopeSpec(
        theta=positive_number(parameters, "rope_theta"),
        rotary_dim=int(head_dim * positive_number(parameters, "partial_rotary_factor")),
    )
    if kind == "default":
        return plain
    if kind not in ("linear", "llama3", "yarn"):
        raise unsupported(f"RoPE type {kind!r}", "default, linear, llama3 or yarn")
    values: dict[str, Any] = {"scaling": kind}
    if kind != "linear":
        values["original_max_position_embeddings"] = positive(parameters, "original_max_position_embeddings")
    if kind == "yarn":
        stretch = max_position_embeddings / values["original_max_position_embeddings"]
        for key, default in (("factor", stretch), ("beta_fast", 32.0), ("beta_slow", 1.0)):
            values[key] = positive_number({key: parameters.get(key) or default}, key)
        values["truncate"] = parameters.get("truncate", True)
        values["attention_factor"] = parameters.get("attention_factor")
        mscale, all_dim = optional_number(parameters, "mscale"), optional_number(parameters, "mscale_all_dim")
        if values["attention_factor"] is None and mscale and all_dim:
            values["attention_factor"] = _mscale(values["factor"], mscale) / _mscale(values["factor"], all_dim)
    else:
        values["factor"] = positive_number(parameters, "factor")
    if kind == "llama3":
        values |= {key: positive_number(parameters, key) for key in ("low_freq_factor", "high_freq_factor")}
    return RopeSpec.model_validate(plain.model_dump() | values)


def short_decimal(value: float) -> float:
    """The shortest decimal that rounds to the float32 `value`: 9.99999997e-07 was written as 1e-06."""
    return float(str(np.float32(value)))


class GGUFMetadata:
    """The keys of one architecture. A key outside `known` may change the arithmetic, so it is refused."""

    def __init__(self, metadata: Mapping[str, Any], known: frozenset[str]) -> None:
        self.architecture = str(metadata["general.architecture"])
        prefix = self.architecture + "."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        if unknown := sorted(set(self._values) - known):
            raise unsupported(
                f"GGUF metadata {', '.join(prefix + key for key in unknown)}", f"among {', '.join(sorted(known))}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1 and key != "attention.sliding_window_pattern":
            value = value[0]  # one value a layer, all equal
        return short_decimal(value) if isinstance(value, float) else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list):
            raise unsupported(f"{self.architecture}.{key} that differs from layer to layer", "one number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise contradiction(f"{self.architecture}.{key} = {value!r}", "a positive number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise contradiction(f"{self.architecture}.{key} = {value!r}", "a number")
        return float(value)

    def rope(self, head_dim: int) -> RopeSpec:
        """RoPE of the layers that scale it."""
        plain = RopeSpec(
            theta=self.number("rope.freq_base", 10000.0), rotary_dim=self.integer("rope.dimension_count", head_dim)
        )
        kind = self.get("rope.scaling.type", "none")
        if kind == "none":
            return plain
        if kind != "linear":
            raise unsupported(f"{self.architecture}.rope.scaling.type = {kind!r}", "none or linear")
        return plain.model_copy(update={"scaling": "linear", "factor": self.number("rope.scaling.factor")})


COMMON_GGUF_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
})  # fmt: skip


def gguf_vocab_size(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding; a converter pads the list of tokens to them."""
    if "token_embd.weight" in shapes:
        return shapes["token_embd.weight"][0]
    return len(metadata.get("tokenizer.ggml.tokens", ()))


def positive(config: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1 out of a ``config.json``."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise contradiction(f"{key} = {value!r}", "a positive whole number")
    return value


def positive_number(config: Mapping[str, Any], key: str) -> float:
    """A finite number above 0."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise contradiction(f"{key} = {value!r}", "a positive number")
    return float(value)


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A dictionary inside a config; null and absent mean an empty one."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise contradiction(f"{key} = {value!r}", "a dictionary")
    return value


def optional_number(config: Mapping[str, Any], key: str) -> float | None:
    """A finite number above 0, or None for null and absent."""
    return None if config.get(key) is None else positive_number(config, key)
