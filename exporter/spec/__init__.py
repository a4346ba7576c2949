"""LEAF: the vocabulary every part shares. It imports no torch, and of the other parts the leafs `data`, `errors` and
`kinds`, whose words it passes on.

`ModelSpec` says what a model computes, layer by layer; `StateSpec` says which tensors the caller owns; `Manifest` is
what a bundle says of itself.

Letters: B batch (always 1), Q query_len, S seq_len, C capacity (rows of a ring), W window, H heads, K KV heads,
D head_dim.
"""

from exporter.data import DTYPE_BYTES, DType, Spec
from exporter.kinds import (
    KINDS,
    CacheKind,
    CachePolicy,
    Layout,
    MixerSpec,
    StateSpec,
    dtypes_in_words,
    kind_labelled,
    kind_of,
    one_of,
)
from exporter.kinds.attention import AttentionSpec, RopeSpec
from exporter.kinds.conv import ShortConvSpec
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
from exporter.spec.model import Activation, LayerSpec, MLPSpec, ModelSpec, MoESpec
from exporter.spec.programs import MAIN, PREFILL, PROGRAMS, ProgramKind, program_for
from exporter.spec.quality import DomainScore, Quality, QualityPromise
from exporter.spec.quantization import (
    CACHE_PROMISES,
    PRESETS,
    PROMISES,
    QUALITY_PROMISES,
    REDUCED_PROMISES,
    SENSITIVE,
    FormatOptions,
    Promise,
    QuantizationSpec,
    ReducedWeights,
    keep_int8_by_default,
    nearest_preset,
    promise_of,
)
from exporter.spec.recipe import EMBEDDING, HEAD, ExactRows, GridSpec, ParameterSpec, Recipe, WeightBits, dtype_bits
from exporter.spec.states import laid_out, stack_name, state_specs

__all__ = [
    "CACHE_PROMISES",
    "DTYPE_BYTES",
    "EAGER",
    "EMBEDDING",
    "FLOAT",
    "HEAD",
    "KINDS",
    "MAIN",
    "MANIFEST_VERSION",
    "PREFILL",
    "PRESETS",
    "PROGRAMS",
    "PROMISES",
    "QUALITY_PROMISES",
    "REDUCED_PROMISES",
    "SENSITIVE",
    "Activation",
    "AttentionSpec",
    "CacheKind",
    "CachePolicy",
    "CheckResult",
    "Comparison",
    "DType",
    "DomainScore",
    "ExactRows",
    "FileEntry",
    "FormatOptions",
    "GridSpec",
    "LayerSpec",
    "Layout",
    "MLPSpec",
    "Manifest",
    "MethodSpec",
    "MixerSpec",
    "MoESpec",
    "ModelSpec",
    "ParameterSpec",
    "ProgramKind",
    "ProgramSpec",
    "Promise",
    "Quality",
    "QualityPromise",
    "QuantizationSpec",
    "Recipe",
    "ReducedWeights",
    "RopeSpec",
    "ShortConvSpec",
    "SourceSpec",
    "Spec",
    "StateSpec",
    "TensorSpec",
    "TokenizerSpec",
    "WeightBits",
    "dtype_bits",
    "dtypes_in_words",
    "keep_int8_by_default",
    "kind_labelled",
    "kind_of",
    "laid_out",
    "nearest_preset",
    "one_of",
    "program_for",
    "promise_of",
    "stack_name",
    "state_specs",
]
