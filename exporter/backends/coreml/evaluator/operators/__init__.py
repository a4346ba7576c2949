"""The operators that the evaluator knows, each written from its documented definition (MIL opset iOS 18)."""

from exporter.backends.coreml.evaluator.operators import (  # noqa: F401  (importing a module declares its operators)
    activations,
    elementwise,
    products,
    reductions,
    shapes,
    slices,
)
from exporter.backends.coreml.evaluator.operators.compression import CONSTEXPR
from exporter.backends.coreml.evaluator.operators.registry import OPERATORS, Operator

__all__ = ["CONSTEXPR", "OPERATORS", "Operator"]
