"""LEAF: the texts that quality is judged on, and what a program says of them beside the float model."""
