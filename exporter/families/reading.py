"""Reading Hugging Face's ``config.json``, whatever its family. GGUF metadata: `exporter.families.gguf`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.spec import Activation, MLPSpec, RopeSpec

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
MOST_LAYERS, MOST = 4096, 2**31 - 1
"""Of layers, and of any other size in a config."""
_ROPE_KEYS = {
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
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


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether there is a window, and nothing switches it off."""
    return window_length(config.get("sliding_window")) is not None and bool(config.get("use_sliding_window", True))


def never_slides(config: Mapping[str, Any], num_layers: int) -> list[LayerType]:
    """Full attention on every layer; a config with a window is refused."""
    if _slides(config):
        raise unsupported(
            f"sliding_window = {config['sliding_window']} in a model type whose layers never slide",
            "null, or model_type mistral",
        )
    return _as_implied(config, ["full_attention"] * num_layers, "none")


def all_slide(config: Mapping[str, Any], num_layers: int) -> list[LayerType]:
    """A sliding window on every layer when there is one."""
    return _as_implied(config, ["sliding_attention" if _slides(config) else "full_attention"] * num_layers, "all")


def from_max_window_layers(config: Mapping[str, Any], num_layers: int) -> list[LayerType]:
    """With a window the layers from `max_window_layers` on slide, or those that `layer_types` lists (Qwen)."""
    first = config["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise contradiction(f"max_window_layers = {first!r}", "a whole number")
    listed = explicit_layer_types(config, num_layers)
    if not _slides(config):
        return ["full_attention"] * num_layers
    return listed or ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


def _as_implied(config: Mapping[str, Any], implied: list[LayerType], which: str) -> list[LayerType]:
    listed = explicit_layer_types(config, len(implied))
    if listed is not None and listed != implied:
        raise unsupported("layer_types unlike those of the model type", f"{which} of the layers sliding")
    return implied


def rope_parameters(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """The RoPE parameters of a model type with one rotation, as Transformers reads them, with its defaults filled in.

    It spelt them ``rope_theta`` beside ``rope_scaling`` (up to v4), then ``rope_parameters`` (v5). Where a config has
    both sections (``rope_scaling`` was added by hand), the whole of ``rope_parameters`` is dropped; what stands inside
    a section wins over what stands beside (``RotaryEmbeddingConfigMixin.convert_rope_params_to_dict``).

    Raises:
        CheckpointError: what would be dropped says something else than what counts.
        UnsupportedModelError: a rotation for each kind of layer, or of a part of each head.
    """
    parameters, scaling = (_one_rotation(section(config, name), name) for name in ("rope_parameters", "rope_scaling"))
    counts, dropped = (scaling, parameters) if scaling else (parameters, {})
    result = filled(counts, config, config.get("rope_theta"), default_theta)
    refuse_dropped(dropped, result, "rope_parameters", "rope_scaling")
    return result


def _one_rotation(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    if nested := [key for key in LAYER_TYPES if key in parameters]:
        raise unsupported(f"{where} with {' and '.join(nested)}", "one rotation for all layers of this model type")
    return one_type(parameters, where)


def filled(counts: Mapping[str, Any], config: Mapping[str, Any], theta: Any, default_theta: float) -> dict[str, Any]:
    """The parameters that count, with what stands beside them in `config`, or else the defaults.

    Args:
        theta: the base that stands beside them; null means none.

    Raises:
        CheckpointError: what stands beside is something else than what counts, or a factor has no type.
        UnsupportedModelError: a rotation of a part of each head.
    """
    result = {"rope_type": "default"} | {key: value for key, value in counts.items() if value is not None}
    result.setdefault("rope_theta", default_theta if theta is None else theta)
    result.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if result["partial_rotary_factor"] != 1.0:
        raise unsupported(
            f"partial_rotary_factor = {result['partial_rotary_factor']!r}", "heads of this model type rotated whole"
        )
    if "rope_type" not in counts and result.get("factor", 1.0) != 1.0:
        raise contradiction(f"a RoPE factor {result['factor']!r} without a rope_type", "a factor with its rope_type")
    beside = config.get("original_max_position_embeddings")
    original = result.setdefault(
        "original_max_position_embeddings", config.get("max_position_embeddings") if beside is None else beside
    )
    if result["rope_type"] in ("llama3", "yarn") and beside is not None and beside != original:
        raise contradiction(f"original_max_position_embeddings {original} and, beside it, {beside}", "one of them")
    return result


def refuse_dropped(dropped: Mapping[str, Any], counts: Mapping[str, Any], section_dropped: str, by: str) -> None:
    """Raise for a parameter of which a section that does not count says something else. That the type is the default
    one, every config of Transformers 5 says; it is no word against another."""
    for key, value in sorted(dropped.items()):
        if counts.get(key) != value and value is not None and (key, value) != ("rope_type", "default"):
            raise contradiction(f"{key} {value} in {section_dropped} and {counts.get(key)} by {by}", "one value")


def one_type(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`parameters` with their type as ``rope_type``, whose older name is ``type``."""
    old, new = parameters.get("type"), parameters.get("rope_type")
    if old is not None and new is not None and old != new:
        raise contradiction(f"type {old!r} and rope_type {new!r} in {where}", "one of them")
    named = {} if old is None and new is None else {"rope_type": old if new is None else new}
    return {key: value for key, value in parameters.items() if key not in ("type", "rope_type")} | named


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_spec(parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """A `RopeSpec` of `rope_parameters`' result (meaning of the keys: ``transformers.modeling_rope_utils``)."""
    if unknown := sorted(set(parameters) - _ROPE_KEYS):
        raise unsupported(f"RoPE parameters {', '.join(unknown)}", f"among {', '.join(sorted(_ROPE_KEYS))}")
    kind = parameters.get("rope_type") or "default"
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


def attention_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Heads and their size as nearly every config spells them, and the usual scale: fields of `AttentionSpec`."""
    heads, head_dim = positive(config, "num_attention_heads"), config.get("head_dim")
    head_dim = positive(config, "hidden_size") // heads if head_dim is None else positive(config, "head_dim")
    kv_heads = heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }


def mlp_spec(config: Mapping[str, Any], activation_key: str, *, bias: bool = False) -> MLPSpec:
    """The dense feed-forward of a config."""
    return MLPSpec(
        intermediate_size=positive(config, "intermediate_size"),
        activation=activation(config[activation_key]),
        bias=bias,
    )


def model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What nearly every config spells alike: fields of `ModelSpec`."""
    return {
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": positive(config, "hidden_size"),
        "norm_eps": positive_number(config, "rms_norm_eps"),
        "tie_word_embeddings": config["tie_word_embeddings"],
        "max_position_embeddings": positive(config, "max_position_embeddings"),
    }


def positive(config: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1 out of a ``config.json``."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise contradiction(f"{key} = {value!r}", "a positive whole number")
    return within(key, value)


def within(key: str, value: int) -> int:
    """`value`, unless it is no size of a model: what is made for each layer would fill the memory.

    Raises:
        CheckpointError: it is larger than any.
    """
    most = MOST_LAYERS if key.endswith(("num_hidden_layers", "block_count")) else MOST
    if value > most:
        raise contradiction(f"{key} = {value}", f"at most {most}")
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
