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
    IDS_DTYPES,
    KEEP_INT8,
    LAYOUTS,
    MANIFEST_VERSION,
    PRESETS,
    STATE_DTYPES,
    AttentionKernels,
    CheckResult,
    Comparison,
    CoreAIOptions,
    CoreMLOptions,
    ExecutorchOptions,
    FileEntry,
    Format,
    Manifest,
    MethodSpec,
    ProgramSpec,
    QuantizationSpec,
    SourceSpec,
    TensorSpec,
    TokenizerSpec,
)
from exporter.spec.model import Activation, LayerSpec, MLPSpec, ModelSpec, MoESpec
from exporter.spec.states import laid_out, stack_name, state_specs

__all__ = [
    "DTYPE_BYTES",
    "EAGER",
    "FLOAT",
    "IDS_DTYPES",
    "KEEP_INT8",
    "KINDS",
    "LAYOUTS",
    "MANIFEST_VERSION",
    "PRESETS",
    "STATE_DTYPES",
    "Activation",
    "AttentionKernels",
    "AttentionSpec",
    "CacheKind",
    "CachePolicy",
    "CheckResult",
    "Comparison",
    "CoreAIOptions",
    "CoreMLOptions",
    "DType",
    "ExecutorchOptions",
    "FileEntry",
    "Format",
    "LayerSpec",
    "Layout",
    "MLPSpec",
    "Manifest",
    "MethodSpec",
    "MixerSpec",
    "MoESpec",
    "ModelSpec",
    "ProgramSpec",
    "QuantizationSpec",
    "RopeSpec",
    "ShortConvSpec",
    "SourceSpec",
    "Spec",
    "StateSpec",
    "TensorSpec",
    "TokenizerSpec",
    "dtypes_in_words",
    "kind_labelled",
    "kind_of",
    "laid_out",
    "one_of",
    "stack_name",
    "state_specs",
]
