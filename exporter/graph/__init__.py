"""The machine-checked contract of traced programs: what they write, where, in which order, and from what.

What is special to a file format is in the folder of that format.
"""

from exporter.graph.checks_export import check_exported
from exporter.graph.contract import FileLimits, ProgramContract, refuse_failed
from exporter.graph.provenance import Provenance

__all__ = ["FileLimits", "ProgramContract", "Provenance", "check_exported", "refuse_failed"]
