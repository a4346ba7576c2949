"""LEAF: the vocabulary every part shares. It imports neither torch nor any other part but the errors.

`ModelSpec` says what a model computes, layer by layer; `StateSpec` says which tensors the caller owns; `Manifest` is
what a bundle says of itself.

Letters: B batch (always 1), Q query_len, S seq_len, C capacity (rows of a ring), W window, H heads, K KV heads,
D head_dim.
"""

from exporter.spec.base import DTYPE_BYTES, DType, Spec
from exporter.spec.manifest import (
    IDS_DTYPES,
    LAYOUTS,
    MANIFEST_VERSION,
    PRESETS,
    STATE_DTYPES,
    CheckResult,
    Comparison,
    CoreAIOptions,
    CoreMLOptions,
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
from exporter.spec.states import (
    SCALES,
    STACKED_NAMES,
    CachePolicy,
    Layout,
    StateRole,
    StateSpec,
    cache_states,
    stacked,
    state_name,
    state_specs,
)

__all__ = [
    "DTYPE_BYTES",
    "IDS_DTYPES",
    "LAYOUTS",
    "MANIFEST_VERSION",
    "PRESETS",
    "SCALES",
    "STACKED_NAMES",
    "STATE_DTYPES",
    "Activation",
    "AttentionSpec",
    "CachePolicy",
    "CheckResult",
    "Comparison",
    "CoreAIOptions",
    "CoreMLOptions",
    "DType",
    "FileEntry",
    "Format",
    "LayerSpec",
    "Layout",
    "MLPSpec",
    "Manifest",
    "MethodSpec",
    "MoESpec",
    "ModelSpec",
    "ProgramSpec",
    "QuantizationSpec",
    "RopeSpec",
    "ShortConvSpec",
    "SourceSpec",
    "Spec",
    "StateRole",
    "StateSpec",
    "TensorSpec",
    "TokenizerSpec",
    "cache_states",
    "stacked",
    "state_name",
    "state_specs",
]
