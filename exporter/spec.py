"""LEAF: the vocabulary every part shares. It imports neither torch nor any other part of the exporter.

`ModelSpec` says what a model computes, layer by layer; `StateSpec` says which tensors the caller owns; `Manifest` is
what a bundle says of itself. A layer's kind is decided once, by its family, in `LayerSpec.mixer`.

Letters: B batch (always 1), Q query_len, S seq_len, C capacity (rows of a ring), W window, H heads, K KV heads,
D head_dim.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MANIFEST_VERSION = 1

DType = Literal["float32", "float16", "int8"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "int8": 1}

Activation = Literal["silu", "gelu_tanh", "gelu"]


class Spec(BaseModel):
    """Frozen data; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeSpec(Spec):
    """Rotary position embedding of one layer, in the half-split ("neox") layout of Transformers.

    The first `rotary_dim` of `head_dim` channels rotate with inverse frequencies ``theta ** (-2i / rotary_dim)``,
    rescaled as `scaling` says (formulas: ``transformers.modeling_rope_utils``). `attention_factor` multiplies cos and
    sin (YaRN); None means the formula's own value.
    """

    theta: float
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None


class AttentionSpec(Spec):
    """One attention layer. ``window is None`` means global attention; otherwise W keys, the current one included."""

    type: Literal["attention"] = "attention"
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int | None
    scale: float
    rope: RopeSpec | None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    logit_softcap: float | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> AttentionSpec:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} is below 1")
        return self

    @property
    def kind(self) -> Literal["sliding", "global"]:
        return "global" if self.window is None else "sliding"


class ShortConvSpec(Spec):
    """A gated short causal convolution (LFM2): its state is its last ``kernel_size - 1`` inputs, no KV cache."""

    type: Literal["short_conv"] = "short_conv"
    kernel_size: int = Field(ge=2)
    bias: bool = False

    @property
    def kind(self) -> Literal["conv"]:
        return "conv"


class MLPSpec(Spec):
    """``down(act(gate(x)) * up(x))``."""

    type: Literal["mlp"] = "mlp"
    intermediate_size: int
    activation: Activation
    bias: bool = False


class MoESpec(Spec):
    """Mixture of experts: each token goes through the `num_experts_per_tok` experts its router scores highest.

    `routing` says how the chosen scores become weights: ``softmax_topk`` softmaxes over all experts, then picks (and
    divides by the sum of the picked when `normalize_topk`); ``topk_softmax`` picks, then softmaxes over the picked.
    `clamp_limit` selects GPT-OSS's clamped SwiGLU: ``(up + 1) * gate * sigmoid(1.702 gate)`` with both clamped.
    """

    type: Literal["moe"] = "moe"
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    activation: Activation
    routing: Literal["softmax_topk", "topk_softmax"]
    normalize_topk: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    clamp_limit: float | None = None


class LayerSpec(Spec):
    """One decoder layer. `post_norms`: Gemma's second pair of norms, after attention and after the MLP."""

    mixer: Annotated[AttentionSpec | ShortConvSpec, Field(discriminator="type")]
    feed_forward: Annotated[MLPSpec | MoESpec, Field(discriminator="type")]
    post_norms: bool = False


class ModelSpec(Spec):
    """Everything the decoder needs to know about a model.

    RMSNorm weights in a state dict are the factors themselves: a checkpoint reader adds Gemma's offset of 1 to what a
    Hugging Face file stores, and a GGUF file carries it folded in already. `embedding_scale` multiplies the embedding
    (Gemma: sqrt(hidden_size)).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    embedding_scale: float = 1.0
    tie_word_embeddings: bool
    final_logit_softcap: float | None = None
    max_position_embeddings: int


StateRole = Literal["keys", "key_scales", "values", "value_scales", "inputs"]
SCALES: dict[StateRole, StateRole] = {"keys": "key_scales", "values": "value_scales"}
"""The state that scales the integers of another, by role."""


class StateSpec(Spec):
    """One tensor the caller allocates and passes to every program, which writes it in place.

    shape: ``[1, rows, num_heads, head_dim]`` for keys and values, ``[1, rows, num_heads, 1]`` for their scales (an int8
    row stands for integer times scale), ``[1, rows, hidden_size]`` for a convolution. `rows` is the number to allocate
    first; a ``full`` state may grow to `max_rows`, the others never change.
    """

    name: str
    layer: int
    kind: Literal["ring", "full", "conv"]
    role: StateRole
    rows: int
    max_rows: int
    window: int | None
    row_shape: tuple[int, ...]
    dtype: DType

    @property
    def scales(self) -> str | None:
        """The name of the state that scales this one's integers, if it holds integers."""
        return state_name(self.layer, SCALES[self.role]) if self.dtype == "int8" else None

    @property
    def row_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for n in self.row_shape:
            size *= n
        return size

    def shape(self, rows: int | None = None) -> tuple[int, ...]:
        return (1, self.rows if rows is None else rows, *self.row_shape)

    def bytes(self, rows: int | None = None) -> int:
        return self.row_bytes * (self.rows if rows is None else rows)


def state_name(layer: int, role: StateRole) -> str:
    return f"layer_{layer}_{role}"


class CachePolicy(Spec):
    """How the caller's state is laid out. `ring_slack` rows beyond the window buy that many tokens of rewind.

    `dtype` is that of keys and values; int8 is symmetric per row and KV head, with float32 scales beside it. The few
    rows of a convolution are float32 in any case.
    """

    dtype: Literal["float32", "int8"] = "float32"
    ring_slack: int = Field(default=0, ge=0)
    initial_rows: int = Field(default=64, ge=1)
    growth: Literal["double", "1.5x"] = "double"

    def grown_rows(self, rows: int, needed: int, max_rows: int) -> int:
        """The rows a growing state takes next: the smallest step of the policy that holds `needed`."""
        while rows < needed:
            rows = rows * 2 if self.growth == "double" else rows + (rows + 1) // 2
        return min(rows, max_rows)


def cache_states(
    *, layer: int, kind: Literal["ring", "full"], rows: int, max_rows: int, window: int | None,
    row_shape: tuple[int, ...], dtype: DType,
) -> tuple[StateSpec, ...]:  # fmt: skip
    """The states of one attention layer; `row_shape` and `dtype` are those of its keys and values."""
    states = []
    for role, scales in SCALES.items():
        parts: list[tuple[StateRole, tuple[int, ...], DType]] = [(role, row_shape, dtype)]
        if dtype == "int8":
            parts.append((scales, (*row_shape[:-1], 1), "float32"))
        for part, shape, own in parts:
            states.append(
                StateSpec(
                    name=state_name(layer, part), layer=layer, kind=kind, role=part, rows=rows, max_rows=max_rows,
                    window=window, row_shape=shape, dtype=own,
                )
            )  # fmt: skip
    return tuple(states)


def state_specs(model: ModelSpec, policy: CachePolicy, max_context_length: int) -> tuple[StateSpec, ...]:
    """The state of `model` in the order in which programs take it: layer by layer, keys before values, each followed
    by its scales if it has any."""
    states: list[StateSpec] = []
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        if isinstance(mixer, ShortConvSpec):
            rows = mixer.kernel_size - 1
            states.append(
                StateSpec(
                    name=state_name(index, "inputs"), layer=index, kind="conv", role="inputs", rows=rows,
                    max_rows=rows, window=None, row_shape=(model.hidden_size,), dtype="float32",
                )
            )  # fmt: skip
            continue
        if mixer.window is None:
            kind: Literal["ring", "full"] = "full"
            window, rows, max_rows = None, min(policy.initial_rows, max_context_length), max_context_length
        else:
            # A window that outreaches the context never closes: the ring is then the whole context.
            kind, window = "ring", min(mixer.window, max_context_length)
            rows = max_rows = window + policy.ring_slack
        states += cache_states(
            layer=index, kind=kind, rows=rows, max_rows=max_rows, window=window, dtype=policy.dtype,
            row_shape=(mixer.num_key_value_heads, mixer.head_dim),
        )  # fmt: skip
    return tuple(states)


class QuantizationSpec(Spec):
    """Weights per kind of tensor; activations of quantised linears are int8, quantised per token at run time.

    `int8` is symmetric per output channel; `int4` symmetric per group of `group_size` input channels. Linears whose
    name contains one of `keep_int8` stay int8 when `linear` is int4. An embedding is int8 per row or int4 per group.
    """

    linear: Literal["none", "int8", "int4"] = "none"
    embedding: Literal["none", "int8", "int4"] = "none"
    head: Literal["none", "int8", "int4"] = "none"
    group_size: int = Field(default=32, ge=32, multiple_of=32)
    keep_int8: tuple[str, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return {self.linear, self.embedding, self.head} != {"none"}


class TensorSpec(Spec):
    """An input or output of a program; a string in `shape` names a dynamic dimension of `dims`."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class MethodSpec(Spec):
    """One method: inputs in call order, outputs in order, the inclusive range of every dynamic dimension."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: dict[str, tuple[int, int]]
    mutates: tuple[str, ...]


class ProgramSpec(Spec):
    """One program file. `format` selects the loader; `operators` are those left outside every delegate."""

    format: Literal["executorch"]
    file: str
    methods: dict[str, MethodSpec]
    runtime: str
    operators: tuple[str, ...]


class SourceSpec(Spec):
    """Where the weights came from: `files` maps a file's name (never its path) to its SHA-256."""

    kind: Literal["safetensors", "gguf"]
    name: str
    license: str | None
    files: dict[str, str]


class TokenizerSpec(Spec):
    """What generation needs to know. `eos_token_ids`: each of them stops."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    has_chat_template: bool


class CheckResult(Spec):
    """One line of the graph contract: `program` is a method's name, `evidence` what was seen in the graph."""

    name: str
    program: str
    passed: bool
    evidence: str


class Comparison(Spec):
    """How far a program was from a reference on the same tokens. `positions` counts compared rows of logits.

    KL divergence is that of the program's next-token distribution from the reference's, in nats, `nll` the mean
    negative log-likelihood of the true next tokens.
    """

    reference: str
    positions: int
    max_abs_difference: float
    mean_abs_difference: float
    mean_kl_divergence: float
    argmax_agreement: float
    greedy_agreement: str | None = None
    max_state_difference: float | None = None
    nll: float | None = None
    reference_nll: float | None = None


class FileEntry(Spec):
    bytes: int
    sha256: str


class Manifest(Spec):
    """What a bundle says of itself (`manifest.json`)."""

    version: int = MANIFEST_VERSION
    name: str
    created: str
    model: ModelSpec
    states: tuple[StateSpec, ...]
    cache: CachePolicy
    max_context_length: int
    max_prefill_chunk: int
    dtype: DType
    quantization: QuantizationSpec
    source: SourceSpec
    tokenizer: TokenizerSpec
    programs: tuple[ProgramSpec, ...]
    graph_checks: tuple[CheckResult, ...]
    verification: tuple[Comparison, ...]
    versions: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def is_quantized(self) -> bool:
        """Whether the program rounds while it runs: activations (quantised weights), or rows of an int8 cache."""
        return self.quantization.is_quantized or self.cache.dtype == "int8"

    def with_float_caches(self) -> Manifest:
        """The same model over float32 caches."""
        cache = self.cache.model_copy(update={"dtype": "float32"})
        states = state_specs(self.model, cache, self.max_context_length)
        return self.model_copy(update={"cache": cache, "states": states})
