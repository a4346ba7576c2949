"""LEAF: the names of the graph checks; docs/graph-contract.md says what each proves.

A format's traits list those of its files.
"""

from exporter.kinds import KINDS

FLOW_CHECKS = (
    *(kind.index_check for kind in KINDS.values() if kind.positional),
    *dict.fromkeys(kind.order_check(write_first) for kind in KINDS.values() for write_first in (False, True)),
    "write_index_is_definition", "mutated_inputs_exactly_states", "no_scalar_read_from_data", "no_tensor_remainder",
    "finite_constants", "dynamic_ranges", "last_token_logits_only",
)  # fmt: skip
"""Checks of traced programs and of files."""
TRACED_CHECKS = (*FLOW_CHECKS, "writes_land_on_their_rows")
"""Checks of a traced program."""
FILE_CHECKS = ("no_whole_state_copy", "weights_stored_once")
"""Checks of files alone, in every format."""
