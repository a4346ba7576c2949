"""The graph contract of a Core ML package: it holds for what is built, and every check fails on a fault put in."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coreml_programs import built, contracts_of
from tiny_models import one_thread  # noqa: F401

from exporter.backends import traits
from exporter.backends.coreml.checks import check_package
from exporter.backends.coreml.file import DATA, Package, read_file
from exporter.errors import BundleError, GraphContractError
from exporter.graph.contract import ProgramContract

NAME = "short convolution"  # a convolution, a ring, a convolution, a global layer
PREFILL, MAIN = "prefill", "main"
DOC = Path(__file__).parents[2] / "docs" / "coreml.md"


def package_and_contracts() -> tuple[Package, list[ProgramContract]]:
    decoder, _, path = built(NAME)
    return Package(path), contracts_of(decoder)


def failed(package: Package, contracts: list[ProgramContract]) -> set[tuple[str, str]]:
    return {(check.program, check.name) for check in check_package(package, contracts) if not check.passed}


class Function:
    """The operators of one function, to be damaged in memory."""

    def __init__(self, package: Package, method: str) -> None:
        self.proto: Any = package.spec.mlProgram.functions[method]
        (self.block,) = self.proto.block_specializations.values()
        (self.record,) = [one for one in package.spec.description.functions if one.name == method]

    def find(self, kind: str, **inputs: str) -> list[Any]:
        return [op for op in self.block.operations if op.type == kind and
                all(op.inputs[key].arguments[0].name == name for key, name in inputs.items())]  # fmt: skip

    def constant(self, name: str) -> Any:
        (op,) = [op for op in self.block.operations if op.type == "const" and op.outputs[0].name == name]
        return op.attributes["val"]

    def dtype_of(self, op: Any, name: str) -> None:
        """Declare another dtype for what `op` returns."""
        tensor = op.outputs[0].type.tensorType
        numbers = type(tensor).DESCRIPTOR.fields_by_name["dataType"].enum_type.values_by_name
        tensor.dataType = numbers[name].number

    def move_first(self, op: Any) -> None:
        kept = [type(op).FromString(one.SerializeToString()) for one in self.block.operations if one != op]
        moved = type(op).FromString(op.SerializeToString())
        del self.block.operations[:]
        self.block.operations.extend([moved, *kept])


def data_index(f: Function) -> None:
    for shape in f.find("shape"):
        for op in f.find("gather", x=shape.outputs[0].name):
            op.inputs["x"].arguments[0].name = "input_ids"


def wrong_slot(f: Function) -> None:
    for op in f.find("mod"):
        f.constant(op.inputs["y"].arguments[0].name).immediateValue.tensor.ints.values[0] = 7


def stale_rows(f: Function) -> None:
    first, second = f.find("read_state", input="layer_3_keys")
    (reader,) = f.find("slice_by_index", x=second.outputs[0].name)
    reader.inputs["x"].arguments[0].name = first.outputs[0].name


def early_convolution(f: Function) -> None:
    f.move_first(f.find("write_state", input="layer_0_inputs")[0])


def unwritten(f: Function) -> None:
    f.block.operations.remove(f.find("write_state", input="layer_1_values")[0])


def written_twice(f: Function) -> None:
    f.block.operations.append(f.find("write_state", input="layer_1_values")[0])


def whole_state(f: Function) -> None:
    op = f.find("slice_by_index", x=f.find("read_state", input="layer_3_keys")[1].outputs[0].name)[0]
    op.type = "transpose"


def longer_chunk(f: Function) -> None:
    f.record.input[0].type.multiArrayType.shapeRange.sizeRanges[1].upperBound += 1


def listed_shapes(f: Function) -> None:
    f.record.input[0].type.multiArrayType.enumeratedShapes.shapes.add().shape.extend([1, 8])


def fixed_beside_a_range(f: Function) -> None:
    f.record.input[0].type.multiArrayType.ClearField("shapeRange")


def fixed_length(f: Function) -> None:
    f.proto.inputs[0].type.tensorType.dimensions[1].constant.size = 8


def all_logits(f: Function) -> None:
    op = f.find("linear")[-1]
    op.outputs[0].type.tensorType.dimensions[1].unknown.variadic = False


def half_positions(f: Function) -> None:
    op = next(op for op in f.find("cast") if op.inputs["x"].arguments[0].name in {
        one.outputs[0].name for one in f.find("add") if one.outputs[0].type.tensorType.rank == 1})  # fmt: skip
    f.dtype_of(op, "FLOAT16")


def half_angles(f: Function) -> None:
    f.dtype_of(next(op for op in f.find("mul") if len(op.outputs[0].type.tensorType.dimensions) == 2
                    and op.outputs[0].type.tensorType.dimensions[1].constant.size == 8), "FLOAT16")  # fmt: skip


def short_lengths(f: Function) -> None:
    f.dtype_of(f.find("shape")[0], "INT16")


def float_slot(f: Function) -> None:
    f.dtype_of(f.find("mod")[0], "FLOAT32")


def infinite(f: Function) -> None:
    op = next(op for op in f.block.operations if op.type == "const" and
              op.attributes["val"].immediateValue.tensor.WhichOneof("value") == "floats")  # fmt: skip
    op.attributes["val"].immediateValue.tensor.floats.values[0] = float("-inf")


def other_rows(f: Function) -> None:
    next(one for one in f.proto.inputs if one.name == "layer_1_keys").type.stateType.wrappedType.tensorType.dimensions[
        1
    ].constant.size = 9


def undescribed(f: Function) -> None:
    del f.record.state[0]


Mutant = Callable[[Function], None]
MUTANTS: list[tuple[Mutant, str, set[str]]] = [
    (data_index, MAIN, {"ring_write_index_from_shapes", "full_write_index_from_shapes", "write_index_is_definition"}),
    (data_index, PREFILL, {"ring_write_index_from_shapes", "full_write_index_from_shapes",
                           "write_index_is_definition"}),
    (wrong_slot, MAIN, {"write_index_is_definition"}),
    (wrong_slot, PREFILL, {"write_index_is_definition"}),
    (stale_rows, MAIN, {"full_writes_before_read"}),
    (stale_rows, PREFILL, {"full_writes_before_read"}),
    (early_convolution, MAIN, {"conv_reads_before_write"}),
    (unwritten, MAIN, {"mutated_inputs_exactly_states", "ring_write_index_from_shapes", "ring_writes_before_read",
                       "no_whole_state_copy"}),
    (written_twice, PREFILL, {"no_whole_state_copy"}),
    (whole_state, MAIN, {"no_whole_state_copy"}),
    (longer_chunk, PREFILL, {"dynamic_ranges"}),
    (listed_shapes, PREFILL, {"dynamic_ranges"}),
    (fixed_beside_a_range, MAIN, {"dynamic_ranges"}),
    (fixed_length, PREFILL, {"dynamic_ranges"}),
    (all_logits, PREFILL, {"last_token_logits_only"}),
    (half_positions, PREFILL, {"exact_index_arithmetic"}),
    (half_angles, PREFILL, {"exact_index_arithmetic"}),
    (short_lengths, PREFILL, {"exact_index_arithmetic"}),
    (float_slot, MAIN, {"exact_index_arithmetic"}),
    (infinite, MAIN, {"finite_constants"}),
    (other_rows, MAIN, {"states_as_declared"}),
    (undescribed, PREFILL, {"states_as_declared"}),
]  # fmt: skip


def test_a_built_package_holds_its_contract() -> None:
    _, result, path = built(NAME)
    package, contracts = package_and_contracts()
    checks = check_package(read_file(path), contracts)
    assert [check.name for check in checks if not check.passed] == [] and tuple(checks) == result.checks
    assert {check.name for check in checks} == set(traits("coreml").checks)
    assert failed(package, contracts) == set()


@pytest.mark.parametrize(("mutant", "method", "checks"), MUTANTS)
def test_a_fault_fails_its_checks_and_no_others(mutant: Mutant, method: str, checks: set[str]) -> None:
    package, contracts = package_and_contracts()
    mutant(Function(package, method))
    assert failed(package, contracts) == {(method, name) for name in checks}


@pytest.mark.parametrize(("method", "check"), [(PREFILL, "ring_reads_before_write"), (MAIN, "ring_writes_before_read")])
def test_one_function_in_the_place_of_the_other_has_the_wrong_order(method: str, check: str) -> None:
    package, contracts = package_and_contracts()
    functions = package.spec.mlProgram.functions
    other = PREFILL if method == MAIN else MAIN
    functions[method].CopyFrom(functions[other])
    assert (method, check) in failed(package, contracts)


def test_inputs_are_all_ranges_and_states_are_fixed() -> None:
    """Mixed kinds of flexibility beside states are what apple/coremltools#2548 fails on."""
    package, _ = package_and_contracts()
    for record in package.descriptions().values():
        kinds = {one.type.multiArrayType.WhichOneof("ShapeFlexibility") for one in record.input}
        assert kinds == {"shapeRange"} and len(record.input) == 2
        assert {one.type.stateType.arrayType.WhichOneof("ShapeFlexibility") for one in record.state} == {None}


@pytest.mark.parametrize("order", [1, -1], ids=["as it is", "in another order"])
def test_a_matrix_stored_twice_fails(order: int, tmp_path: Path) -> None:
    shutil.copytree(built(NAME)[2], tmp_path / "twice.mlpackage")
    weights = tmp_path / "twice.mlpackage" / DATA / "weights" / "weight.bin"
    data = bytearray(weights.read_bytes())
    contracts = package_and_contracts()[1]
    package = Package(tmp_path / "twice.mlpackage")
    largest = max(Function(package, MAIN).block.operations, key=_stored(package))
    value = largest.attributes["val"].blobFileValue
    blob = package.blob(largest.attributes["val"])
    assert blob is not None
    data += bytes(-len(data) % 64)
    start, end = value.offset, len(data)
    header = bytearray(data[start : start + 64])
    header[16:24] = (end + 64).to_bytes(8, "little")
    matrix = np.frombuffer(data[blob.offset : blob.offset + blob.size], np.float16)
    weights.write_bytes(data + header + matrix[::order].tobytes())
    value.offset = end
    package.__dict__.pop("weights")
    assert failed(package, contracts) == {("main+prefill", "weights_stored_once")}


def _stored(package: Package) -> Callable[[Any], int]:
    def size(op: Any) -> int:
        blob = package.blob(op.attributes["val"]) if op.type == "const" else None
        return blob.size if blob else 0

    return size


def test_other_functions_and_damaged_packages_are_refused(tmp_path: Path) -> None:
    package, contracts = package_and_contracts()
    with pytest.raises(GraphContractError, match="got the functions main, prefill; expected the functions prefill"):
        check_package(package, contracts[:1])
    with pytest.raises(BundleError, match=r"no Manifest.json"):
        Package(tmp_path)
    with pytest.raises(BundleError, match=r"got no such directory"):
        Package(tmp_path / "missing.mlpackage")
    shutil.copytree(built(NAME)[2], tmp_path / "cut.mlpackage")
    weights = tmp_path / "cut.mlpackage" / DATA / "weights" / "weight.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BundleError, match="got 1000 bytes of weights"):
        check_package(read_file(tmp_path / "cut.mlpackage"), contracts)


@pytest.mark.parametrize(
    ("manifest", "got"),
    [
        ("{}", "names no model"),
        ("not JSON", "names no model"),
        ('{"rootModelIdentifier": "a", "itemInfoEntries": {"a": {"path": "com.apple.CoreML/other.mlmodel"}}}',
         r"whose model is com\.apple\.CoreML/other\.mlmodel"),
    ],
)  # fmt: skip
def test_a_manifest_that_leads_elsewhere_is_refused(manifest: str, got: str, tmp_path: Path) -> None:
    """Core ML goes by the manifest: what it would not find is not to be called a package."""
    shutil.copytree(built(NAME)[2], tmp_path / "odd.mlpackage")
    (tmp_path / "odd.mlpackage" / "Manifest.json").write_text(manifest)
    with pytest.raises(BundleError, match=got):
        Package(tmp_path / "odd.mlpackage")


def test_every_check_stands_in_the_docs_with_its_mutants() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOC.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    documented = {row[0].strip("`"): re.findall(r"`(\w+)`", row[2]) for row in rows if len(row) == 3}
    assert set(traits("coreml").checks) <= documented.keys()
    faults = {(name, mutant.__name__) for mutant, _, names in MUTANTS for name in names}
    for name in traits("coreml").checks:
        for mutant in documented[name]:
            assert (name, mutant) in faults or mutant in globals(), (name, mutant)
        assert documented[name], name
