"""Core AI: an `.aimodel` with the functions prefill and main over the caller's stacked states.

Importing it without its packages raises MissingPackageError: they are an optional extra, and whoever asks for this
back end is to hear of it before any work is done.
"""

from exporter.backends.coreai.build import VERSIONS, beside, build, kernels
from exporter.backends.coreai.checks import check_file
from exporter.backends.coreai.description import describe
from exporter.backends.coreai.program import Asset as read_file
from exporter.optional import require

require(VERSIONS, "coreai")

__all__ = ["VERSIONS", "beside", "build", "check_file", "describe", "kernels", "read_file"]
