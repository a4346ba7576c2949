"""The comparison with peers: who runs when, what is compared, and what a worker says."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_peers
import numpy as np
import pytest
import torch
from peers.catalogue import PEERS, Peer
from peers.protocol import DECODED, divergence, mean_scores
from peers.schedule import above_bare, at, key, long_peak, median, ratio, resident, schedule
from sections.peers import section

WORKERS = Path(bench_peers.__file__).parent / "peers"
LENGTHS = (128, 2048, 32000)


def result(speed: float, **changes: Any) -> dict[str, Any]:
    lengths = {"128": speed, "2048": speed / 2}
    return {
        "prefill": lengths, "decode": lengths, "limits": lengths, "live_bytes": {"128": 1e6, "2048": 2e6},
        "peaks": {"128": 300e6, "2048": 400e6}, "peak_bytes": 400e6, "bare_bytes": 100e6, "file_bytes": 50e6,
        "resident": {"128": {"anonymous": 180e6, "file": 90e6}, "2048": {"anonymous": 270e6, "file": 100e6}},
        "bare": {"anonymous": 60e6, "file": 40e6},
        "load_seconds": 1.0, "first_token_seconds": 2.0, "bandwidth": 30e9, "nll": 2.5, "kl": None,
        "versions": {"it": "1"},
    } | changes  # fmt: skip


def run(number: int, name: str, found: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {"round": number, "index": 0, "name": name, "ours": name == "int8", "result": found} | more


def test_ours_stands_before_every_peer_in_every_round() -> None:
    slots = schedule(["int8"], {"a": None, "b": 2048, "c": None}, LENGTHS, 3)
    assert [slot.name for slot in slots] == ["int8", "a", "int8", "b", "int8", "c"] * 3
    assert [slot.index for slot in slots] == [0, 1, 2, 3, 4, 5] * 3


def test_long_contexts_run_once_and_nobody_runs_what_the_peer_cannot() -> None:
    slots = schedule(["int8"], {"b": 2048, "a": None, "c": None}, LENGTHS, 2)
    short = (128, 2048)
    assert [slot.lengths for slot in slots[:6]] == [(128,), (128,), LENGTHS, LENGTHS, short, LENGTHS]
    assert [slot.lengths for slot in slots[6:]] == [(128,), (128,), short, short, short, short]


def test_everybody_is_scored_once() -> None:
    slots = schedule(["int8", "int4"], {"a": None, "b": None}, LENGTHS, 3)
    assert [slot.name for slot in slots if slot.scored] == ["int8", "a", "int4", "b"]


def test_presets_take_turns_and_none_is_left_out() -> None:
    slots = schedule(["p", "q"], {"a": None}, LENGTHS, 2)
    assert [slot.name for slot in slots] == ["p", "a", "q", "q", "a", "p"]
    assert [slot.name for slot in schedule(["p", "q", "r"], {}, LENGTHS, 1)] == ["p", "q", "r"]


def test_a_machine_that_slows_down_leaves_the_ratio() -> None:
    runs = [
        run(0, "int8", result(200.0)), run(0, "int8", result(180.0)), run(0, "peer", result(95.0)),
        run(1, "int8", result(20.0)), run(1, "peer", result(10.0)),
        run(2, "int8", result(90.0)), run(2, "peer", result(30.0)),
        run(3, "int8", result(1.0)), run(3, "peer", None),
    ]  # fmt: skip
    assert ratio(runs, "int8", "peer", at("decode", 128)) == 2.0  # of 2, 2 and 3; the last round has no peer
    assert median(runs, "int8", at("decode", 128)) == 55.0  # of 190, 20, 90 and 1
    assert ratio(runs, "int8", "peer", at("decode", 8192)) is None
    assert ratio(runs, "int8", "none", at("decode", 128)) is None


def test_memory_is_compared_above_the_bare_process_at_one_length() -> None:
    long = result(1.0, peaks={"128": 300e6, "2048": 400e6, "8192": 900e6}, peak_bytes=900e6)
    assert above_bare(result(1.0)) == above_bare(long) == 300e6
    assert (long_peak(result(1.0)), long_peak(long)) == (None, 800e6)
    assert (resident("anonymous")(long), resident("file")(long)) == (210e6, 60e6)
    assert key("nll")(result(1.0, nll=None)) is None


def page(*runs: dict[str, Any], **more: Any) -> str:
    row = {"reference_nll": 2.5, "missing": {}, "runs": list(runs)} | more
    models = {"gemma3_270m": row}
    return section([{"date": "2026-01-01", "machine": "a machine", "threads": 2, "models": models}])


def cells(page: str, title: str, start: str) -> dict[str, str]:
    """The first row that starts so of the first table behind `title`, by the names of its columns."""
    lines = page[page.index(title) :].splitlines()
    head = next(line for line in lines if line.startswith("|"))
    line = next(line for line in lines if line.startswith(start))
    return dict(zip(*([cell.strip() for cell in one.split("|")[1:-1]] for one in (head, line)), strict=True))


SPEEDS, SIZES, RATIOS, LIMITS = "Tokens a second:", "Memory, time", "Ours over the peer", "Decoding against memory"


def test_the_page_names_ratios_quality_and_what_is_missing() -> None:
    runs = [
        run(0, "int8", result(200.0, nll=2.51, kl=0.0123)), run(0, "openvino", result(100.0)),
        run(0, "llama_cpp", None, error="exit code 1: no memory"),
    ]  # fmt: skip
    missing = {"litert": "not installed: python install.py"}
    costs = {"int8": {"cpu_seconds": 93.7, "peak_bytes": 2.94e9}}
    found = page(*runs, missing=missing, costs=costs)
    assert "Measured 2026-01-01: a machine." in found
    ratios = cells(found, RATIOS, "| **int8** | OpenVINO")
    assert {ratios[f"{kind} {length}"] for kind in ("prefill", "decode") for length in (128, 2048)} == {"2.00"}
    ours, peer = cells(found, SIZES, "| **int8**"), cells(found, SIZES, "| OpenVINO")
    names = ("NLL from float32", "KL", "export CPU s", "export GB")
    assert [ours[name] for name in names] == ["+0.0100", "0.0123", "94", "2.9"]
    assert [peer[name] for name in names] == ["+0.0000", "", "", ""]
    assert "llama.cpp, the GGUF itself failed: exit code 1: no memory" in found
    assert "LiteRT int8 is missing: not installed: python install.py" in found
    limit = cells(found, LIMITS, "| **int8** | 2,048")
    assert list(limit.values())[2:] == ["2.0", "100", "100%"]


def test_one_run_is_called_one_run_and_a_range_needs_three_rounds() -> None:
    def rounds(count: int) -> str:
        speeds = (200.0, 180.0, 190.0)[:count]
        return page(
            *(run(number, name, result(speed)) for number, speed in enumerate(speeds) for name in ("int8", "openvino"))
        )

    one, two, three = map(rounds, (1, 2, 3))
    assert "One run of each peer" in one and "edian of" not in one and "Medians" not in one
    assert cells(one, SPEEDS, "| **int8**")["decode 128"] == "200"
    assert "Two rounds: a figure is the mean of both" in two
    assert cells(two, SPEEDS, "| **int8**")["decode 128"] == "190"
    assert "Medians of 3 rounds" in three
    assert cells(three, SPEEDS, "| **int8**")["decode 128"] == "190 (180 to 200)"


def test_the_page_tells_what_was_written_from_what_was_mapped_where_that_is_known() -> None:
    peer = result(1.0, resident={"2048": {"anonymous": 480e6, "file": 40e6}}, bare={"anonymous": 60e6, "file": 40e6})
    both = page(run(0, "int8", result(1.0)), run(0, "openvino", peer))
    found = cells(both, SIZES, "| **int8**")
    assert {"peak MB": "300", "anonymous MB": "210", "file pages MB": "60"}.items() <= found.items()
    ratios = cells(both, RATIOS, "| **int8** | OpenVINO")
    assert ratios["anonymous MB"] == "0.50" and "file pages MB" not in ratios, "a peer may have none"
    old = {name: value for name, value in peer.items() if name not in ("resident", "bare")}
    known = cells(page(run(0, "int8", old), run(0, "openvino", old)), SIZES, "| **int8**").keys()
    assert known & {"anonymous MB", "file pages MB", "peak MB"} == {"peak MB"}


def test_a_peer_without_environment_or_model_is_named_with_its_repair(tmp_path: Path) -> None:
    peer = next(peer for peer in PEERS if peer.convert is not None)
    assert "not installed" in str(bench_peers.missing(peer, "gemma3_270m", tmp_path))
    (tmp_path / peer.name).mkdir()
    (tmp_path / peer.name / "installed.json").write_text("[]")
    said = str(bench_peers.missing(peer, "gemma3_270m", tmp_path))
    assert "not converted" in said and f"--only {peer.name}" in said
    peer.model(tmp_path, "gemma3_270m").mkdir()
    assert bench_peers.missing(peer, "gemma3_270m", tmp_path) is None


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_worker_and_exact_pins(peer: Peer) -> None:
    assert (WORKERS / f"worker_{peer.name}.py").is_file()
    assert all("==" in requirement for requirement in peer.requirements)


FAKE = """
import sys
from protocol import measure
class Fake:
    files = ()
    calls = 0
    def __init__(self, model, request): print("a library that prints")
    def run(self, ids, count):
        Fake.calls += 1
        return [len(ids) / (1000 * Fake.calls), *[0.02] * (count // 2), *[0.01] * (count // 2)]
    def rows(self, ids, prefix):
        for token in ids[prefix:]:
            yield [0.0, 0.0, 0.0, 0.0]
measure(Fake, (), sys.argv[1:])
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    (tmp_path / "fake.py").write_text(FAKE)
    return [sys.executable, str(tmp_path / "fake.py"), str(tmp_path)]


def test_a_worker_reports_medians_alone_on_standard_output(worker: list[str]) -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.125, 0.125]] * 1000)).astype(np.float16)
    np.save(worker[-1] + "/expected.npy", expected)
    request = {
        "ids": [0, 1, 2] * 1000, "threads": 1, "lengths": [128, 2500], "repeats": 3, "score": [512, 1000],
        "expected": worker[-1] + "/expected.npy",
    }  # fmt: skip
    found, error = bench_peers.run_worker(worker, request, {"PYTHONPATH": str(WORKERS)})
    assert error == ""
    assert found["prefill"]["128"] == pytest.approx(3000.0)  # calls 2, 3 and 4; the first warmed up
    assert found["prefill"]["2500"] == pytest.approx(5000.0)  # one call, the fifth
    assert found["decode"]["128"] == pytest.approx(1 / 0.015) and DECODED % 2 == 0
    assert found["nll"] == pytest.approx(math.log(4))
    assert found["kl"] == pytest.approx(math.log(4) - 1.75 * math.log(2), abs=1e-3)
    assert 0 < found["bare_bytes"] <= found["peak_bytes"]


def test_what_libraries_print_is_kept_off_standard_output(worker: list[str], tmp_path: Path) -> None:
    request = {"ids": list(range(200)), "threads": 1, "lengths": [128], "repeats": 1, "score": None}
    (tmp_path / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [*worker, str(tmp_path / "request.json")], env={"PYTHONPATH": str(WORKERS)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["nll"] is None
    assert "a library that prints" in done.stderr


def test_a_worker_that_fails_is_named_by_its_last_line_or_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, error = bench_peers.run_worker([sys.executable, "-c", "raise OSError('no such file')"], {}, {})
    assert found is None and error == "exit code 1: OSError: no such file"
    found, error = bench_peers.run_worker([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}, {})
    assert found is None and error == "killed by SIGKILL, no output"
    monkeypatch.setattr(bench_peers, "TIMEOUT", 0.2)
    found, error = bench_peers.run_worker([sys.executable, "-c", "import time; time.sleep(9)"], {}, {})
    assert found is None and "no result" in error


def test_scores_are_cross_entropy_and_divergence_from_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, floats = torch.randn(7, 50, generator=generator) * 30, torch.randn(7, 50, generator=generator) * 30
    true = [3, 0, 49, 7, 7, 12, 20]
    cross_entropy = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(true))
    logq, logp = torch.log_softmax(logits.double(), 1), torch.log_softmax(floats.double(), 1)
    divergences = torch.nn.functional.kl_div(logq, logp, log_target=True, reduction="batchmean")
    nll, kl = mean_scores(iter(logits.numpy()), true, logp.numpy())
    assert nll == pytest.approx(float(cross_entropy), rel=1e-12)
    assert kl == pytest.approx(float(divergences), rel=1e-12)


def test_what_float32_expected_keeps_its_divergence_in_sixteen_bits() -> None:
    """The distribution of a large vocabulary, and one a hundredth of a nat away from it."""
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(100_000, generator=generator) * 4
    near = floats + 0.15 * torch.randn(100_000, generator=generator)
    logp = torch.log_softmax(floats, 0)
    exact = divergence(logp.numpy(), near.numpy())
    assert 0.005 < exact < 0.02
    assert divergence(logp.half().numpy(), near.numpy()) == pytest.approx(exact, rel=5e-3)
    assert 0 <= divergence(logp.half().numpy(), floats.numpy()) < 1e-5


def test_a_cost_is_that_of_the_command_and_of_what_it_waited_for(tmp_path: Path) -> None:
    """`cost.py` as a process, whose child has a child that takes the memory and the time."""
    file = bench_peers.cost_file(tmp_path / "model")
    work = "x = bytearray(400_000_000); sum(range(5_000_000))"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    command = [sys.executable, str(WORKERS / "cost.py"), str(file), sys.executable, "-c"]
    assert subprocess.run([*command, parent], check=False).returncode == 0
    (found,) = bench_peers.costs({"it": tmp_path / "model", "another": tmp_path / "other"}).values()
    assert 400e6 < found["peak_bytes"] < 600e6 and 0.05 < found["cpu_seconds"] < 60
    assert subprocess.run([*command, "pass"], check=False).returncode == 0
    (after,) = bench_peers.costs({"it": tmp_path / "model"}).values()
    assert after["peak_bytes"] < 100e6


def test_a_command_that_fails_leaves_no_cost_and_keeps_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKERS / "cost.py"), str(tmp_path / "cost.json"), sys.executable, "-c"]
    assert subprocess.run([*command, "raise SystemExit(3)"], check=False).returncode == 3
    assert subprocess.run([*command, "import os; os.kill(os.getpid(), 9)"], check=False).returncode == 137
    assert not (tmp_path / "cost.json").exists()


def test_a_peer_that_cannot_be_installed_does_not_stop_the_others(tmp_path: Path) -> None:
    """`install.py` as a process over a catalogue of two: the first conversion fails, the second succeeds."""
    for name in ("install.py", "cost.py"):
        (tmp_path / name).write_text((WORKERS / name).read_text())
    (tmp_path / "catalogue.py").write_text(
        (WORKERS / "catalogue.py").read_text().partition("PEERS = (")[0]
        + "bad = lambda programs, checkpoint, out: ['false']\n"
        + "good = lambda programs, checkpoint, out: ['mkdir', '-p', str(out)]\n"
        + "PEERS = (Peer('bad', 'Bad', (), convert=bad), Peer('good', 'Good', (), convert=good))\n"
    )
    root = tmp_path / "peers"
    for model in ("gemma3_270m", "smollm2_135m"):
        (root / "models" / model).mkdir(parents=True)
        (root / "models" / model / "reference.json").write_text("{}")
    for name in ("bad", "good"):
        (root / name).mkdir()
        (root / name / "installed.json").write_text(json.dumps([[], [], {}]))
    command = [sys.executable, str(tmp_path / "install.py"), "--environments", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "FAILED Bad: exit code 1" in done.stdout and "FAILED Good" not in done.stdout
    assert not (root / "bad" / "gemma3_270m").exists() and not (root / "bad" / "gemma3_270m.cost.json").exists()
    assert json.loads((root / "good" / "gemma3_270m.cost.json").read_text())["peak_bytes"] > 0
    assert (root / "good" / "smollm2_135m").is_dir()
