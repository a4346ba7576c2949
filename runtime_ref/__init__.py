"""Runs exported bundles on this machine: the caller's half of the exporter, with its state and its limits."""

from runtime_ref.session import Session, load

__all__ = ["Session", "load"]
