"""What a bundle says of itself: its programs, where they came from, how they were checked and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from exporter.spec.base import DType, Spec
from exporter.spec.model import ModelSpec
from exporter.spec.states import CachePolicy, Layout, StateSpec, state_specs

MANIFEST_VERSION = 4


class QuantizationSpec(Spec):
    """Weights per kind of tensor; activations of quantised linears are int8, quantised per token at run time.

    `int8` is symmetric per output channel; `int4` symmetric per group of `group_size` input channels. Linears whose
    name contains one of `keep_int8` stay int8 when `linear` is int4. An embedding is int8 per row or int4 per group.

    `smooth` folds factors into norms and weights so that inputs of linears and weights share their outliers, `rounding`
    says how linears and head are rounded, and the first `head_int8_rows` rows of an int4 head, those of the frequent
    tokens, are int8. A tied table is stored once: the embedding takes its rows from the head's, and an int8 one beside
    an int4 head adds what the four bits leave over as four more.

    `max_kl_divergence`, in nats, is the ceiling that verification holds the program to; left out, `promise_of` has it.
    """

    linear: Literal["none", "int8", "int4"] = "none"
    embedding: Literal["none", "int8", "int4"] = "none"
    head: Literal["none", "int8", "int4"] = "none"
    group_size: int = Field(default=32, ge=32, multiple_of=32)
    keep_int8: tuple[str, ...] = ()
    smooth: bool = False
    rounding: Literal["nearest", "gptq"] = "nearest"
    head_int8_rows: int = Field(default=0, ge=0)
    max_kl_divergence: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_what_it_refines(self) -> QuantizationSpec:
        if self.smooth and self.linear == self.head == "none":
            raise ValueError("a quantised linear or head for smooth: it acts on the inputs of those")
        if self.rounding == "gptq" and self.linear == self.head == "none":
            raise ValueError("a quantised linear or head for rounding gptq: it follows the inputs of those")
        if self.head_int8_rows and self.head != "int4":
            raise ValueError("head int4 for head_int8_rows")
        return self

    @property
    def is_calibrated(self) -> bool:
        """Whether it depends on what the model's inputs look like."""
        return self.smooth or self.rounding == "gptq"

    @property
    def is_quantized(self) -> bool:
        return {self.linear, self.embedding, self.head} != {"none"}

    @property
    def rounds_activations(self) -> bool:
        return {self.linear, self.head} != {"none"}


PRESETS: dict[str, QuantizationSpec] = {
    "none": QuantizationSpec(),
    "accurate": QuantizationSpec(linear="int8", embedding="int8", head="int8", smooth=True, rounding="gptq"),
    "balanced": QuantizationSpec(
        linear="int8", embedding="int8", head="int4", smooth=True, rounding="gptq", head_int8_rows=8192
    ),
    "small": QuantizationSpec(
        linear="int4",
        embedding="int8",
        head="int4",
        keep_int8=("down_proj", "k_proj", "v_proj"),
        smooth=True,
        rounding="gptq",
    ),
}
"""What a config may name instead of a mapping, by what it promises (docs/quantization.md has what was measured):
`accurate` within 0.01 nats of the float model's negative log-likelihood, `balanced` within 0.02, `small` within 0.1.
A model need not have the matrices they name."""


class Promise(Spec):
    """`max_kl`, in nats: a program whose mean KL divergence from the float model is above it is refused. It is the
    ceiling for files that are broken, on a few positions of one text, and wider than what was measured on many."""

    max_kl: float


PROMISES: dict[str, Promise] = {
    "none": Promise(max_kl=0.0),
    "accurate": Promise(max_kl=0.05),
    "balanced": Promise(max_kl=0.08),
    "small": Promise(max_kl=0.25),
}
"""Of the presets, over float32 caches."""
CACHE_PROMISES: dict[DType, Promise] = {
    "float32": Promise(max_kl=0.0), "float16": Promise(max_kl=0.001), "int8": Promise(max_kl=0.05),
}  # fmt: skip
"""What the coarsest cache comes to beside the weights."""
_COARSENESS = ("none", "int8", "int4")


def promise_of(spec: QuantizationSpec) -> Promise:
    """The ceiling of `spec`: what it states itself, or that of the nearest preset. That is the strictest of those that
    are in no respect finer than `spec`; where each is finer in something, the least strict of all."""
    if spec.max_kl_divergence is not None:
        return Promise(max_kl=spec.max_kl_divergence)
    promises = [PROMISES[name] for name, preset in PRESETS.items() if not _finer(preset, spec)]
    if not promises:
        return max(PROMISES.values(), key=lambda promise: promise.max_kl)
    return min(promises, key=lambda promise: promise.max_kl)


def _finer(one: QuantizationSpec, other: QuantizationSpec) -> bool:
    """Whether `one` keeps more of a float model than `other` in some respect."""
    grids = [(getattr(one, part), getattr(other, part)) for part in ("linear", "embedding", "head")]
    return (
        any(_COARSENESS.index(ours) < _COARSENESS.index(theirs) for ours, theirs in grids)
        or (one.smooth and not other.smooth)
        or (one.rounding == "gptq" and other.rounding != "gptq")
        or (other.linear == "int4" and not set(one.keep_int8) <= set(other.keep_int8))
        or (other.head == "int4" and one.head_int8_rows > other.head_int8_rows)
        or ("int4" in {theirs for _, theirs in grids} and one.group_size < other.group_size)
    )


class TensorSpec(Spec):
    """An input or output of a program; a string in `shape` names a dynamic dimension of `dims`."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class MethodSpec(Spec):
    """One method: inputs in call order, outputs in order, the inclusive range of every dynamic dimension.

    `function` is its name in the file where that differs from the method's.
    """

    function: str | None = None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: dict[str, tuple[int, int]]
    mutates: tuple[str, ...]


Format = Literal["executorch", "coreml", "coreai"]
LAYOUTS: dict[Format, Layout] = {"executorch": "per_layer", "coreml": "static", "coreai": "stacked"}
IDS_DTYPES: dict[Format, str] = {"executorch": "int64", "coreml": "int32", "coreai": "int32"}
"""The dtype of `input_ids` and `position_ids`."""
STATE_DTYPES: dict[Format, DType] = {"coreml": "float16", "coreai": "float32"}
"""The formats whose states have one dtype whatever the cache policy says."""


_SENSITIVE = ("embed_tokens", "lm_head", "v_proj", "down_proj")
KEEP_INT8: dict[str, tuple[str, ...]] = {"int4": _SENSITIVE, "palettized4": _SENSITIVE}
"""The matrices that keep 8 bits by default in the options that have 4: most of what those cost sits in these."""


REDUCED_PROMISES: dict[str, Promise] = {
    "float32": Promise(max_kl=0.0), "float16": Promise(max_kl=0.001), "int8": Promise(max_kl=0.1),
    "int4": Promise(max_kl=0.5), "palettized4": Promise(max_kl=0.8),
}  # fmt: skip
"""Of the same kind as `PROMISES`, by what the other formats call their weights."""


class _ReducedWeights(Spec):
    """`keep_int8` has the meaning of `QuantizationSpec.keep_int8`, and embedding and head have names too: the matrices
    whose name contains one of its parts are int8 where `weights` has 4 bits. Left out, it is that of `KEEP_INT8`.
    `max_kl_divergence` is as there; left out, it is that of `REDUCED_PROMISES`."""

    weights: str
    keep_int8: tuple[str, ...] = ()
    max_kl_divergence: float | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _its_own_default(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "keep_int8" in data:
            return data
        return {**data, "keep_int8": KEEP_INT8.get(str(data.get("weights")), ())}

    @model_validator(mode="after")
    def _only_beside_four_bits(self) -> Self:
        if self.keep_int8 and self.weights not in KEEP_INT8:
            raise ValueError(f"keep_int8 beside weights {' or '.join(KEEP_INT8)}, not {self.weights}")
        return self


AttentionKernels = Literal["ring", "stock"]


class ExecutorchOptions(Spec):
    """How an ExecuTorch program keeps its weights, and what it attends with: `ring`, the kernels of
    `runtime_ref/kernels`, which an app links, or `stock`, those that every build of ExecuTorch has. Either file runs
    with either, to the same results; what differs is who gets a prefill's attention of sliding layers,
    ``llama::custom_sdpa`` or XNNPACK."""

    quantization: QuantizationSpec
    kernels: AttentionKernels


class CoreMLOptions(_ReducedWeights):
    """How a Core ML program keeps its weights: `int8` per output channel, `int4` per block of 32 input channels,
    `palettized4` as 4-bit indices into a table. ``float32`` computes in float32 too, for comparisons; its states are
    float16 all the same."""

    weights: Literal["float32", "float16", "int8", "int4", "palettized4"] = "float16"


class CoreAIOptions(_ReducedWeights):
    """How a Core AI program keeps its weights: `int8` per output channel, `int4` per block of 32 input channels."""

    weights: Literal["float32", "float16", "int8", "int4"] = "float16"


class ProgramSpec(Spec):
    """One program, a file or a directory of the bundle. `format` selects the loader.

    `states` is the state it takes, `weights` says in a word how its weights are stored, `keep_int8` which of them have
    8 bits all the same and `max_kl_divergence` the ceiling that the config states (of an ExecuTorch program, the
    manifest's `quantization` does); `operators` are those it
    uses; of an ExecuTorch program, those outside every delegate. `kernels` is what an ExecuTorch program was laid out
    for.
    """

    format: Format
    file: str
    weights: str
    keep_int8: tuple[str, ...] = ()
    max_kl_divergence: float | None = None
    states: tuple[StateSpec, ...]
    methods: dict[str, MethodSpec]
    runtime: str
    operators: tuple[str, ...]
    kernels: AttentionKernels = "stock"


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
    """One line of the graph contract: `program` is a method's name, `evidence` what was seen in the graph. One that
    did not pass is an error, or where it is a matter of speed and nobody demanded better, a warning."""

    format: Format = "executorch"
    name: str
    program: str
    passed: bool
    evidence: str
    severity: Literal["error", "warning"] = "error"

    @property
    def refused(self) -> bool:
        """Whether a program with this result must not ship."""
        return not self.passed and self.severity == "error"


EAGER, FLOAT = "eager", "float eager"
"""References of a comparison at export: the model that was traced, and where that rounds, the one before it did."""


class Comparison(Spec):
    """How far a program was from a reference on the same tokens. `positions` counts compared rows of logits,
    `largest_logit` is the largest magnitude in the reference's.

    KL divergence is that of the program's next-token distribution from the reference's, in nats, `nll` the mean
    negative log-likelihood of the true next tokens. `max_state_error` is that of the row `worst_state` and
    `mean_state_error` that of the worst head's rows, as ``verification.states.StateErrors`` has them. Without a
    `format` what was compared is no program but the float model that all of them are made of.
    """

    format: Format | None = "executorch"
    reference: str
    positions: int
    largest_logit: float
    max_abs_difference: float
    mean_abs_difference: float
    mean_kl_divergence: float
    argmax_agreement: float
    greedy_agreement: str | None = None
    max_state_difference: float | None = None
    max_state_error: float | None = None
    mean_state_error: float | None = None
    worst_state: str | None = None
    nll: float | None = None
    reference_nll: float | None = None


class FileEntry(Spec):
    bytes: int
    sha256: str


class Manifest(Spec):
    """What a bundle says of itself (`manifest.json`).

    Whoever runs or checks one program looks at the manifest `of` its format, which names no other. `not_compared` says
    why the float model was not compared with Transformers at export; None if it was.
    """

    version: int = MANIFEST_VERSION
    name: str
    created: str
    model: ModelSpec
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
    not_compared: str | None = None
    versions: dict[str, str]
    files: dict[str, FileEntry]

    def of(self, format: Format) -> Manifest:
        """The same bundle with the program of one format alone, its checks and comparisons; the bundle must have it."""
        own = tuple(program for program in self.programs if program.format == format)
        assert len(own) == 1, f"{len(own)} programs of format {format}"
        checks = tuple(check for check in self.graph_checks if check.format == format)
        comparisons = tuple(comparison for comparison in self.verification if comparison.format == format)
        return self.model_copy(update={"programs": own, "graph_checks": checks, "verification": comparisons})

    @property
    def program(self) -> ProgramSpec:
        """The one program of a manifest that has no other."""
        (program,) = self.programs
        return program

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states of that program."""
        return self.program.states

    @property
    def from_float(self) -> Comparison | None:
        """How far that program was from the float model at export; None if nobody compared them."""
        by_reference = {comparison.reference: comparison for comparison in self.verification}
        return by_reference.get(FLOAT, by_reference.get(EAGER))

    @property
    def is_quantized(self) -> bool:
        """Whether that program rounds: weights or activations, or the rows of its caches."""
        if self.program.format == "executorch":
            return self.quantization.is_quantized or any(state.dtype != "float32" for state in self.states)
        return self.program.weights != "float32" or any(state.dtype != "float32" for state in self.states)

    @property
    def max_kl(self) -> float:
        """The ceiling of that program's mean KL divergence from the float model, in nats."""
        if self.program.format == "executorch":
            stated, promise = self.quantization.max_kl_divergence, promise_of(self.quantization)
        else:
            stated, promise = self.program.max_kl_divergence, REDUCED_PROMISES[self.program.weights]
        if stated is not None:
            return stated
        return promise.max_kl + max(CACHE_PROMISES[state.dtype].max_kl for state in self.states)

    def with_states(self, states: Sequence[StateSpec]) -> Manifest:
        """The same program over other states."""
        return self.model_copy(update={"programs": (self.program.model_copy(update={"states": tuple(states)}),)})

    def with_float_caches(self) -> Manifest:
        """The same program over float32 caches."""
        cache = self.cache.model_copy(update={"dtype": "float32", "global_dtype": None})
        layout = LAYOUTS[self.program.format]
        states = state_specs(self.model, cache, self.max_context_length, layout, "float32")
        return self.model_copy(update={"cache": cache}).with_states(states)
