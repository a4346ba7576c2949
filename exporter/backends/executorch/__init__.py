"""ExecuTorch: caches on its in-place operators, and the lowering to a `.pte`."""

from exporter.backends.executorch.cache import ExecutorchKernels, StockKernels
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.program import VERSIONS, beside, build, kernels

__all__ = ["VERSIONS", "ExecutorchKernels", "StockKernels", "beside", "build", "kernels", "lower"]
