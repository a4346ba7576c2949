"""The pages for app developers: their names and shapes are a bundle's, their numbers those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import attention, model

from exporter.spec import (
    KINDS,
    CachePolicy,
    Manifest,
    ModelSpec,
    StateSpec,
    TokenizerSpec,
    stack_name,
    state_specs,
)

ROOT = Path(__file__).parents[2]
SCALES = {"key_scales", "value_scales"}  # of int8 caches, which are ExecuTorch's


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PAGES = {format: text(f"docs/{format}.md") for format in ("coreml", "coreai")}
SWIFT = {format: "".join(re.findall(r"```swift\n(.*?)```", page, re.S)) for format, page in PAGES.items()}
_SLIDING = attention(512, num_key_value_heads=1, head_dim=256)
_GLOBAL = attention(None, num_key_value_heads=1, head_dim=256)
GEMMA = model(*([_SLIDING] * 5 + [_GLOBAL]) * 3)
"""Gemma 3 270M, as far as its states go."""


def snake(name: str) -> str:
    """What ``convertFromSnakeCase`` turns into `name`."""
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)


@pytest.mark.parametrize("format", PAGES)
def test_the_swift_reads_what_a_manifest_has(format: str) -> None:
    block = re.search(r"struct Manifest: Decodable \{(.*?)\n\}", SWIFT[format], re.S)
    assert block is not None
    fields = {"Tokens": TokenizerSpec, "Model": ModelSpec}
    inner = re.compile(r"struct (\w+): Decodable \{(.*?)\}")
    for name, body in inner.findall(block[1]):
        keys = {snake(key) for key in re.findall(r"(\w+): ", body)}
        assert keys and keys <= fields[name].model_fields.keys(), name
    own = {snake(key) for key in re.findall(r"(\w+): ", inner.sub("", block[1]))}
    assert {"max_context_length", "max_prefill_chunk", "tokenizer"} <= own <= Manifest.model_fields.keys()
    assert "convertFromSnakeCase" in SWIFT[format]


def test_the_swift_names_are_those_of_the_programs() -> None:
    states = {stack_name(kind, role) for kind in KINDS.values() for role in kind.roles if role not in SCALES}
    inserted = set(re.findall(r'insert\(&\w+, for: "(\w+)"\)', SWIFT["coreai"]))
    assert inserted == {name for name in states if name != "convInputCache"} | {"logits"}
    assert set(re.findall(r'state\("(\w+)"', SWIFT["coreai"])) == inserted - {"logits"}
    for format, swift in SWIFT.items():
        assert set(re.findall(r'function\("(\w+)"\)', swift)) == {"prefill", "main"}, format
        assert set(re.findall(r'"(\w+_ids)": ', swift)) == {"input_ids", "position_ids"}, format


def test_the_shapes_of_gemma_are_those_of_its_states() -> None:
    static = state_specs(GEMMA, CachePolicy(), 32_768, "static", "float16")
    full = [state for state in static if state.kind == "full"]
    assert {state.layers for state in full} == {(5,), (11,), (17,)} and len(static) == 36
    assert {state.shape() for state in full} == {(1, 32768, 1, 256)}
    assert {state.shape() for state in static if state not in full} == {(1, 512, 1, 256)}
    words = " ".join(PAGES["coreml"].split())
    assert "layers 5, 11 and 17 are `[1, 32768, 1, 256]`, those of the other fifteen `[1, 512, 1, 256]`" in words

    def megabytes(states: list[StateSpec]) -> str:
        return f"{sum(state.bytes() for state in states) / 1e6:.1f} MB"

    rings = [state for state in static if state.kind == "ring"]
    assert f"{megabytes(rings)} of rings and {megabytes(full)} of global layers" in words
    assert f'`state.withMultiArray(for: "{static[0].name}")`' in words
    stacked = {state.name: state for state in state_specs(GEMMA, CachePolicy(), 32_768, "stacked")}
    assert stacked["globalKeyCache"].shape(7) == (3, 7, 1, 256) and "`[3, rows, 1, 256]`" in PAGES["coreai"]
    assert stacked["slidingKeyCache"].shape() == (15, 512, 1, 256) and "`[15, 512, 1, 256]`" in PAGES["coreai"]
    rings = [state for state in stacked.values() if state.kind == "ring"]
    assert f"{megabytes(rings)} of rings" in PAGES["coreai"]
    a_token = sum(state.row_bytes for state in stacked.values() if state.kind == "full")
    assert a_token == 6144 and "6 KB of global cache a token" in PAGES["coreai"]


def measured() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(text("docs/results/apple-models.json"))["runs"][0]["rows"]
    return rows


def test_the_evaluator_decodes_two_tokens_a_second() -> None:
    rates = {name: row["decode"]["decode"] for name, row in measured().items() if name.startswith("coreml/")}
    assert len(rates) >= 3 and min(rates.values()) >= 2, rates
