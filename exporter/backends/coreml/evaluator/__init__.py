"""A saved Core ML package (`.mlpackage`, ML program, iOS 18), evaluated here operator by operator.

No part of the converter is used: the package is read from its files (`package`, `blob`), and every operator has a
kernel written from its documented definition (`operators`). So a package that agrees with its model here was converted
and saved correctly.

What is modelled:

- Every value has its declared type. A float16 operator computes in float32 from float16 arguments and rounds its result
  once, to nearest even; that holds for a matrix product with its bias, a softmax, a normalisation, an attention or an
  activation as a whole. Sums of products are added in float32, in the library's order.
- Integers wrap, conversions to integers truncate, and where a definition leaves a result open (an index out of range,
  an integer quotient that is not whole) the run stops with an error that names the operator.
- States are the caller's tensors, written in place as `read_state` and `write_state` order it (`states`).

What only a device can tell: its own rounding inside an operator (the neural engine may add in float16), fusion of
operators, and speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exporter.backends.coreml.evaluator.function import Function
from exporter.backends.coreml.evaluator.operators import OPERATORS
from exporter.backends.coreml.evaluator.package import open_package
from exporter.backends.coreml.evaluator.program_text import read_function
from exporter.backends.coreml.evaluator.values import Constant, ConstantStore


def load_functions(path: Path, names: Sequence[str] | None = None) -> dict[str, Function]:
    """The functions of the package at `path` (those of `names`, or all), ready to run, over one copy of the weights.

    Raises:
        BundleError: no package, a damaged one, or one that holds something the evaluator cannot run.
        MissingPackageError: coremltools, which brings the format's message classes, is not installed.
    """
    package = open_package(path)
    store = ConstantStore(package)
    texts = []
    for name in sorted(package.functions) if names is None else names:
        if name not in package.functions:
            raise package.error(got=f"functions {sorted(package.functions)}", expected=f"a function {name}")
        texts.append(read_function(package, name, store))
    for text in texts:
        for operation in text.operations:
            operator = OPERATORS.get(operation.type)
            for parameter in operator.multiplied & operation.inputs.keys() if operator else ():
                reference = operation.one(parameter)
                if isinstance(reference, Constant):
                    store.widen(reference)
    return {text.name: Function(package, text, store) for text in texts}
