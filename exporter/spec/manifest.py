"""What a bundle says of itself: its programs, where they came from, how they were checked and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from exporter.data import DType, Spec
from exporter.kinds import CachePolicy, Layout, StateSpec
from exporter.spec.model import ModelSpec
from exporter.spec.programs import Logits
from exporter.spec.quality import Quality
from exporter.spec.recipe import Recipe
from exporter.spec.states import state_specs

MANIFEST_VERSION = 5


class TensorSpec(Spec):
    """An input or output of a program; a string in `shape` names a dynamic dimension of `dims`."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class MethodSpec(Spec):
    """One method: inputs in call order, outputs in order, the inclusive range of every dynamic dimension.

    `function` is its name in the file where that differs from the method's; `write_first` and `logits` are those of its
    `ProgramKind`.
    """

    function: str | None = None
    write_first: bool
    logits: Logits
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: dict[str, tuple[int, int]]
    mutates: tuple[str, ...]


class ProgramSpec(Spec):
    """One program, a file or a directory of the bundle. `format` selects the loader.

    `options` are the format's section of the config; `weights` says in words how weights are stored, `recipe` how each
    of them is. `states` is the state it takes, in the `layout` of the format. `operators` are those it uses; of an
    ExecuTorch program, those outside every delegate. `max_kl_divergence`, in nats, is the ceiling of its mean KL
    divergence from the float model, `quality` what was seen beside it on texts of several domains; None where no preset
    promises anything.
    """

    format: str
    file: str
    options: dict[str, Any]
    weights: str
    recipe: Recipe
    layout: Layout
    max_kl_divergence: float
    quality: Quality | None = None
    states: tuple[StateSpec, ...]
    methods: dict[str, MethodSpec]
    runtime: str
    operators: tuple[str, ...]

    @property
    def rounded(self) -> bool:
        """Whether weights or activations are rounded at all."""
        return not self.recipe.is_float32

    @property
    def scaled_states(self) -> bool:
        """Whether the values of states are not those of the model it came from, because factors were moved between its
        layers."""
        return self.recipe.smooth


class SourceSpec(Spec):
    """Where the weights came from: `files` maps a file's name (never its path) to its SHA-256."""

    kind: Literal["safetensors", "gguf"]
    name: str
    license: str | None
    files: dict[str, str]


class TokenizerSpec(Spec):
    """What generation needs to know. Each of `eos_token_ids` ends it."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    has_chat_template: bool

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """`ids` of a text as the model wants them: with exactly one BOS, or unchanged. A text (a rendered chat
        template) may begin with its own BOS."""
        bos = self.bos_token_id
        if self.add_bos and bos is not None and list(ids[:1]) != [bos]:
            return [bos, *ids]
        return list(ids)


class CheckResult(Spec):
    """One line of the graph contract: `program` is a method's name, `evidence` what was seen in the graph, `form`
    whether that was the traced program or the file. One that did not pass is an error, or where it is a matter of cost
    and nobody demanded better, a warning."""

    format: str = ""
    form: Literal["traced", "file"] = "file"
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
"""References of a comparison at export: the model that was traced and, where that rounds, the float model."""


class Comparison(Spec):
    """How far a program was from a reference on the same tokens. `positions` counts compared rows of logits,
    `largest_logit` is the largest magnitude in the reference's.

    KL divergence is that of the program's next-token distribution from the reference's, in nats, `nll` the mean
    negative log-likelihood of the true next tokens. `max_state_error` is that of the row `worst_state` and
    `mean_state_error` that of the worst head's rows, as ``verification.states.StateErrors`` has them. Without a
    `format` what was compared is no program but the float model that all of them are made of.
    """

    format: str | None
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

    Code that runs or checks one program takes the manifest `of` its format, which has no other program. `not_compared`
    says why the float model was not compared with Transformers at export; None if it was.
    """

    version: int = MANIFEST_VERSION
    name: str
    created: str
    model: ModelSpec
    cache: CachePolicy
    max_context_length: int
    max_prefill_chunk: int
    dtype: DType
    source: SourceSpec
    tokenizer: TokenizerSpec
    programs: tuple[ProgramSpec, ...]
    graph_checks: tuple[CheckResult, ...]
    verification: tuple[Comparison, ...]
    not_compared: str | None = None
    versions: dict[str, str]
    files: dict[str, FileEntry]

    def of(self, format: str) -> Manifest:
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
        """That program's difference from the float model at export; None if they were not compared."""
        by_reference = {comparison.reference: comparison for comparison in self.verification}
        return by_reference.get(FLOAT, by_reference.get(EAGER))

    @property
    def is_quantized(self) -> bool:
        """Whether that program rounds: weights or activations, or the rows of its caches."""
        return self.program.rounded or any(state.dtype != "float32" for state in self.states)

    def with_states(self, states: Sequence[StateSpec]) -> Manifest:
        """The same program over other states."""
        return self.model_copy(update={"programs": (self.program.model_copy(update={"states": tuple(states)}),)})

    def with_float_caches(self) -> Manifest:
        """The same program over float32 caches."""
        cache = self.cache.model_copy(update={"dtype": "float32", "global_dtype": None})
        states = state_specs(self.model, cache, self.max_context_length, self.program.layout, "float32")
        return self.model_copy(update={"cache": cache}).with_states(states)
