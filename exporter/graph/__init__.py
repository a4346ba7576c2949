"""The machine-checked contract of exported programs: what they write, where, in which order, and from what."""

from exporter.graph.checks_export import check_exported
from exporter.graph.checks_lowered import check_lowered, runtime_registry
from exporter.graph.contract import ProgramContract, assert_graph_contract
from exporter.graph.provenance import Provenance
from exporter.graph.pte_plan import PteFile, read_pte
from exporter.graph.weights import StoredWeights, stored_weights

__all__ = [
    "ProgramContract",
    "Provenance",
    "PteFile",
    "StoredWeights",
    "assert_graph_contract",
    "check_exported",
    "check_lowered",
    "read_pte",
    "runtime_registry",
    "stored_weights",
]
