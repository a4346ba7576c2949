"""The memory of the caller's state, by kind of layer, computed from the manifest. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.errors import RuntimeLimitError
from exporter.lengths import usual_contexts
from exporter.spec import KINDS, Manifest, StateSpec


@dataclass(frozen=True)
class KindUsage:
    """The state of all layers of one kind. `rows` are those of one layer (the largest, where they differ)."""

    kind: str
    layers: int
    rows: int
    allocated_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class ContextCost:
    """Bytes allocated after `tokens` tokens, and what they would be if every attention layer kept all of them."""

    tokens: int
    allocated_bytes: int
    full_bytes: int


def usage(states: Sequence[StateSpec], rows: Sequence[int], used_rows: Sequence[int]) -> tuple[KindUsage, ...]:
    """Sum up `states`, of which state i has ``rows[i]`` rows allocated and ``used_rows[i]`` in use."""
    entries = list(zip(states, rows, used_rows, strict=True))
    report = []
    for kind in KINDS.values():
        own = [entry for entry in entries if entry[0].kind == kind.name]
        if own:
            report.append(
                KindUsage(
                    kind=kind.label,
                    layers=len({layer for spec, _, _ in own for layer in spec.layers}),
                    rows=max(allocated for _, allocated, _ in own),
                    allocated_bytes=sum(spec.bytes(allocated) for spec, allocated, _ in own),
                    used_bytes=sum(spec.bytes(used) for spec, _, used in own),
                )
            )
    return tuple(report)


def planned_usage(manifest: Manifest, tokens: int) -> tuple[KindUsage, ...]:
    """The usage of a conversation that has reached `tokens` tokens without a rewind.

    Raises:
        RuntimeLimitError: `tokens` is negative or beyond the context.
    """
    if not 0 <= tokens <= manifest.max_context_length:
        raise RuntimeLimitError(
            "memory",
            got=f"{tokens} tokens",
            expected=f"0 to {manifest.max_context_length}, the bundle's context",
            repair="Ask for a length the bundle can reach, or export it with a longer context.",
        )
    rows = [planned_rows(manifest, spec, tokens) for spec in manifest.states]
    used = [spec.cache_kind.used_rows(spec, tokens, tokens) for spec in manifest.states]
    return usage(manifest.states, rows, used)


def planned_rows(manifest: Manifest, spec: StateSpec, tokens: int) -> int:
    """The rows of one state after `tokens` tokens: one that grows does so by the steps of the bundle's policy, the
    others are at their `max_rows` from the start."""
    return manifest.cache.grown_rows(spec.rows, tokens, spec.max_rows)


def context_costs(manifest: Manifest, contexts: Sequence[int] | None = None) -> tuple[ContextCost, ...]:
    """The cost of each of `contexts`; None means the usual ones within the bundle's limit, and the limit itself.

    Raises:
        RuntimeLimitError: a context beyond the bundle's.
    """
    costs = []
    for tokens in usual_contexts(manifest.max_context_length) if contexts is None else contexts:
        allocated = sum(kind.allocated_bytes for kind in planned_usage(manifest, tokens))
        full = sum(spec.bytes(spec.cache_kind.full_rows(spec.rows, tokens)) for spec in manifest.states)
        costs.append(ContextCost(tokens=tokens, allocated_bytes=allocated, full_bytes=full))
    return tuple(costs)
