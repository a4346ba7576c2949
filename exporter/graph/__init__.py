"""The machine-checked contract of exported programs: what they write, where, in which order, and from what."""

from exporter.graph.checks_export import check_exported
from exporter.graph.contract import ProgramContract, assert_graph_contract
from exporter.graph.provenance import Provenance

__all__ = ["ProgramContract", "Provenance", "assert_graph_contract", "check_exported"]
