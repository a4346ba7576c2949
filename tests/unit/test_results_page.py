"""docs/results.md is what its JSON files say; several machines stand side by side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import measuring
import pytest
import results
from sections import apple_models, export_scaling, real_models
from sections.common import side_by_side

NAMES = ("quality", "peers", "real-models", "apple-models", "export-scaling")


def test_the_committed_page_is_that_of_the_committed_figures() -> None:
    assert results.page(results.DOCS / "results") == (results.DOCS / "results.md").read_text(), "run `make results`"


def test_rows_of_several_machines_stand_side_by_side() -> None:
    runs = [{"speeds": {"a": 1, "b": 2}}, {"speeds": {"b": 4, "c": 5}}]

    def rows_of(run: Any) -> list[list[str]]:
        return [[name, str(speed)] for name, speed in run["speeds"].items()]

    assert side_by_side(runs[:1], 1, ("name", "speed"), rows_of).splitlines()[2:] == ["| a | 1 |", "| b | 2 |"]
    head, _, *rows = side_by_side(runs, 1, ("name", "speed"), rows_of).splitlines()
    assert head == "| name | machine | speed |"
    assert rows == ["| a | A | 1 |", "| b | A | 2 |", "| b | B | 4 |", "| c | B | 5 |"]


@pytest.mark.parametrize("name", NAMES)
def test_every_section_takes_a_second_machine(name: str, tmp_path: Path) -> None:
    for one in NAMES:
        file = json.loads((results.DOCS / "results" / f"{one}.json").read_text())
        if one == name:
            other = copy.deepcopy(file["runs"][0]) | {"machine": "another machine", "date": "2027-01-02"}
            file["runs"].append(other)
        (tmp_path / f"{one}.json").write_text(json.dumps(file))
    page = results.page(tmp_path)
    assert page.count("- **B**: Measured 2027-01-02: another machine.") == 1
    lettered = [line for line in page.splitlines() if "| A |" in line]
    others = [line for line in page.splitlines() if "| B |" in line]
    assert len(lettered) > 5 and [line.replace("| A |", "| B |") for line in lettered] == others


def test_a_run_that_was_cut_off_leaves_out_what_it_has_not() -> None:
    begun = {"rows": {"gemma3_270m/small": {"export": {"file_bytes": 1e6, "cpu_seconds": 2, "peak_bytes": 3e6}}}}
    assert real_models.accuracy(begun) == [] == real_models.memory(begun)
    assert real_models.exports(begun) == [["Gemma 3 270M", "small", "1", "2", "3"]]
    begun = {"rows": {"coreml/int8": {"export": {}}}}
    assert apple_models.accuracy(begun) == [] == apple_models.costs(begun)


def test_the_worst_of_all_chunk_lengths_is_given() -> None:
    def comparison(reference: str, largest: float, mean: float, argmax: float, greedy: str | None) -> dict[str, Any]:
        return {
            "reference": reference, "max_abs_difference": largest, "mean_abs_difference": mean,
            "argmax_agreement": argmax, "greedy_agreement": greedy, "nll": 2.5 if greedy else None,
            "reference_nll": 2.25, "mean_kl_divergence": 0.125,
        }  # fmt: skip

    found = [
        comparison("eager", 9.0, 9.0, 0.0, None), comparison("transformers, chunks of 1", 1.0, 0.5, 1.0, "3 of 8"),
        comparison("transformers, chunks of 7", 0.5, 0.75, 0.5, "5 of 8"),
    ]  # fmt: skip
    (row,) = real_models.accuracy({"rows": {"smollm2_135m/small": {"verify": {"comparisons": found}}}})
    assert row == [
        "SmolLM2 135M Instruct", "small", "1", "0.75", "50.0%", "3 to 5 of 8", "2.5000", "+0.2500", "0.12", "",
    ]  # fmt: skip


def test_apples_rows_are_sorted_by_format_and_width() -> None:
    file = json.loads((results.DOCS / "results" / "apple-models.json").read_text())
    rows = [tuple(row[:2]) for row in apple_models.accuracy(file["runs"][0])]
    assert rows[:2] == [("Core ML", "float32"), ("Core ML", "float16")]
    assert rows[4:6] == [("Core ML", "palettized4"), ("Core AI", "float32")]


def test_the_line_through_models_of_equal_width() -> None:
    rows = {name: {"cpu_seconds": 10.0 + 2 * int(name), "peak_bytes": 1e9} for name in ("6", "12", "36")}
    seconds, memory = export_scaling.by_layer({"rows": rows | {"1B": {"cpu_seconds": 1e3, "peak_bytes": 1e10}}})
    assert seconds == ["CPU seconds", "10", "2.0", "2.0 to 2.0"]
    assert memory == ["peak MB", "1000", "0.0", "0.0 to 0.0"]


def test_a_bench_replaces_its_own_machine_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results" / "it.json"

    def run(machine: str, figure: int, keep: bool = False) -> list[tuple[str, dict[str, Any]]]:
        monkeypatch.setattr(measuring, "machine", lambda: machine)
        found = measuring.Results(file, keep=keep)
        found.own.setdefault("rows", {})[str(figure)] = figure
        found.save()
        return [(one["machine"], one["rows"]) for one in json.loads(file.read_text())["runs"]]

    assert run("here", 1) == [("here", {"1": 1})]
    assert run("there", 2) == [("here", {"1": 1}), ("there", {"2": 2})]
    assert run("here", 3, keep=True) == [("here", {"1": 1, "3": 3}), ("there", {"2": 2})]
    assert run("here", 4) == [("here", {"4": 4}), ("there", {"2": 2})]
