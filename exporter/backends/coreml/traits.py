"""LEAF: what is true of Core ML's format."""

from exporter.backends.base import Effort, FormatTraits
from exporter.backends.coreml.options import CoreMLOptions
from exporter.spec.checks import FILE_CHECKS, FLOW_CHECKS

TRAITS = FormatTraits(
    name="coreml",
    title="Core ML",
    file="model.mlpackage",
    options=CoreMLOptions,
    layout="static",
    ids_dtype="int32",
    state_dtype="float16",
    cache_dtypes=("float32", "float16"),
    decoder_is_rounded=False,
    checks=(
        *(name for name in FLOW_CHECKS if name not in {"no_scalar_read_from_data", "no_tensor_remainder"}),
        *FILE_CHECKS, "states_as_declared", "exact_index_arithmetic",
    ),
    self_describing=True,
    effort=Effort(700, 32, (1, 512)),  # interpreted here
    distributions=("coremltools",),
    extra="coreml",
    platforms="macOS and for Linux on x86-64",
)  # fmt: skip
