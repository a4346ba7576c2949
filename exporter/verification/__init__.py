"""A program is run and compared with the model it came from: the only part that runs bundles and builds eager models
beside them (docs/verification.md).

`runs` makes a model say what it says, `eager` has the models, `compare` lays two runs side by side, `judge` refuses.
"""

from exporter.spec import EAGER, FLOAT
from exporter.verification.compare import (
    BASELINE,
    RECORDED,
    REFERENCE_FILE,
    TRANSFORMERS,
    Differences,
    compare_with_eager,
    compare_with_recorded,
    state_difference,
    write_reference,
)
from exporter.verification.eager import eager_runs, run_decoder
from exporter.verification.judge import baseline_divergence, check_same_source, judge
from exporter.verification.runs import (
    Calls,
    Run,
    bundle_ids,
    eager_session,
    long_schedule,
    open_session,
    run,
    run_by_layers,
    schedule,
)
from exporter.verification.transformers import EFFORT, TransformersReference, compare_with_transformers

__all__ = [
    "BASELINE",
    "EAGER",
    "EFFORT",
    "FLOAT",
    "RECORDED",
    "REFERENCE_FILE",
    "TRANSFORMERS",
    "Calls",
    "Differences",
    "Run",
    "TransformersReference",
    "baseline_divergence",
    "bundle_ids",
    "check_same_source",
    "compare_with_eager",
    "compare_with_recorded",
    "compare_with_transformers",
    "eager_runs",
    "eager_session",
    "judge",
    "long_schedule",
    "open_session",
    "run",
    "run_by_layers",
    "run_decoder",
    "schedule",
    "state_difference",
    "write_reference",
]
