"""LEAF: the vocabulary every part shares. It imports neither torch nor any other part but the errors.

`ModelSpec` says what a model computes, layer by layer; `StateSpec` says which tensors the caller owns; `Manifest` is
what a bundle says of itself.

Letters: B batch (always 1), Q query_len, S seq_len, C capacity (rows of a ring), W window, H heads, K KV heads,
D head_dim.
"""

from exporter.spec.base import DTYPE_BYTES, DType, Spec
from exporter.spec.manifest import (
    EAGER,
    FLOAT,
    MANIFEST_VERSION,
    CheckResult,
    Comparison,
    FileEntry,
    Manifest,
    MethodSpec,
    ProgramSpec,
    SourceSpec,
    TensorSpec,
    TokenizerSpec,
)
from exporter.spec.model import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    ShortConvSpec,
)
from exporter.spec.programs import MAIN, PREFILL, PROGRAMS, ProgramKind, program_for
from exporter.spec.quantization import (
    PRESETS,
    SENSITIVE,
    FormatOptions,
    QuantizationSpec,
    ReducedWeights,
    keep_int8_by_default,
)
from exporter.spec.recipe import EMBEDDING, HEAD, GridSpec, ParameterSpec, Recipe, WeightBits, dtype_bits
from exporter.spec.states import (
    SCALES,
    STACKED_NAMES,
    CachePolicy,
    Layout,
    StateRole,
    StateSpec,
    cache_states,
    laid_out,
    stacked,
    state_name,
    state_specs,
)

__all__ = [
    "DTYPE_BYTES",
    "EAGER",
    "EMBEDDING",
    "FLOAT",
    "HEAD",
    "MAIN",
    "MANIFEST_VERSION",
    "PREFILL",
    "PRESETS",
    "PROGRAMS",
    "SCALES",
    "SENSITIVE",
    "STACKED_NAMES",
    "Activation",
    "AttentionSpec",
    "CachePolicy",
    "CheckResult",
    "Comparison",
    "DType",
    "FileEntry",
    "FormatOptions",
    "GridSpec",
    "LayerSpec",
    "Layout",
    "MLPSpec",
    "Manifest",
    "MethodSpec",
    "MoESpec",
    "ModelSpec",
    "ParameterSpec",
    "ProgramKind",
    "ProgramSpec",
    "QuantizationSpec",
    "Recipe",
    "ReducedWeights",
    "RopeSpec",
    "ShortConvSpec",
    "SourceSpec",
    "Spec",
    "StateRole",
    "StateSpec",
    "TensorSpec",
    "TokenizerSpec",
    "WeightBits",
    "cache_states",
    "dtype_bits",
    "keep_int8_by_default",
    "laid_out",
    "program_for",
    "stacked",
    "state_name",
    "state_specs",
]
