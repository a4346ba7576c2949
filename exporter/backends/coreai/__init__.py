"""Core AI: an `.aimodel` with the functions prefill and main over the caller's stacked states."""

from exporter.backends.coreai.build import VERSIONS, build, kernels
from exporter.backends.coreai.checks import check_file
from exporter.backends.coreai.description import describe

__all__ = ["VERSIONS", "build", "check_file", "describe", "kernels"]
