"""LEAF: the names of the graph checks; docs/graph-contract.md says what each proves.

A format's traits list those of its files.
"""

FLOW_CHECKS = (
    "ring_write_index_from_shapes", "full_write_index_from_shapes", "write_index_is_definition",
    "prefill_reads_before_write", "main_writes_before_read", "full_writes_before_read", "conv_reads_before_write",
    "mutated_inputs_exactly_states", "no_scalar_read_from_data", "no_tensor_remainder", "finite_constants",
    "dynamic_ranges", "last_token_logits_only",
)  # fmt: skip
"""Checks of traced programs and of files."""
TRACED_CHECKS = (*FLOW_CHECKS, "writes_land_on_their_rows")
"""Checks of a traced program."""
FILE_CHECKS = ("no_whole_state_copy", "weights_stored_once")
"""Checks of files alone, in every format."""
