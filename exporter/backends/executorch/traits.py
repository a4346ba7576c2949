"""LEAF: what is true of ExecuTorch's format."""

from exporter.backends.base import Effort, FormatTraits
from exporter.backends.executorch.options import ExecutorchOptions
from exporter.spec.checks import FILE_CHECKS, FLOW_CHECKS

TRAITS = FormatTraits(
    name="executorch",
    title="ExecuTorch",
    file="model.pte",
    options=ExecutorchOptions,
    layout="per_layer",
    ids_dtype="int64",
    state_dtype=None,
    cache_dtypes=("float32", "float16", "int8"),
    decoder_is_rounded=True,
    checks=(
        *FLOW_CHECKS, *FILE_CHECKS, "operators_in_registry", "delegated_share", "planned_bytes", "file_bytes",
    ),
    limits=frozenset({
        "min_delegated_share", "max_planned_bytes", "max_file_bytes", "max_duplicate_share", "runtime",
        "allowed_operators",
    }),
    self_describing=False,
    effort=Effort(1500, 64, (1, 7, 64, 128, 512)),
    distributions=("executorch", "torchao"),
)  # fmt: skip
