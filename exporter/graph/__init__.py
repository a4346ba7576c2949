"""The machine-checked contract of exported programs: what they write, where, in which order, and from what."""

from exporter.graph.assertion import assert_graph_contract
from exporter.graph.checks_export import check_exported
from exporter.graph.checks_lowered import check_lowered, runtime_registry
from exporter.graph.contract import FileLimits, ProgramContract, refuse_failed
from exporter.graph.provenance import Provenance
from exporter.graph.pte_plan import PteFile, read_pte
from exporter.graph.weights import StoredWeights, stored_weights

__all__ = [
    "FileLimits",
    "ProgramContract",
    "Provenance",
    "PteFile",
    "StoredWeights",
    "assert_graph_contract",
    "check_exported",
    "check_lowered",
    "read_pte",
    "refuse_failed",
    "runtime_registry",
    "stored_weights",
]
