"""ExecuTorch: caches on its in-place operators, and the lowering to a `.pte`."""

from exporter.backends.executorch.cache import ExecutorchKernels
from exporter.backends.executorch.lower import lower

__all__ = ["ExecutorchKernels", "lower"]
