"""Which tensors the caller owns: the states of a model, in the order and layout in which a program takes them."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.data import DType
from exporter.errors import ConfigError
from exporter.kinds import KINDS, CacheKind, CachePolicy, Layout, StateSpec, kind_of
from exporter.spec.model import ModelSpec


def state_specs(
    model: ModelSpec, policy: CachePolicy, max_context_length: int, layout: Layout = "per_layer",
    dtype: DType | None = None,
) -> tuple[StateSpec, ...]:  # fmt: skip
    """The state of `model` in the order in which programs take it: layer by layer, those of a layer in the order of
    its kind's roles. `dtype` is that of every state; None means the policy's.

    Raises:
        ConfigError: ``stacked`` over int8, or over layers of one kind whose rows differ.
    """
    states: list[StateSpec] = []
    for index, layer in enumerate(model.layers):
        for form in layer.mixer.forms(model.hidden_size):
            kind = kind_of(form.kind)
            rows = kind.rows(form, policy, max_context_length, layout)
            states += kind.states(index, form, rows, dtype or kind.dtype(policy))
    return laid_out(states, layout)


def laid_out(states: Sequence[StateSpec], layout: Layout) -> tuple[StateSpec, ...]:
    """The states of single layers as programs of that layout take them. Raises as `state_specs`."""
    if layout == "static":
        return tuple(state.model_copy(update={"static": True}) for state in states)
    return _stacked(states) if layout == "stacked" else tuple(states)


def stack_name(kind: CacheKind, role: str) -> str:
    """What a tensor of all layers of a kind is called: ``slidingKeyCache``."""
    words = "".join(word.capitalize() for word in role.removesuffix("s").split("_"))
    return f"{kind.label}{words}Cache"


def _stacked(states: Sequence[StateSpec]) -> tuple[StateSpec, ...]:
    """`states` of equal kind and role as one, those that grow before the others."""
    stacks = []
    for kind in sorted(KINDS.values(), key=lambda kind: not kind.grows):
        for role in kind.roles:
            own = [state for state in states if (state.kind, state.role) == (kind.name, role)]
            forms = {(state.rows, state.row_shape, state.dtype) for state in own}
            name = stack_name(kind, role)
            if len(forms) > 1 or any(state.dtype == "int8" for state in own):
                raise ConfigError(
                    f"states {name}",
                    got="; ".join(f"{rows} rows of {shape} {dtype}" for rows, shape, dtype in sorted(forms)),
                    expected="one float shape for all layers of a kind: they share one tensor in this format",
                    repair="Leave this target out for this model, or use float caches.",
                )
            if own:
                layers = tuple(layer for state in own for layer in state.layers)
                stacks.append(own[0].model_copy(update={"name": name, "layers": layers}))
    return tuple(stacks)
