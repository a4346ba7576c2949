"""Every cache kind against a replay of its rows, position after position.

Letters: C rows of a state, W window, n tokens in a conversation, M the most it ever had.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from exporter.kinds import KINDS, MIXERS, CachePolicy, CacheSettings, MixerSpec, StateForm, StateSpec, kind_of
from exporter.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, ShortConvSpec, state_specs

RING, FULL, CONV = KINDS["ring"], KINDS["full"], KINDS["conv"]


def ring_spec(window: int, slack: int = 0) -> StateSpec:
    form = StateForm(kind="ring", row_shape=(2, 4), rows=window)
    rows = RING.rows(form, CachePolicy(ring_slack=slack), 10**6, "per_layer")
    return RING.states(0, form, rows, "float32")[0]


def next_row(rows: int) -> Iterator[int]:
    """Where position 0, 1, 2, ... of a ring goes: one row after the other, from the first again after the last."""
    row = 0
    while True:
        yield row
        row = 0 if row + 1 == rows else row + 1


class Log:
    """A ring's rows as Python has them: the position each row holds."""

    def __init__(self, rows: int) -> None:
        self.held: list[int | None] = [None] * rows
        self.length = self.high_water = 0

    def row(self, position: int) -> int:
        rows = next_row(len(self.held))
        for _ in range(position):
            next(rows)
        return next(rows)

    def write(self, count: int) -> None:
        for position in range(self.length, self.length + count):
            self.held[self.row(position)] = position
        self.length += count
        self.high_water = max(self.high_water, self.length)

    def goes_back_to(self, length: int, window: int) -> bool:
        """Whether all that position `length` attends to before itself is still there."""
        return all(position in self.held for position in range(max(0, length - window + 1), length))


@settings(deadline=None, max_examples=200)
@given(
    window=st.integers(1, 6),
    slack=st.integers(0, 4),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
)
def test_a_ring_goes_back_exactly_as_far_as_its_rows_do(window: int, slack: int, steps: list[tuple[int, int]]) -> None:
    spec = ring_spec(window, slack)
    log = Log(spec.rows)
    for count, back in steps:
        log.write(count)
        earliest = RING.earliest(spec, log.length, log.high_water)
        for length in range(1, log.length + 1):
            assert log.goes_back_to(length, window) == (length >= earliest), length
        resident = [position for position in log.held if position is not None and position < log.length]
        assert RING.used_rows(spec, log.length, log.high_water) == len(resident)
        log.length = max(log.length - back, earliest, 1)


@given(rows=st.integers(1, 12), count=st.integers(0, 40))
def test_a_ring_is_written_row_after_row(rows: int, count: int) -> None:
    for position, row in zip(range(count), next_row(rows), strict=False):
        assert RING.row_of(position, rows) == row
        assert FULL.row_of(position, rows) == position
        assert CONV.row_of(position, rows) is None


def test_why_a_ring_goes_no_further() -> None:
    reason, repair = RING.lost(ring_spec(8, 2), 30)
    assert reason == "position 20 is the oldest still resident in the sliding layers"
    assert "ring_slack" in repair


@given(length=st.integers(1, 50), high_water=st.integers(1, 60), kernel_size=st.integers(2, 6))
def test_full_rows_are_all_there_and_a_convolution_has_lost_every_other_length(
    length: int, high_water: int, kernel_size: int
) -> None:
    high_water = max(length, high_water)
    (full, _) = FULL.states(0, StateForm(kind="full", row_shape=(1, 4)), FULL_ROWS, "float32")
    assert FULL.earliest(full, length, high_water) == 0
    assert FULL.used_rows(full, length, high_water) == FULL.kept_rows(full, length) == length
    (conv,) = conv_states(kernel_size)
    inputs = [-1] * conv.rows  # the newest last
    after = {0: tuple(inputs)}
    for position in range(high_water):
        inputs = [*inputs[1:], position]
        after[position + 1] = tuple(inputs)
    exact = [n for n in range(1, high_water + 1) if after[n] == after[high_water]]
    assert exact == [high_water] == [CONV.earliest(conv, high_water, high_water)]
    assert CONV.used_rows(conv, length, high_water) == sum(position >= 0 for position in after[length])
    assert CONV.kept_rows(conv, length) == conv.rows, "the oldest rows may be those that are empty"


FULL_ROWS = FULL.rows(StateForm(kind="full", row_shape=(1, 4)), CachePolicy(initial_rows=4), 64, "per_layer")


def conv_states(kernel_size: int) -> tuple[StateSpec, ...]:
    (form,) = ShortConvSpec(kernel_size=kernel_size).forms(16)
    return CONV.states(3, form, CONV.rows(form, CachePolicy(), 64, "per_layer"), "float32")


@pytest.mark.parametrize(
    ("policy", "context", "layout", "ring", "full"),
    [
        ({}, 64, "per_layer", (8, 8, 8), (64, 64, None)),
        ({"initial_rows": 16, "ring_slack": 3}, 64, "stacked", (11, 11, 8), (16, 64, None)),
        ({"initial_rows": 16, "ring_slack": 3}, 5, "per_layer", (8, 8, 5), (5, 5, None)),
        ({"initial_rows": 16}, 64, "static", (8, 8, 8), (64, 64, None)),
    ],
)
def test_how_many_rows(
    policy: dict[str, int], context: int, layout: str, ring: tuple[int, ...], full: tuple[int, ...]
) -> None:
    """Of a window of 8: rows at first and at most, and the window that is left of it."""
    forms = [StateForm(kind=name, row_shape=(1, 4), rows=rows) for name, rows in (("ring", 8), ("full", None))]
    got = [kind_of(form.kind).rows(form, CachePolicy(**policy), context, layout) for form in forms]
    assert got == [ring, full]
    assert CONV.rows(StateForm(kind="conv", row_shape=(4,), rows=2), CachePolicy(**policy), context, layout)[:2] == (
        2,
        2,
    )


@pytest.mark.parametrize(
    ("name", "rows", "planned", "full", "fills_at"),
    [
        ("ring", 8, [4, 8, 8], [4, 8, 20], 8),
        ("full", None, [4, 8, 20], [4, 8, 20], None),
        ("conv", 2, [2, 2, 2], [2, 2, 2], None),
    ],
)
def test_what_a_context_costs(
    name: str, rows: int | None, planned: list[int], full: list[int], fills_at: int | None
) -> None:
    """In rows, at contexts of 4, 8 and 20 tokens."""
    kind = KINDS[name]
    assert [kind.planned_rows(rows, 0, context) for context in (4, 8, 20)] == planned
    assert [kind.planned_rows(rows, 3, context) for context in (4, 8, 20)] == [count + 3 for count in planned]
    assert [kind.full_rows(rows, context) for context in (4, 8, 20)] == full
    assert kind.fills_at(rows) == fills_at
    if fills_at is not None:
        assert len({kind.planned_rows(rows, 0, context) for context in range(fills_at, fills_at + 9)}) == 1
        assert kind.planned_rows(rows, 0, fills_at - 1) < kind.planned_rows(rows, 0, fills_at)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("name", ["ring", "full"])
def test_keys_before_values_and_scales_behind_the_integers_they_scale(name: str, dtype: str) -> None:
    form = StateForm(kind=name, row_shape=(3, 5), rows=8 if name == "ring" else None)
    rows = KINDS[name].rows(form, CachePolicy(), 64, "per_layer")
    found = KINDS[name].states(7, form, rows, dtype)
    if dtype == "int8":
        assert [(s.name, s.row_shape, s.dtype, s.scales) for s in found] == [
            ("layer_7_keys", (3, 5), "int8", "layer_7_key_scales"),
            ("layer_7_key_scales", (3, 1), "float32", None),
            ("layer_7_values", (3, 5), "int8", "layer_7_value_scales"),
            ("layer_7_value_scales", (3, 1), "float32", None),
        ]
    else:
        assert [(s.name, s.row_shape, s.dtype, s.scales) for s in found] == [
            ("layer_7_keys", (3, 5), dtype, None), ("layer_7_values", (3, 5), dtype, None)
        ]  # fmt: skip
    assert {(s.kind, s.layers, s.rows, s.max_rows, s.window) for s in found} == {(name, (7,), *rows)}
    assert KINDS[name].row_bytes((3, 5), dtype) == sum(s.row_bytes for s in found)
    assert {s.role for s in found} <= set(KINDS[name].roles)


def test_a_convolution_has_one_state() -> None:
    (state,) = conv_states(4)
    assert (state.name, state.kind, state.shape(), state.dtype) == ("layer_3_inputs", "conv", (1, 3, 16), "float32")
    assert CONV.row_bytes((16,), "float16") == 32 and not state.grows


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ({}, ("float32", "float32", "float32")),
        ({"dtype": "int8"}, ("int8", "int8", "float32")),
        ({"dtype": "float16", "global_dtype": "int8"}, ("float16", "int8", "float32")),
    ],
)
def test_what_rows_are_kept_in(policy: dict[str, str], dtypes: tuple[str, ...]) -> None:
    settings: CacheSettings = CachePolicy.model_validate(policy)
    assert tuple(kind.dtype(settings) for kind in (RING, FULL, CONV)) == dtypes


ORDERS = {
    "ring": ("ring_reads_before_write", "ring_writes_before_read"),
    "full": ("full_writes_before_read", "full_writes_before_read"),
    "conv": ("conv_reads_before_write", "conv_reads_before_write"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_order_a_program_keeps(name: str) -> None:
    """Of a program that reads rings first, and of one that writes them first."""
    assert tuple(KINDS[name].order_check(write_first) for write_first in (False, True)) == ORDERS[name]
    assert bool(KINDS[name].wrong_order(True)) == bool(KINDS[name].wrong_order(False)) == (name == "ring")
    assert "write-first order" in RING.wrong_order(False) and "read-first order" in RING.wrong_order(True)


@pytest.mark.parametrize(("name", "rows"), [("ring", 8), ("full", 5), ("conv", 2)])
def test_what_a_file_has_after_five_tokens(name: str, rows: int) -> None:
    spec = {"ring": ring_spec(8), "full": full_spec(), "conv": conv_states(3)[0]}[name]
    assert KINDS[name].saved_as(spec, 5) == ((1, rows, *spec.row_shape), "float32")


def full_spec() -> StateSpec:
    return FULL.states(0, StateForm(kind="full", row_shape=(1, 4)), FULL_ROWS, "float32")[0]


def test_the_kinds_there_are() -> None:
    assert [(kind.name, kind.label) for kind in KINDS.values()] == [
        ("ring", "sliding"), ("full", "global"), ("conv", "conv")
    ]  # fmt: skip
    assert all(KINDS[name].name == name and kind_of(name) is KINDS[name] for name in KINDS)
    assert [name for name, kind in KINDS.items() if kind.grows] == ["full"]
    assert [name for name, kind in KINDS.items() if kind.positional] == ["ring", "full"]
    assert [name for name, kind in KINDS.items() if not kind.rewinds] == ["conv"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "sliding"}, "'ring', 'full' or 'conv'"),
        ({"role": "inputs"}, "'keys', 'key_scales', 'values' or 'value_scales'"),
    ],
)
def test_states_of_no_kind_or_role_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=f"Input should be {words}"):
        StateSpec.model_validate(ring_spec(8).model_dump() | change)


def test_a_mixer_decides_the_kind_of_its_layer() -> None:
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "scale": 1.0, "rope": None}
    sliding, everything = (AttentionSpec(window=window, **fields) for window in (8, None))
    conv = ShortConvSpec(kernel_size=3)
    assert [mixer.kind for mixer in (sliding, everything, conv)] == ["sliding", "global", "conv"]
    assert [mixer.cache_kind for mixer in (sliding, everything, conv)] == [RING, FULL, CONV]
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=MLPSpec(intermediate_size=4, activation="silu"))
        for mixer in (sliding, everything, conv)
    )
    model = ModelSpec(
        family="x", vocab_size=9, hidden_size=16, layers=layers, norm_eps=1e-6, tie_word_embeddings=True,
        max_position_embeddings=64,
    )  # fmt: skip
    again = ModelSpec.model_validate_json(model.model_dump_json())
    assert again == model and [type(layer.mixer) for layer in again.layers] == [
        AttentionSpec,
        AttentionSpec,
        ShortConvSpec,
    ]
    assert set(MIXERS) == {AttentionSpec, ShortConvSpec} and all(issubclass(mixer, MixerSpec) for mixer in MIXERS)
    names = [state.name for state in state_specs(model, CachePolicy(), 64)]
    assert names == ["layer_0_keys", "layer_0_values", "layer_1_keys", "layer_1_values", "layer_2_inputs"]
