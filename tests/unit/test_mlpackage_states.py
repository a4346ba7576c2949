"""States: what a program reads and writes, however much memory the evaluator lets it share.

The oracle runs every program as the definitions say, in numpy, copying at each read and each write.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_package import Builder, FunctionBuilder, Text

from exporter.backends.coreml.evaluator import load_functions
from exporter.backends.coreml.evaluator.function import Function
from exporter.backends.coreml.evaluator.states import plan
from exporter.backends.coreml.runtime import MLPackageProgram
from exporter.errors import BundleError, RuntimeLimitError
from exporter.spec import PROGRAMS, MethodSpec, ProgramSpec, Recipe, StateSpec
from runtime_ref.programs import CheckedProgram

if importlib.util.find_spec("coremltools") is None:  # importing it would take seconds
    pytest.skip("coremltools is not installed", allow_module_level=True)

ROWS, WIDTH = 4, 2
WHOLE, ROW = (ROWS, WIDTH), (1, WIDTH)


class Writer:
    """Writes a program over float32 states ``[ROWS, WIDTH]`` and runs it at the same time, by the definitions."""

    def __init__(self, states: tuple[str, ...] = ("s", "t")) -> None:
        self.builder = Builder()
        self.main: FunctionBuilder = self.builder.function()
        self.start = {
            n: np.arange(ROWS * WIDTH, dtype=np.float32).reshape(WHOLE) + 100 * i for i, n in enumerate(states)
        }
        self.states = {name: value.copy() for name, value in self.start.items()}
        for name in states:
            self.main.state(name, "fp32", WHOLE)
        self.values: dict[str, np.ndarray] = {}

    def add(self, kind: str, result: np.ndarray, **inputs: Any) -> str:
        name = f"v{len(self.values)}"
        self.main.op(kind, (name, "fp32", result.shape), **inputs)
        self.values[name] = np.array(result, np.float32)
        return name

    def read(self, state: str) -> str:
        return self.add("read_state", self.states[state].copy(), input=state)

    def write(self, state: str, value: str) -> None:
        self.main.op("write_state", [], input=state, data=value)
        self.states[state] = self.values[value].copy()

    def write_and_read(self, state: str, value: str) -> str:
        self.states[state] = self.values[value].copy()
        return self.add("coreml_update_state", self.states[state].copy(), state=state, value=value)

    def update(self, x: str, row: str, at: int) -> str:
        result = self.values[x].copy()
        result[at] = self.values[row][0]
        return self.add("slice_update", result, x=x, update=row, begin=np.array([at, 0], np.int32),
                        end=np.array([at + 1, WIDTH], np.int32))  # fmt: skip

    def row(self, x: str, at: int) -> str:
        bounds = {"begin": np.array([at, 0], np.int32), "end": np.array([at + 1, WIDTH], np.int32)}
        return self.add("slice_by_index", self.values[x][at : at + 1], x=x, **bounds)

    def reshaped(self, x: str) -> str:
        shape = self.values[x].shape
        turned = self.add("reshape", self.values[x].reshape(-1), x=x, shape=np.array([-1], np.int32))
        return self.add("reshape", self.values[x], x=turned, shape=np.array(shape, np.int32))

    def doubled(self, x: str) -> str:
        return self.add("add", self.values[x] * 2, x=x, y=x)

    def check(self, path: Path, *results: str) -> Function:
        """Run the package and compare results and states to the bit."""
        self.main.returns(*results)
        function = load_functions(self.builder.save(path))["main"]
        states = {name: torch.from_numpy(value.copy()) for name, value in self.start.items()}
        memory = {name: state.data_ptr() for name, state in states.items()}
        ours = function.run({}, states)
        for name in results:
            np.testing.assert_array_equal(ours[name].numpy(), self.values[name])
        for name, state in states.items():
            np.testing.assert_array_equal(state.numpy(), self.states[name])
            assert state.data_ptr() == memory[name]
        return function


def sharing(function: Function) -> tuple[int, int]:
    """How many updates write in place, and how many reads copy."""
    found = plan(function.text.operations, function.text.outputs)
    return len(found.in_place), len(found.copied_reads)


def test_the_usual_update_writes_in_place_and_copies_nothing(tmp_path: Path) -> None:
    w = Writer()
    old = w.read("s")
    row = w.doubled(w.row(old, 3))
    new = w.update(old, row, 1)
    attended = w.doubled(new)
    w.write("s", new)
    assert sharing(w.check(tmp_path / "p", attended)) == (1, 0)


def test_reads_only_share(tmp_path: Path) -> None:
    w = Writer()
    assert sharing(w.check(tmp_path / "p", w.doubled(w.row(w.read("s"), 2)))) == (0, 0)


def test_the_old_content_is_needed_after_the_update(tmp_path: Path) -> None:
    w = Writer()
    old = w.read("s")
    view = w.reshaped(old)
    new = w.update(old, w.doubled(w.row(old, 3)), 1)
    after = w.doubled(view)  # a view of what the update would overwrite
    w.write("s", new)
    assert sharing(w.check(tmp_path / "p", after, new)) == (0, 0)


def test_the_old_content_is_needed_after_the_write(tmp_path: Path) -> None:
    w = Writer()
    old = w.read("s")
    w.write("s", w.update(old, w.doubled(w.row(old, 3)), 1))
    assert sharing(w.check(tmp_path / "p", w.doubled(old))) == (0, 1)


def test_a_read_between_the_update_and_its_write_sees_the_old_content(tmp_path: Path) -> None:
    w = Writer()
    old = w.read("s")
    new = w.update(old, w.doubled(w.row(old, 3)), 1)
    between = w.doubled(w.read("s"))
    w.write("s", new)
    assert sharing(w.check(tmp_path / "p", between))[0] == 0


def test_an_update_whose_rows_are_the_states_own(tmp_path: Path) -> None:
    w = Writer()
    old = w.read("s")
    w.write("s", w.update(old, w.row(old, 3), 1))
    assert sharing(w.check(tmp_path / "p", w.doubled(w.read("t")))) == (0, 0)


def test_an_update_that_is_written_to_another_state(tmp_path: Path) -> None:
    w = Writer()
    new = w.update(w.read("s"), w.doubled(w.row(w.read("t"), 3)), 1)
    w.write("t", new)
    assert sharing(w.check(tmp_path / "p", new))[0] == 0


def test_two_updates_of_one_state(tmp_path: Path) -> None:
    w = Writer()
    row = w.doubled(w.row(w.read("t"), 0))
    first = w.write_and_read("s", w.update(w.read("s"), row, 0))
    w.write("s", w.update(first, w.doubled(row), 2))
    assert sharing(w.check(tmp_path / "p", row)) == (2, 0)


def test_a_state_that_is_written_to_the_other_and_back(tmp_path: Path) -> None:
    w = Writer()
    s, t = w.read("s"), w.read("t")
    w.write("s", t)
    w.write("t", s)
    assert sharing(w.check(tmp_path / "p", s)) == (0, 1)  # s is needed after it was overwritten


def test_a_view_of_a_state_written_to_itself(tmp_path: Path) -> None:
    builder = Builder()
    main = builder.function()
    main.state("s", "fp32", (2, 2))
    main.op("read_state", ("old", "fp32", (2, 2)), input="s")
    main.op("transpose", ("new", "fp32", (2, 2)), x="old", perm=np.array([1, 0], np.int32))
    main.op("write_state", [], input="s", data="new")
    state = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    load_functions(builder.save(tmp_path / "p"))["main"].run({}, {"s": state})
    assert state.tolist() == [[1, 3], [2, 4]]


def test_a_result_that_is_a_state_is_the_callers_own(tmp_path: Path) -> None:
    w = Writer()
    old = w.read("s")
    function = w.check(tmp_path / "p", old)
    state = {name: torch.zeros(WHOLE) for name in ("s", "t")}
    result = function.run({}, state)[old]
    state["s"] += 1
    assert not result.any()


def random_program(seed: int) -> tuple[Writer, list[str]]:
    """A few dozen reads, writes, updates, views and sums over two states in any order."""
    generator = np.random.default_rng(seed)
    w = Writer()

    def some(shape: tuple[int, ...]) -> str:
        names = [name for name, value in w.values.items() if value.shape == shape]
        # Mostly recent values: those are what hazards come from.
        return names[-1 - min(int(generator.geometric(0.4)) - 1, len(names) - 1)]

    def state() -> str:
        return "st"[generator.integers(2)]

    w.row(w.read("s"), 0)
    for _ in range(generator.integers(6, 24)):
        match generator.integers(9):
            case 0 | 1:
                w.read(state())
            case 2:
                w.write(state(), some(WHOLE))
            case 3:
                w.row(some(WHOLE), int(generator.integers(ROWS)))
            case 4:
                w.doubled(some(ROW))
            case 5:
                w.reshaped(some(WHOLE))
            case 6:
                w.update(some(WHOLE), some(ROW), int(generator.integers(ROWS)))
            case 7:
                w.write_and_read(state(), some(WHOLE))
            case 8:  # the usual pattern, as a converter writes it
                own = state()
                new = w.update(w.read(own), w.doubled(some(ROW)), int(generator.integers(ROWS)))
                if generator.integers(2):
                    w.doubled(some(WHOLE))
                w.write(own, new)
    names = list(w.values)
    return w, [names[i] for i in generator.choice(len(names), min(3, len(names)), replace=False)]


def test_any_order_of_reads_and_writes(tmp_path: Path) -> None:
    shared = np.zeros(2, int)
    taken_back = 0
    for seed in range(250):
        w, results = random_program(seed)
        function = w.check(tmp_path / str(seed), *results)
        shared += sharing(function)
        updates = sum(operation.type == "slice_update" for operation in function.text.operations)
        taken_back += updates > sharing(function)[0]
    # The programs are of both kinds: many may share, many may not.
    assert shared[0] > 100 and shared[1] > 100 and taken_back > 100


def counter_package(path: Path, rows: int = 5, dtype: str = "fp16") -> Path:
    """`main` adds 1 to the ids in a row of `log`, `prefill` writes them from row S - Q on and returns row 0."""
    builder = Builder()
    for name, low in (("main", 1), ("prefill", 2)):
        f = builder.function(name)
        q = None if name == "prefill" else 1
        f.input("input_ids", "int32", (1, q), [(1, 1), (low, 3 if q is None else 1)])
        f.input("position_ids", "int32", (1, None), [(1, 1), (low, rows)])
        f.state("log", dtype, (1, rows, 1))
        f.op("shape", ("s", "int32", (2,)), x="position_ids")
        f.op("shape", ("n", "int32", (2,)), x="input_ids")
        f.op("sub", ("offset", "int32", (2,)), x="s", y="n")
        f.op("mul", ("begin2", "int32", (2,)), x="offset", y=np.array([0, 1], np.int32))
        f.op("mul", ("end2", "int32", (2,)), x="s", y=np.array([1, 1], np.int32))
        f.op("concat", ("begin", "int32", (3,)), values=["begin2", np.array([0], np.int32)], axis=0)
        f.op("concat", ("end", "int32", (3,)), values=["end2", np.array([1], np.int32)], axis=0)
        f.op("expand_dims", ("ids", "int32", (1, q, 1)), x="input_ids", axes=np.array([2], np.int32))
        f.op("add", ("more", "int32", (1, q, 1)), x="ids", y=np.array(1 if q == 1 else 0, np.int32))
        half = {"fp16": "half", "fp32": "float"}[dtype]
        f.op("cast", (half, dtype, (1, q, 1)), x="more", dtype=Text(dtype))
        f.op("read_state", ("old", dtype, (1, rows, 1)), input="log")
        f.op("slice_update", ("new", dtype, (1, rows, 1)), x="old", update=half, begin="begin", end="end")
        f.op("write_state", [], input="log", data="new")
        f.op("reshape", ("logits", dtype, (1, rows)), x="new", shape=np.array([1, rows], np.int32))
        f.returns("logits")
    return builder.save(path)


def spec_of(rows: int = 5, **functions: str) -> ProgramSpec:
    log = StateSpec(
        name="log", layers=(0,), kind="full", role="keys", rows=rows, max_rows=rows, window=None, row_shape=(1,),
        dtype="float16", static=True,
    )  # fmt: skip
    methods = {
        name: MethodSpec(
            function=functions.get(name), write_first=kind.write_first, logits=kind.logits, inputs=(), outputs=(),
            dims={}, mutates=("log",),
        )
        for name, kind in PROGRAMS.items()
    }  # fmt: skip
    return ProgramSpec(
        format="coreml", file="p.mlpackage", options={"weights": "float16", "keep_int8": []}, weights="float16",
        recipe=Recipe(kept=()), layout="static", max_kl_divergence=0.001, states=(log,), methods=methods,
        runtime="coreml", operators=(),
    )  # fmt: skip


def call(program: MLPackageProgram, ids: list[int], seq_len: int, states: list[torch.Tensor]) -> torch.Tensor:
    method = "main" if len(ids) == 1 else "prefill"
    return program.run(method, torch.tensor([ids]), torch.arange(seq_len)[None], states)


def test_two_functions_over_one_state(tmp_path: Path) -> None:
    program = MLPackageProgram(counter_package(tmp_path / "p.mlpackage"), spec_of())
    states = [torch.zeros(1, 5, 1, dtype=torch.float16)]
    logits = call(program, [7, 8], 2, states)
    assert logits.dtype == torch.float32 and logits.tolist() == [[7, 8, 0, 0, 0]]
    assert call(program, [1], 3, states).tolist() == [[7, 8, 2, 0, 0]]
    assert logits.tolist() == [[7, 8, 0, 0, 0]]
    assert states[0].flatten().tolist() == [7, 8, 2, 0, 0]


def test_functions_are_found_by_the_names_of_the_manifest(tmp_path: Path) -> None:
    program = MLPackageProgram(counter_package(tmp_path / "p"), spec_of(main="prefill", prefill="prefill"))
    states = [torch.zeros(1, 5, 1, dtype=torch.float16)]
    with pytest.raises(RuntimeLimitError, match=r"input_ids \[1, 1\]; expected input_ids \[1, 2..3\]"):
        call(program, [4], 2, states)
    with pytest.raises(BundleError, match="expected a function other"):
        MLPackageProgram(tmp_path / "p", spec_of(main="other"))


def test_limits_that_the_package_declares(tmp_path: Path) -> None:
    program = MLPackageProgram(counter_package(tmp_path / "p"), spec_of())
    states = [torch.zeros(1, 5, 1, dtype=torch.float16)]
    with pytest.raises(RuntimeLimitError, match=r"position_ids \[1, 6\]; expected position_ids \[1, 1..5\]"):
        call(program, [4], 6, states)
    with pytest.raises(RuntimeLimitError, match=r"input_ids \[1, 4\]; expected input_ids \[1, 2..3\]"):
        call(program, [4] * 4, 5, states)
    with pytest.raises(RuntimeLimitError, match=r"input_ids torch.int32 \[1, 2\]; expected int32 \[1, 1\]"):
        program.run("main", torch.tensor([[1, 2]]), torch.arange(2)[None], states)
    with pytest.raises(RuntimeLimitError, match="2 tokens; expected exactly 1"):
        CheckedProgram(program).run("main", torch.tensor([[1, 2]]), torch.arange(2)[None], states)
    for wrong in (torch.zeros(1, 4, 1, dtype=torch.float16), torch.zeros(1, 5, 1)):
        with pytest.raises(RuntimeLimitError, match=r"state log .*expected fp16 \[1, 5, 1\]"):
            call(program, [4], 1, [wrong])
    assert not states[0].any()


def test_a_package_whose_states_are_not_the_manifests(tmp_path: Path) -> None:
    for path, spec in (
        (counter_package(tmp_path / "a", 6), spec_of()),
        (counter_package(tmp_path / "b", 5, "fp32"), spec_of()),
    ):
        with pytest.raises(
            BundleError, match=r"over \{'log': .*expected .*over the manifest's \{'log': \('float16', \(1, 5, 1\)\)\}"
        ):
            MLPackageProgram(path, spec)
