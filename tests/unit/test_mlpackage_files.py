"""Opening packages: what is read, and what is refused with which words."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_package import Blob, Builder, Text, Typed, one_operator

from exporter.backends.coreml import evaluator as mlpackage
from exporter.backends.coreml.evaluator import load_functions
from exporter.errors import BundleError, MissingPackageError, RuntimeLimitError

if importlib.util.find_spec("coremltools") is None:  # importing it would take seconds
    pytest.skip("coremltools is not installed", allow_module_level=True)
WEIGHT = np.arange(12, dtype=np.float16).reshape(3, 4)


def run(path: Path, function: str = "main", **inputs: Any) -> dict[str, torch.Tensor]:
    return load_functions(path)[function].run({name: torch.as_tensor(value) for name, value in inputs.items()}, {})


def linear_package(path: Path) -> Path:
    """y = x @ WEIGHT^T, x fp16 [n, 4] with n of 1 .. 5."""
    builder = Builder()
    main = builder.function()
    main.input("x", "fp16", (None, 4), [(1, 5), (4, 4)])
    main.op("linear", ("y", "fp16", (None, 3)), x="x", weight=Blob(WEIGHT, "fp16"))
    main.returns("y")
    return builder.save(path)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return linear_package(tmp_path / "tiny.mlpackage")


def model_file(package: Path) -> Path:
    return package / "Data" / "com.apple.CoreML" / "model.mlmodel"


def weight_file(package: Path) -> Path:
    return package / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"


def test_a_package_written_by_hand_runs(package: Path) -> None:
    x = np.array([[1, 0, 0, 0], [0, 1, 0, 1]], np.float16)
    assert run(package, x=x)["y"].tolist() == (x @ WEIGHT.T).tolist()


CONSTANTS: list[tuple[Any, str, list[Any]]] = [
    (np.array([1.5, -2], np.float32), "fp32", [1.5, -2]),
    (np.array([1.5, -2], np.float16), "fp16", [1.5, -2]),
    (Typed(np.array([65535, 1]), "uint16"), "uint16", [65535, 1]),
    (Typed(np.array([-7, 1]), "int16"), "int16", [-7, 1]),
    (Typed(np.array([-7, 1]), "int8"), "int8", [-7, 1]),
    (Typed(np.array([-8, 7, 1]), "int4"), "int4", [-8, 7, 1]),
    (np.array([True, False]), "bool", [True, False]),
    (np.array([3, -4], np.int32), "int32", [3, -4]),
    (Blob(np.array([1.5, -2], np.float32), "fp32"), "fp32", [1.5, -2]),
    (Blob(np.array([1, 200], np.uint8), "uint8"), "uint8", [1, 200]),
    (Blob(np.array([-1, 100], np.int8), "int8"), "int8", [-1, 100]),
    (Blob(np.array([-3, 70000], np.int32), "int32"), "int32", [-3, 70000]),
    (Blob(np.array([7, 0, 5, 2, 6]), "uint3"), "uint3", [7, 0, 5, 2, 6]),
    (Blob(np.array([-8, 7, -1]), "int4"), "int4", [-8, 7, -1]),
]


@pytest.mark.parametrize(("constant", "dtype", "expected"), CONSTANTS, ids=lambda v: v if isinstance(v, str) else "")
def test_constants_of_every_type(constant: Any, dtype: str, expected: list[Any], tmp_path: Path) -> None:
    path = one_operator(tmp_path / "c.mlpackage", "identity", (dtype, (len(expected),)), {"x": constant})
    assert run(path)["y"].tolist() == expected


def test_compressed_constants_are_unpacked_and_a_shared_one_only_once(tmp_path: Path) -> None:
    builder = Builder()
    data = Blob(np.array([[-8, 7], [3, 0]]), "int4")
    scale = Blob(np.array([[0.5], [2.0]], np.float16), "fp16")
    for name in ("main", "prefill"):
        function = builder.function(name)
        function.input("x", "fp16", (1, 2))
        weight = function.op("constexpr_blockwise_shift_scale", ("w", "fp16", (2, 2)), data=data, scale=scale)
        function.op("linear", ("y", "fp16", (1, 2)), x="x", weight=weight)
        function.op("gather", ("row", "fp16", (2,)), x=weight, indices=np.array(1, np.int32))
        function.returns("y", "row")
    functions = load_functions(builder.save(tmp_path / "p.mlpackage"))
    for function in functions.values():
        results = function.run({"x": torch.tensor([[1.0, 2.0]], dtype=torch.float16)}, {})
        assert results["y"].tolist() == [[-4 + 7, 6]]
        # The embedding of a tied head: read narrow out of the wide weight.
        assert results["row"].tolist() == [6, 0] and results["row"].dtype == torch.float16
    linears = [s for f in functions.values() for s in f.steps if s.operation.type == "linear"]
    weights = {id(step.kernel.keywords["weight"]) for step in linears}  # type: ignore[attr-defined]
    assert len(weights) == 1
    assert linears[0].kernel.keywords["weight"].dtype == torch.float32  # type: ignore[attr-defined]


def test_a_wide_weight_is_read_narrow_by_everything_that_does_not_multiply(tmp_path: Path) -> None:
    builder = Builder()
    main = builder.function()
    main.input("x", "fp16", (1, 4))
    weight = main.const(Blob(WEIGHT, "fp16"))
    main.op("linear", ("y", "fp16", (1, 3)), x="x", weight=weight)
    main.op("mul", ("z", "fp16", (3, 4)), x="x", y=weight)
    main.op("concat", ("c", "fp16", (6, 4)), values=[weight, weight], axis=0)
    main.returns("z", "c")
    results = run(builder.save(tmp_path / "p.mlpackage"), x=np.ones((1, 4), np.float16))
    assert results["z"].dtype == results["c"].dtype == torch.float16
    assert results["c"].tolist() == [*WEIGHT.tolist(), *WEIGHT.tolist()]


def break_manifest(package: Path) -> None:
    (package / "Manifest.json").write_text("{")


def forget_root(package: Path) -> None:
    (package / "Manifest.json").write_text(json.dumps({"itemInfoEntries": {}, "rootModelIdentifier": "A"}))


def point_outside(package: Path) -> None:
    model_file(package).rename(package.parent / "model.mlmodel")
    items = {"A": {"path": "../../model.mlmodel"}}
    (package / "Manifest.json").write_text(json.dumps({"itemInfoEntries": items, "rootModelIdentifier": "A"}))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edit(path: Path, place: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(data)] = data
    path.write_bytes(bytes(whole))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("no folder", shutil.rmtree, "no such folder"),
    ("no manifest", lambda p: (p / "Manifest.json").unlink(), "Manifest.json that cannot be read"),
    ("broken manifest", break_manifest, "Manifest.json that cannot be read"),
    ("no root", forget_root, "Manifest.json that cannot be read"),
    ("no model", lambda p: model_file(p).unlink(), "no model.mlmodel"),
    ("model outside", point_outside, "no model.mlmodel inside"),
    ("broken model", lambda p: model_file(p).write_bytes(b"\xff" * 50), "a model that cannot be parsed"),
    ("empty model", lambda p: model_file(p).write_bytes(b""), "a model of kind None"),
    ("no weights", lambda p: weight_file(p).unlink(), "weight.bin: got no such file"),
    ("empty weights", lambda p: cut(weight_file(p), 0), "got 0 bytes; expected a header of 64 bytes"),
    ("weights cut in the data", lambda p: cut(weight_file(p), 130), "data to byte 152; expected at most 130"),
    ("weights cut in the metadata", lambda p: cut(weight_file(p), 80), "offset 64; expected an offset of metadata"),
    ("other version", lambda p: edit(weight_file(p), 4, b"\1"), "format version 1"),
    ("other sentinel", lambda p: edit(weight_file(p), 64, b"\0"), "sentinel 0xdeadbe00 at offset 64"),
    ("other type", lambda p: edit(weight_file(p), 68, b"\2"), "element type fp32 at offset 64; expected fp16"),
    ("unknown type", lambda p: edit(weight_file(p), 68, b"\x63"), "element type 99 at offset 64"),
    ("other size", lambda p: edit(weight_file(p), 72, b"\x10"), "16 bytes at offset 64; expected 24 for fp16 [3, 4]"),
    ("padding", lambda p: edit(weight_file(p), 88, b"\4"), "4 bits of padding at offset 64; expected 0"),
]


@pytest.mark.parametrize(("damage", "words"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_a_damaged_package_is_refused(damage: Callable[[Path], object], words: str, package: Path) -> None:
    damage(package)
    with pytest.raises(BundleError) as error:
        load_functions(package)
    assert words in str(error.value)


def edited(package: Path, change: Callable[[Any], object]) -> Path:
    """The package with its model changed."""
    model = mlpackage.package.messages().Model()  # type: ignore[attr-defined]
    model.ParseFromString(model_file(package).read_bytes())
    change(model)
    model_file(package).write_bytes(model.SerializeToString())
    return package


def linear_of(model: Any) -> Any:
    return model.mlProgram.functions["main"].block_specializations["CoreML8"].operations[1]


def blob_of(model: Any) -> Any:
    operations = model.mlProgram.functions["main"].block_specializations["CoreML8"].operations
    return operations[0].attributes["val"].blobFileValue


MODELS: list[tuple[str, Callable[[Any], object], str]] = [
    (
        "operator",
        lambda m: setattr(linear_of(m), "type", "lstm"),
        "function main: operator lstm (output y); expected one of the",
    ),
    ("blocks", lambda m: linear_of(m).blocks.add(), "operator linear (output y)"),
    ("unknown input", lambda m: linear_of(m).inputs["slope"].arguments.add(name="x"), "with inputs ['slope']"),
    ("missing input", lambda m: linear_of(m).inputs.pop("weight"), "without ['weight']"),
    ("two values", lambda m: linear_of(m).inputs["x"].arguments.add(name="x"), "with 2 values for x"),
    (
        "order",
        lambda m: setattr(linear_of(m).inputs["x"].arguments[0], "name", "later"),
        "y reading later, which nothing",
    ),
    ("offset", lambda m: setattr(blob_of(m), "offset", 4096), "offset 4096; expected an offset of metadata within"),
    ("offset 0", lambda m: setattr(blob_of(m), "offset", 0), "offset 0; expected an offset of metadata within"),
    ("outside", lambda m: setattr(blob_of(m), "fileName", "@model_path/../../../x.bin"), "expected a path below"),
    ("absolute", lambda m: setattr(blob_of(m), "fileName", "weights/weight.bin"), "expected a path below"),
    ("opset", lambda m: setattr(m.mlProgram.functions["main"], "opset", "CoreML6"), "function main of opset CoreML6"),
    ("kind", lambda m: m.neuralNetwork.layers.add(), "a model of kind neuralNetwork"),
    ("description", lambda m: m.description.functions.pop(), "inputs ['x']; expected the inputs that the model"),
    ("type", lambda m: linear_of(m).outputs[0].ClearField("type"), "without a tensor type"),
]


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_a_program_that_cannot_run_is_refused_at_load(
    change: Callable[[Any], object], words: str, package: Path
) -> None:
    with pytest.raises(BundleError) as error:
        load_functions(edited(package, change))
    assert words in str(error.value)


def test_a_parameter_that_must_be_a_constant(tmp_path: Path) -> None:
    builder = Builder()
    main = builder.function()
    main.input("x", "fp16", (2, 3))
    main.input("axis", "int32", ())
    main.op("softmax", ("y", "fp16", (2, 3)), x="x", axis="axis")
    main.returns("y")
    with pytest.raises(BundleError, match=r"operator softmax \(output y\) whose axis is computed"):
        load_functions(builder.save(tmp_path / "p.mlpackage"))


def test_a_function_that_is_not_there(package: Path) -> None:
    with pytest.raises(BundleError, match=r"functions \['main'\]; expected a function prefill"):
        load_functions(package, ["prefill"])


@pytest.mark.parametrize("rows", [0, 6])
def test_an_input_outside_its_range(rows: int, package: Path) -> None:
    with pytest.raises(RuntimeLimitError, match=rf"x \[{rows}, 4\]; expected x \[1..5, 4\], as the package declares"):
        run(package, x=np.zeros((rows, 4), np.float16))


def test_inputs_of_the_wrong_name_type_or_shape(package: Path) -> None:
    for inputs, words in (
        ({"z": np.zeros((1, 4), np.float16)}, r"inputs \['z'\]; expected \['x'\]"),
        ({"x": np.zeros((1, 4), np.float32)}, r"x torch.float32 \[1, 4\]; expected fp16 \[\?, 4\]"),
        ({"x": np.zeros((1, 3), np.float16)}, r"x torch.float16 \[1, 3\]; expected fp16 \[\?, 4\]"),
    ):
        with pytest.raises(RuntimeLimitError, match=words):
            run(package, **inputs)


def test_enumerated_shapes(tmp_path: Path, package: Path) -> None:
    def enumerate_shapes(model: Any) -> None:
        shapes = model.description.functions[0].input[0].type.multiArrayType.enumeratedShapes.shapes
        for rows in (1, 3):
            shapes.add(shape=[rows, 4])

    path = edited(package, enumerate_shapes)
    assert run(path, x=np.zeros((3, 4), np.float16))["y"].shape == (3, 3)
    with pytest.raises(RuntimeLimitError, match=r"x \[2, 4\]; expected x \[1, 4\] or \[3, 4\]"):
        run(path, x=np.zeros((2, 4), np.float16))


def test_a_result_that_is_not_of_its_declared_type(tmp_path: Path) -> None:
    for declared, words in ((("fp32", (2,)), "float16"), (("fp16", (3,)), r"\[2\]"), (("fp16", (1, 2)), r"\[2\]")):
        path = one_operator(tmp_path / f"{len(words)}{declared[0]}{len(declared[1])}", "add", declared,
                            {"x": np.ones(2, np.float16), "y": np.ones(2, np.float16)})  # fmt: skip
        with pytest.raises(BundleError, match=rf"operator add \(output y\): a result .*{words}"):
            run(path)


def test_values_outside_a_definition_name_the_operator(tmp_path: Path) -> None:
    path = one_operator(
        tmp_path / "p", "gather", ("fp32", ()), {"x": np.ones(2, np.float32), "indices": np.array(5, np.int32)}
    )
    with pytest.raises(BundleError, match=r"function main, operator gather \(output y\): index 5 of an axis of 2"):
        run(path)


def test_several_results_lists_and_texts(tmp_path: Path) -> None:
    builder = Builder()
    main = builder.function()
    main.input("x", "fp32", (1, 4))
    main.op("topk", [("v", "fp32", (1, 2)), ("i", "uint16", (1, 2))], x="x", k=2, output_indices_dtype=Text("uint16"))
    main.op("concat", ("c", "fp32", (1, 6)), values=["x", "v"], axis=-1)
    main.returns("c", "i")
    results = run(builder.save(tmp_path / "p"), x=np.array([[3, 9, 1, 5]], np.float32))
    assert results["c"].tolist() == [[3, 9, 1, 5, 9, 5]]
    assert results["i"].tolist() == [[1, 3]]


def test_results_are_the_callers(package: Path, tmp_path: Path) -> None:
    builder = Builder()
    main = builder.function()
    main.input("x", "fp16", (2,))
    main.op("identity", ("y", "fp16", (2,)), x="x")
    main.returns("y")
    x = torch.ones(2, dtype=torch.float16)
    y = load_functions(builder.save(tmp_path / "p"))["main"].run({"x": x}, {})["y"]
    y += 1
    assert x.tolist() == [1, 1]


def test_nothing_of_the_converter_takes_part() -> None:
    folder = Path(mlpackage.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "coremltools"], f"{file.name}: {names}"


def test_running_a_package_imports_no_coremltools(package: Path) -> None:
    script = (
        "import sys, torch; from pathlib import Path; from exporter.backends.coreml.evaluator import load_functions;"
        f"f = load_functions(Path({str(package)!r}))['main'];"
        "print(f.run({'x': torch.ones(1, 4).half()}, {})['y'].tolist());"
        "print([m for m in sys.modules if m.split('.')[0] == 'coremltools'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[[6.0, 22.0, 38.0]]", "[]"]


def test_a_python_without_coremltools_is_told_what_to_install(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exporter.backends.coreml.evaluator import protobuf

    protobuf.messages.cache_clear()
    monkeypatch.setattr(protobuf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"no coremltools; .*ring-exporter\[coreml\]"):
        load_functions(package)
    monkeypatch.undo()
    protobuf.messages.cache_clear()
