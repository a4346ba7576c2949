"""From what a config says of weights and the shapes of a model to the recipe of a program.

This is the one place that reads the options: everything after it reads the recipe. Matrices are the weights of linears
and embeddings, which are the parameters of two axes called ``.weight``. Routers of experts and experts' stacked weights
stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from exporter.errors import ConfigError
from exporter.grids import grid, names
from exporter.spec import (
    EMBEDDING,
    HEAD,
    PRESETS,
    ExactRows,
    GridSpec,
    ParameterSpec,
    QuantizationSpec,
    Recipe,
    ReducedWeights,
    dtype_bits,
    keep_int8_by_default,
)

if TYPE_CHECKING:
    from exporter.grids.base import Grid

Shapes = Mapping[str, tuple[int, ...]]
"""Of the parameters of a model; a tied head is none of its own (`model.decoder.parameter_shapes`)."""
Carries = Callable[["Grid"], bool]
"""Whether the programs of a format can have matrices on a grid other than float32."""

BLOCK = 32
"""Input channels of a group, where the config does not say."""
ROWS_AN_EXACT_ONE = 32
"""At most one row of a head in so many is multiplied again: to find more, one may as well sort all."""
LEAST_SIZE = 1024
"""Smaller matrices stay as they are where reducing them adds an operator: what is saved is not worth it."""
FLOAT32 = GridSpec(grid="float32", codes="float32")


def decoder_recipe(
    spec: QuantizationSpec, shapes: Shapes, tied: bool, *, owner: str, carries: Carries, scales: Callable[[Grid], str]
) -> Recipe:
    """The recipe of a program whose decoder is quantised before it is traced: the linears of the layers, embedding and
    head, as `QuantizationSpec` says.

    Args:
        spec: the rules.
        shapes: of the model's parameters.
        tied: whether the head is the embedding.
        owner: where the rules stand in the config.
        carries: what the format can have.
        scales: the dtype in which the format keeps the scales of a linear on a grid.

    Raises:
        ConfigError: the format does not carry a grid, `group_size` does not divide a quantised weight's input
            channels, or `keep_int8` names nothing. A model need not have what a preset names.
    """
    linear, head = (
        _carried(word, f"{owner}.{key}", carries) for key, word in (("linear", spec.linear), ("head", spec.head))
    )
    embedding = _carried(spec.embedding, f"{owner}.embedding", lambda own: carries(own) or own.name == "int8_grouped")
    kept = {name: ParameterSpec(shape=shape, part=FLOAT32) for name, shape in shapes.items()}
    if linear is not None:
        linears = [name for name in _matrices(shapes) if name.startswith("layers.")]
        _refuse_idle(
            () if spec in PRESETS.values() else spec.keep_int8, linears, f"{owner}.keep_int8",
            "a part of a linear's name, such as 'down_proj' or 'layers.0.mixer.v_proj'",
            "Names are `layers.N.mixer.{q,k,v,o}_proj` and `layers.N.feed_forward.{gate,up,down}_proj`.",
        )  # fmt: skip
        for name in linears:
            own = grid("int8") if _names(spec.keep_int8, name) else linear
            _check_group(own, shapes[name], name.removesuffix(".weight"), spec.group_size, owner)
            part = own.spec(group_size=spec.group_size, scales=scales(own), gptq=spec.rounding == "gptq")
            kept[name] = ParameterSpec(shape=shapes[name], part=part)
    for name, table in (("embedding", embedding), ("lm_head", head)):
        if table is not None:
            _check_group(table, shapes[EMBEDDING], name, spec.group_size, owner)
    if spec.head_exact_rows:
        _check_group(grid("int8_grouped"), shapes[EMBEDDING], "the exact rows of lm_head", spec.group_size, owner)
    kept |= _tables(spec, embedding, head, shapes[EMBEDDING], tied=tied, scales=scales)
    return Recipe.of(kept, smooth=spec.smooth)


def _tables(
    spec: QuantizationSpec, embedding: Grid | None, head: Grid | None, shape: tuple[int, ...], *, tied: bool,
    scales: Callable[[Grid], str],
) -> dict[str, ParameterSpec]:  # fmt: skip
    """Embedding and head: tied, and the head as fine as the embedding is asked to be, they are stored once."""
    own = FLOAT32 if head is None else head.spec(
        group_size=spec.group_size, scales=scales(head), gptq=spec.rounding == "gptq"
    )  # fmt: skip
    table = FLOAT32 if embedding is None else embedding.spec(group_size=spec.group_size, scales=scales(embedding))
    shared = tied and (head is None) == (embedding is None) and _as_fine(own, table)
    exact = None
    if spec.head_exact_rows:
        rows = grid("int8_grouped")
        part = rows.spec(group_size=spec.group_size, scales=scales(rows))
        count = min(spec.head_exact_rows, max(shape[0] // ROWS_AN_EXACT_ONE, 1))
        exact = ExactRows(count=count, part=part, of=EMBEDDING if tied and table == part else None)
    return {
        HEAD: ParameterSpec(shape=shape, part=own, exact=exact),
        EMBEDDING: _embedding(shape, None if shared else table, tied, shared),
    }


def _as_fine(head: GridSpec, embedding: GridSpec) -> bool:
    """Whether a head is good enough for an embedding: more bits, or as many and a scale of no more weights."""
    bits, asked = dtype_bits(head.codes), dtype_bits(embedding.codes)
    return bits > asked or (bits == asked and (head.group_size is not None or embedding.group_size is None))


def matrices_recipe(
    options: ReducedWeights, shapes: Shapes, tied: bool, *, owner: str, carries: Carries, scales: str,
    floats: Callable[[str], GridSpec] = lambda name: FLOAT32, words: Mapping[str, str] | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of a program whose back end reduces the matrices of a float decoder while it converts.

    A matrix one of whose names contains one of `keep_int8` has 8 bits, and so has one whose rows are no whole number
    of groups.

    Args:
        options: the rules.
        shapes: of the model's parameters.
        tied: whether the head is the embedding.
        owner: where the rules stand in the config.
        carries: what the format can have.
        scales: the dtype in which the format keeps scales.
        floats: the form of what is left alone, by its name.
        words: grids that `weights` calls otherwise in this format.

    Raises:
        ConfigError: the format does not carry the grid, or `keep_int8` names nothing. The default need not.
    """
    chosen = _carried((words or {}).get(options.weights, options.weights), f"{owner}.weights", carries)
    matrices = _matrices(shapes)
    if options.keep_int8 != keep_int8_by_default(options.weights):
        _refuse_idle(
            options.keep_int8, [*matrices, HEAD], f"{owner}.keep_int8",
            "a part of a matrix's name, such as 'down_proj', 'layers.0.mixer.v_proj' or 'lm_head'",
            "Names are `embed_tokens`, `lm_head`, `layers.N.mixer.{q,k,v,o}_proj` and "
            "`layers.N.feed_forward.{gate,up,down}_proj`.",
        )  # fmt: skip
    kept = {name: ParameterSpec(shape=shape, part=floats(name)) for name, shape in shapes.items()}
    if chosen is not None:
        for name in (name for name in matrices if math.prod(shapes[name]) >= LEAST_SIZE):
            aliases = (name, HEAD) if tied and name == EMBEDDING else (name,)
            eight = any(_names(options.keep_int8, alias) for alias in aliases)
            own = grid("int8") if eight or not chosen.fits(shapes[name], BLOCK) else chosen
            kept[name] = ParameterSpec(shape=shapes[name], part=own.spec(group_size=BLOCK, scales=scales))
    if tied:
        kept[HEAD] = kept[EMBEDDING]
    kept[EMBEDDING] = _embedding(shapes[EMBEDDING], None if tied else kept[EMBEDDING].part, tied, shared=tied)
    return Recipe.of(kept)


def _embedding(shape: tuple[int, ...], part: GridSpec | None, tied: bool, shared: bool) -> ParameterSpec:
    return ParameterSpec(shape=shape, part=part, gathered=True, tied_to=HEAD if tied else None, shared=shared)


def _matrices(shapes: Shapes) -> list[str]:
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith("router.weight")
    ]


def _names(patterns: Sequence[str], name: str) -> bool:
    """Whether one of them is a part of a module's name."""
    return any(pattern in name.removesuffix(".weight") for pattern in patterns)


def _refuse_idle(patterns: Sequence[str], matrices: Sequence[str], owner: str, expected: str, repair: str) -> None:
    """Raises ConfigError: a pattern that names none of `matrices`."""
    for pattern in patterns:
        if not any(_names([pattern], name) for name in matrices):
            raise ConfigError(owner, got=repr(pattern), expected=expected, repair=repair)


def _check_group(own: Grid, shape: tuple[int, ...], name: str, group_size: int, owner: str) -> None:
    """Raises ConfigError: `group_size` does not divide the input channels."""
    if not own.fits(shape, group_size):
        raise ConfigError(
            f"{owner}.group_size",
            got=f"{group_size} for {name} with {shape[-1]} input channels",
            expected="a divisor of the input channels",
            repair="Choose a smaller group_size, or int8, which has no groups.",
        )


def _carried(word: str, owner: str, carries: Carries) -> Grid | None:
    """The grid that a config asks for; None where weights are left as they are.

    Raises:
        ConfigError: the format has no matrices on it.
    """
    if word in ("none", "float32"):
        return None
    found = grid(word)
    if not carries(found):
        able = [name for name in names() if carries(grid(name))]
        raise ConfigError(
            owner, got=repr(word), expected=f"a grid that the format carries: {', '.join(able)}",
            repair="Choose one of those.",
        )  # fmt: skip
    return found
