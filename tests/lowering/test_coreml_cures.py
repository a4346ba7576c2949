"""Every cure of `backends.coreml.cures` is still needed: without it, its fault is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from coreml_programs import LIMITS, coreml_decoder
from tiny_models import CONV, GLOBAL, MOE, SLIDING, attention, model, one_thread  # noqa: F401
from torch.export import ExportedProgram

from exporter.backends.coreml import convert, cures
from exporter.backends.coreml.build import interface_of
from exporter.backends.coreml.checks import weights_stored_once
from exporter.backends.coreml.convert import to_mil
from exporter.backends.coreml.file import Package
from exporter.backends.coreml.precision import SHIPPED, in_precision
from exporter.backends.coreml.stateful import trace_stateful
from exporter.graph.contract import DEFAULT_LIMITS
from exporter.spec import PROGRAMS

SPECS = {
    "attention": model(SLIDING, GLOBAL),
    "convolution": model(CONV),
    "softcap": model(attention(None, logit_softcap=2.0)),
    "experts": model(GLOBAL, feed_forward=MOE),
}


@cache
def traced(name: str, method: str) -> ExportedProgram:
    decoder = coreml_decoder(SPECS[name])
    kind = PROGRAMS[method]
    return trace_stateful(in_precision(decoder, SHIPPED), kind, interface_of(decoder, kind, LIMITS))


def converted(name: str, method: str) -> list[Any]:
    """The operators of the converted function, constants left out."""
    program = to_mil(cures.rewrite(traced(name, method)))
    return [op for op in program.functions["main"].operations if op.op_type != "const"]


@cache
def cured(name: str, method: str) -> list[Any]:
    """The same with every cure."""
    return converted(name, method)


def dtypes(operations: list[Any], kind: str) -> Counter[str]:
    return Counter(op.outputs[0].dtype.__name__ for op in operations if op.op_type == kind)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Leaves out the cure of that name."""

    def leave_out(name: str) -> None:
        kept = {
            "TRANSLATIONS": [one for one in cures.TRANSLATIONS if one.operator != name],
            "REWRITES": [one for one in cures.REWRITES if one.__name__ != name],
            "SKIPPED_PASSES": [one for one in cures.SKIPPED_PASSES if one.name != name],
        }
        assert sum(len(getattr(cures, key)) - len(left) for key, left in kept.items()) == 1, name
        for key, left in kept.items():
            monkeypatch.setattr(cures, key, tuple(left))

    return leave_out


def test_every_cure_has_its_test() -> None:
    names = {one.operator for one in cures.TRANSLATIONS} | {one.__name__ for one in cures.REWRITES}
    names |= {one.name for one in cures.SKIPPED_PASSES}
    assert names == CURED


CURED = {
    "mod", "floordiv", "div", "clamp", "where.scalarother", "slice", "state_as_stored", "erase_assertions",
    "drop_copies", "read_states_as_stored", "round_numbers", "common::guard_negative_gather_indices",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cure", "name", "method", "error"),
    [
        ("mod", "attention", "main", "Unsupported fx node mod, kind mod"),
        ("where.scalarother", "convolution", "main", "Unsupported fx node where, kind where.scalarother"),
        ("erase_assertions", "attention", "prefill", "Unsupported fx node sym_min"),
        ("slice", "convolution", "prefill", r"State wrapped type .* not matched"),
        # Its rewrite calls an operator that only the translation knows.
        ("state_as_stored", "attention", "main", "Unsupported fx node state_as_stored"),
    ],
)
def test_conversion_fails(cure: str, name: str, method: str, error: str, without: Callable[[str], None]) -> None:
    without(cure)
    with pytest.raises((NotImplementedError, ValueError), match=error):
        converted(name, method)


def test_a_quotient_of_lengths_is_a_float(without: Callable[[str], None]) -> None:
    assert dtypes(cured("attention", "main"), "floor_div") == {"int": 2}
    without("floordiv")
    assert dtypes(converted("attention", "main"), "floor_div") == {"int": 1, "fp32": 1}


def test_states_are_cast_whole(without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def cast(operations: list[Any]) -> int:
        return sum(
            op.op_type == "cast" and op.x.op is not None and op.x.op.op_type == "read_state" for op in operations
        )

    assert cast(cured("attention", "main")) == 0
    without("read_states_as_stored")
    monkeypatch.setattr(convert, "other_types", lambda traced, converted: [])
    operations = converted("attention", "main")
    assert cast(operations) == 4 and dtypes(operations, "slice_update") == {"fp32": 4}


def test_old_rows_are_read_for_their_shape(without: Callable[[str], None]) -> None:
    assert not dtypes(cured("attention", "prefill"), "tile")
    without("drop_copies")
    assert dtypes(converted("attention", "prefill"), "tile") == {"fp16": 2}


def test_a_quotient_of_halves_is_float32_and_all_behind_it(without: Callable[[str], None]) -> None:
    assert dtypes(cured("softcap", "main"), "linear") == {"fp16": 8}
    without("div")
    with pytest.raises(AssertionError, match=r"the converter changed types: .*linear"):
        converted("softcap", "main")


def test_a_clamp_with_one_bound_is_float32_and_all_behind_it(without: Callable[[str], None]) -> None:
    assert dtypes(cured("experts", "main"), "linear") == {"fp16": 4 + 1 + 3 * 4 + 1}
    without("clamp")
    with pytest.raises(AssertionError, match=r"the converter changed types: .*linear"):
        converted("experts", "main")


def test_a_number_makes_attention_float32(without: Callable[[str], None]) -> None:
    assert dtypes(cured("attention", "main"), "matmul") == {"fp16": 4}
    without("round_numbers")
    with pytest.raises(AssertionError, match=r"the converter changed types: .*matmul"):
        converted("attention", "main")


def test_every_gather_is_guarded(without: Callable[[str], None]) -> None:
    def compared(operations: list[Any]) -> int:
        return sum(op.op_type == "greater_equal" and op.x.name == "input_ids" for op in operations)

    assert compared(cured("attention", "main")) == 0
    without("common::guard_negative_gather_indices")
    assert compared(converted("attention", "main")) == 1


def test_coremltools_own_translations_are_put_back() -> None:
    registry = cures._TORCH_OPS_REGISTRY.name_to_func_mapping
    before = dict(registry)
    with cures.translations():
        assert registry["mod"] is not None and registry["floordiv"] is not before["floordiv"]
    assert registry == before and "mod" not in registry


def test_what_is_cured_when_a_package_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Left alone, coremltools stores each function's weights, and describes a fixed input as fixed beside ranges."""
    functions = {method: to_mil(cures.rewrite(traced("attention", method))) for method in PROGRAMS}
    monkeypatch.setattr(convert, "describe_as_ranges", lambda path: None)
    convert.save(convert.merge(functions), tmp_path / "model.mlpackage")
    package = Package(tmp_path / "model.mlpackage")
    kinds = {
        (method, one.name): one.type.multiArrayType.WhichOneof("ShapeFlexibility")
        for method, record in package.descriptions().items()
        for one in record.input
    }
    assert kinds.pop(("main", "input_ids")) is None and set(kinds.values()) == {"shapeRange"}
    stored = weights_stored_once(package, "", DEFAULT_LIMITS)
    assert not stored.passed, stored.evidence
