"""The operators that the evaluator knows, each written from its documented definition (MIL opset iOS 18)."""

from runtime_ref.programs.mlpackage.operators import (  # noqa: F401  (importing a module declares its operators)
    activations,
    elementwise,
    products,
    reductions,
    shapes,
    slices,
)
from runtime_ref.programs.mlpackage.operators.compression import CONSTEXPR
from runtime_ref.programs.mlpackage.operators.registry import OPERATORS, Operator

__all__ = ["CONSTEXPR", "OPERATORS", "Operator"]
