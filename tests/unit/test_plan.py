"""The memory plan against published figures, a slow count, and the bytes the runtime allocates."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import toy_manifest

from exporter.architecture import Planned, read_planned
from exporter.errors import ConfigError
from exporter.families import from_hf
from exporter.lengths import parse_lengths
from exporter.plan import (
    LayerState,
    check_contexts,
    growths,
    layer_states,
    model_states,
    plan_context,
    plan_contexts,
)
from exporter.spec import CachePolicy
from exporter.units import BINARY, DECIMAL, size
from runtime_ref.memory import context_costs, planned_usage
from runtime_ref.state import State

ARCHITECTURES = Path(__file__).parents[2] / "configs" / "architectures"
GIB, MIB, KIB, MB = 2**30, 2**20, 2**10, 10**6


def printed(count: float, unit: float, digits: str) -> str:
    """`count` with as many digits as `digits` has, rounded as on paper."""
    return str((Decimal(count) / Decimal(unit)).quantize(Decimal(digits), ROUND_HALF_UP))


def kv_only(planned: Planned) -> list[LayerState]:
    return [state for state in planned.states if state.kind != "conv"]


@pytest.fixture(scope="module")
def inkling() -> Planned:
    return read_planned(ARCHITECTURES / "inkling.yaml")


@pytest.mark.parametrize(
    ("context", "full", "ring"), [(8192, "7.6", "1.1"), (32768, "30.3", "3.2"), (131072, "121", "11.4")]
)
@pytest.mark.parametrize("with_conv", [False, True])
def test_inkling_by_context(*, inkling: Planned, context: int, full: str, ring: str, with_conv: bool) -> None:
    """Printed as GB, they are GiB; the 12 MiB of convolution state, which the source leaves out, change no digit."""
    plan = plan_context(inkling.states if with_conv else kv_only(inkling), context)
    assert printed(plan.full, GIB, full) == full
    assert printed(plan.total, GIB, ring) == ring
    assert printed(plan.full, 10**9, full) != full


def test_inkling_without_its_convolutions_is_the_formula(inkling: Planned) -> None:
    plan = plan_context(kv_only(inkling), 32768)
    assert plan.full == 32768 * 2 * 128 * 4 * (55 * 16 + 11 * 8) == 30.25 * GIB
    channels = 55 * 16384 + 11 * 14336
    assert plan_context(inkling.states, 32768).kinds["conv"] == 3 * channels * 4


def test_inkling_a_token_and_its_rings(inkling: Planned) -> None:
    """968 KB and 88 KB are KiB (the sum in KB would be 991), 440 MB are MiB."""
    grown = growths(inkling.states)
    assert sum(kind.full for kind in grown) == 968 * KIB
    assert sum(kind.ring for kind in grown) == 88 * KIB
    assert {kind.kind: kind.layers for kind in grown} == {"sliding": 55, "global": 11, "conv": 66}
    for context in (512, 8192, 131072):
        assert plan_context(inkling.states, context).kinds["sliding"] == 440 * MIB


def test_growth_is_what_one_more_token_adds(inkling: Planned) -> None:
    before, after = (plan_context(inkling.states, context) for context in (9000, 9001))
    grown = growths(inkling.states)
    assert after.full - before.full == sum(kind.full for kind in grown)
    assert after.total - before.total == sum(kind.ring for kind in grown)


@pytest.mark.parametrize(("context", "ratio"), [(4096, "1.94"), (8192, "1.97"), (32768, "1.99"), (131072, "2.00")])
def test_gpt_oss_lite(context: int, ratio: str) -> None:
    plan = plan_context(read_planned(ARCHITECTURES / "gpt_oss_lite.yaml").states, context)
    assert printed(plan.full / plan.total, 1, ratio) == ratio
    if context == 131072:
        assert plan.full == 2.25 * GIB
        assert printed(plan.total, GIB, "1.13") == "1.13"


def test_gpt_oss_lite_slides_in_its_even_layers() -> None:
    states = read_planned(ARCHITECTURES / "gpt_oss_lite.yaml").states
    assert [state.kind for state in states] == ["sliding", "global"] * 6
    assert [state.layer for state in states] == list(range(12))


def test_smollm2() -> None:
    """Published as 188.7 MB at 8192 rows; by the formula that is 4096 rows, and these are decimal MB."""
    _, spec = from_hf(
        {
            "model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "hidden_size": 576, "head_dim": 64, "max_position_embeddings": 8192,
        }
    )  # fmt: skip
    states = model_states(spec, CachePolicy())
    for context, want in ((8192, "377.5"), (4096, "188.7")):
        plan = plan_context(states, context)
        assert printed(plan.full, MB, want) == want
        assert plan.total == plan.full


KEPT = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def slow_bytes(layers: list[dict[str, Any]], dtype: str, context: int, *, ring: bool, slack: int = 0) -> int:
    """Position by position: which rows are kept, and the bytes of each."""
    total = 0
    for layer in layers:
        if "short_conv" in layer:
            element = 4 if dtype == "int8" else KEPT[dtype]
            total += (layer["short_conv"]["kernel_size"] - 1) * layer["short_conv"]["channels"] * element
        for position in range(context):
            if layer["kind"] == "conv" or (ring and position < context - layer.get("window", context)):
                continue
            for _ in ("key", "value"):
                total += row_bytes(layer, dtype)
        if layer["kind"] == "sliding" and ring:
            total += slack * 2 * row_bytes(layer, dtype)
    return total


def row_bytes(layer: dict[str, Any], dtype: str) -> int:
    """Of a token's keys, or of its values: the numbers, and in int8 a float32 scale a head."""
    total = 0
    for _ in range(layer["num_key_value_heads"]):
        total += layer["head_dim"] * KEPT[dtype] + (4 if dtype == "int8" else 0)
    return total


small = st.integers(1, 5)
conv = st.fixed_dictionaries({"kernel_size": st.integers(2, 5), "channels": small})
heads = {"num_key_value_heads": small, "head_dim": small, "count": st.integers(1, 3)}
runs = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("sliding"), "window": st.integers(1, 40), **heads}, optional={"short_conv": conv}
    ),
    st.fixed_dictionaries({"kind": st.just("global"), **heads}, optional={"short_conv": conv}),
    st.fixed_dictionaries({"kind": st.just("conv"), "short_conv": conv}),
)


@settings(deadline=None)
@given(
    period=st.lists(runs, min_size=1, max_size=3), more=st.none() | st.integers(0, 8), context=st.integers(1, 60),
    dtype=st.sampled_from(sorted(KEPT)), slack=st.integers(0, 4),
)  # fmt: skip
def test_any_architecture_costs_what_a_slow_count_says(
    *, tmp_path_factory: pytest.TempPathFactory, period: list[dict[str, Any]], more: int | None, context: int,
    dtype: str, slack: int,
) -> None:  # fmt: skip
    once = [layer for layer in period for _ in range(layer.get("count", 1))]
    data: dict[str, Any] = {"name": "x", "cache": {"dtype": dtype, "ring_slack": slack}, "layers": period}
    layers = once
    if more is not None:
        data["num_layers"] = len(once) + more
        layers = [once[n % len(once)] for n in range(len(once) + more)]
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(data))
    planned = read_planned(path)
    plan = plan_context(planned.states, context)
    assert planned.layers == len(layers)
    assert plan.total == slow_bytes(layers, dtype, context, ring=True, slack=slack)
    assert plan.full == slow_bytes(layers, dtype, context, ring=False)
    for kind in ("sliding", "global"):
        own = [{k: v for k, v in layer.items() if k != "short_conv"} for layer in layers if layer["kind"] == kind]
        assert plan.kinds[kind] == slow_bytes(own, dtype, context, ring=True, slack=slack)


toys = st.builds(
    toy_manifest,
    st.lists(st.sampled_from(["ring", "full", "conv"]), min_size=1, max_size=5),
    window=st.integers(1, 20), slack=st.integers(0, 4), context=st.integers(2, 100),
    dtype=st.sampled_from(["float32", "int8"]),
)  # fmt: skip


@settings(deadline=None)
@given(manifest=toys)
def test_the_runtime_allocates_the_plan_byte_for_byte(manifest: Any) -> None:
    context = manifest.max_context_length
    plan = plan_context(model_states(manifest.model, manifest.cache), context)
    assert plan_context(layer_states(manifest.states), context) == plan
    state = State(manifest)
    state.ensure_rows(context)
    assert sum(tensor.numel() * tensor.element_size() for tensor in state.tensors) == plan.total
    wanted = {kind: count for kind, count in plan.kinds.items() if count}
    for usages in (state.memory(), planned_usage(manifest, context)):
        assert {usage.kind: usage.allocated_bytes for usage in usages} == wanted
    (cost,) = context_costs(manifest, [context])
    assert (cost.allocated_bytes, cost.full_bytes) == (plan.total, plan.full)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])  # steps of growth from 4 rows, at least the window
def test_a_longer_bundle_is_at_the_plan_wherever_growth_stops(tokens: int) -> None:
    manifest = toy_manifest(("ring", "full", "ring", "conv"), window=8, slack=3, context=96)
    plan = plan_context(layer_states(manifest.states), tokens)
    state = State(manifest)
    state.ensure_rows(tokens)
    assert sum(tensor.nbytes for tensor in state.tensors) == plan.total
    (cost,) = context_costs(manifest, [tokens])
    assert (cost.allocated_bytes, cost.full_bytes) == (plan.total, plan.full)


def test_the_usual_contexts_end_at_the_limit() -> None:
    states = (LayerState(0, "global", 1, None),)
    assert [plan.context for plan in plan_contexts(states, 2048)] == [512, 2048]
    assert [plan.context for plan in plan_contexts(states, 3000)] == [512, 2048, 3000]
    assert [plan.context for plan in plan_contexts(states, 2048, (7, 5))] == [7, 5]


@pytest.mark.parametrize("text", ["", "0", "-1", "8192,0", "8192,", "8k", "1.5", "9" * 5000])
def test_contexts_that_are_no_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="positive whole numbers"):
        parse_lengths("--contexts", text)


def test_contexts_within_the_limit() -> None:
    assert parse_lengths("--contexts", "8192, 32768") == (8192, 32768)
    check_contexts((64, 128), 128)
    with pytest.raises(ConfigError, match="got 129, 300; expected at most 128"):
        check_contexts((64, 129, 300), 128)


@pytest.mark.parametrize(
    ("count", "binary", "decimal"),
    [
        (0, "0 B", "0 B"), (999, "999 B", "999 B"), (1000, "1000 B", "1.00 KB"), (1024, "1.00 KiB", "1.02 KB"),
        (440 * MIB, "440.00 MiB", "461.37 MB"), (121 * GIB, "121.00 GiB", "129.92 GB"),
        (3 * 2**41, "6.00 TiB", "6.60 TB"), (2**52, "4,096.00 TiB", "4,503.60 TB"),
    ],
)  # fmt: skip
def test_units_are_told_apart(count: int, binary: str, decimal: str) -> None:
    assert (size(count, BINARY), size(count, DECIMAL)) == (binary, decimal)


SLIDING = {"kind": "sliding", "window": 4, "num_key_value_heads": 1, "head_dim": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": []}, ["unknown key 'layer'", "cache, layers, max_context_length, name, num_layers"]),
        ({"layers": [SLIDING | {"widow": 3}]}, ["unknown key 'widow' in layers.0", "short_conv, window"]),
        (
            {"layers": [SLIDING | {"short_conv": {"kernel_size": 4, "channels": 2, "bias": True}}]},
            ["key 'bias' in layers.0.short_conv; expected in layers.0.short_conv one of channels, kernel_size."],
        ),
        ({"cache": {"rows": 1}}, ["'rows' in cache", "dtype, ring_slack"]),
        ({"cache": {"dtype": "float8"}}, ["cache.dtype = 'float8'", "bfloat16"]),
        ({"layers": []}, ["layers = []", "at least one run of layers"]),
        ({"layers": [{"kind": "sliding", "window": 4}]}, ["layers.0", "needs head_dim, num_key_value_heads"]),
        ({"layers": [SLIDING | {"window": None}]}, ["layers.0", "a sliding layer needs window"]),
        ({"layers": [SLIDING | {"kind": "global"}]}, ["layers.0", "a global layer has no window"]),
        ({"layers": [{"kind": "conv"}]}, ["a conv layer needs short_conv"]),
        ({"layers": [SLIDING | {"kind": "linear"}]}, ["layers.0.kind = 'linear'", "'sliding', 'global' or 'conv'"]),
        ({"layers": [SLIDING | {"window": 0}]}, ["layers.0.window = 0"]),
        ({"layers": [SLIDING | {"head_dim": True}]}, ["layers.0.head_dim = True"]),
        ({"layers": [SLIDING | {"head_dim": 10**30}]}, ["layers.0.head_dim", "less than or equal"]),
        ({"layers": [SLIDING | {"count": 3}], "num_layers": 2}, ["num_layers of at least 3", "not 2"]),
        ({"name": None}, ["name = None"]),
        ({"checkpoint": {"path": "x"}}, ["either checkpoint (the config of an export) or layers"]),
    ],
)
def test_a_bad_architecture_names_key_and_expectation(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"name": "a", "layers": [SLIDING]} | change))
    with pytest.raises(ConfigError) as caught:
        read_planned(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "checkpoint, layers"),
        ("name: x\n", "either checkpoint"),
        ("layers: 1\nlayers: 2\n", "key 'layers' twice"),
        ("layers: 3\n", "layers = 3"),
    ],
)
def test_files_that_are_neither_kind(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_planned(path)
    assert words in str(caught.value)
