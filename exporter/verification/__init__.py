"""A program is run and compared with the model it came from: the only part that runs bundles and builds eager models
beside them (docs/verification.md).

`runs` makes a model say what it says, `eager` has the models, `compare` and `states` lay two runs side by side,
`transformers` and `by_parts` have the reference of another origin, `judge` refuses.
"""

from exporter.spec import EAGER, FLOAT
from exporter.verification.by_parts import compare_model_with_transformers
from exporter.verification.compare import (
    BASELINE,
    LAYERS,
    RECORDED,
    REFERENCE_FILE,
    TRANSFORMERS,
    Differences,
    compare_with_eager,
    compare_with_recorded,
    write_reference,
)
from exporter.verification.eager import eager_runs, run_decoder
from exporter.verification.judge import check_same_source, judge
from exporter.verification.runs import (
    Calls,
    Run,
    eager_session,
    english_calls,
    open_session,
    run,
    run_by_layers,
)
from exporter.verification.states import state_errors
from exporter.verification.transformers import (
    NoReference,
    TransformersReference,
    compare_with_transformers,
)

__all__ = [
    "BASELINE",
    "EAGER",
    "FLOAT",
    "LAYERS",
    "RECORDED",
    "REFERENCE_FILE",
    "TRANSFORMERS",
    "Calls",
    "Differences",
    "NoReference",
    "Run",
    "TransformersReference",
    "check_same_source",
    "compare_model_with_transformers",
    "compare_with_eager",
    "compare_with_recorded",
    "compare_with_transformers",
    "eager_runs",
    "eager_session",
    "english_calls",
    "judge",
    "open_session",
    "run",
    "run_by_layers",
    "run_decoder",
    "state_errors",
    "write_reference",
]
