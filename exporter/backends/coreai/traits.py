"""LEAF: what is true of Core AI's format."""

from exporter.backends.base import Effort, FormatTraits
from exporter.backends.coreai.options import CoreAIOptions
from exporter.spec.checks import FILE_CHECKS, FLOW_CHECKS

TRAITS = FormatTraits(
    name="coreai",
    title="Core AI",
    file="model.aimodel",
    options=CoreAIOptions,
    layout="stacked",
    ids_dtype="int32",
    state_dtype="float32",
    cache_dtypes=("float32", "float16"),
    decoder_is_rounded=False,
    checks=(
        *(name for name in FLOW_CHECKS if name not in {"no_scalar_read_from_data", "no_tensor_remainder"}),
        *FILE_CHECKS, "writes_land_on_their_rows",
    ),
    self_describing=True,
    effort=Effort(700, 32, (512,), tail=64),  # its interpreter takes as long for a token as for a chunk of 61
    distributions=("coreai-core", "coreai-torch", "coreai-opt"),
    extra="coreai",
    platforms="macOS and for Linux on x86-64 with glibc 2.34",
)  # fmt: skip
