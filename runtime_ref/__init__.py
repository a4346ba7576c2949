"""Runs exported bundles on this machine: the caller's side, with its state and its limits."""

from runtime_ref.session import Session, load

__all__ = ["Session", "load"]
