"""The command line: what it prints, what it refuses, and how."""

import errno
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from toy import oracle, toy_bundle, toy_manifest, toy_program

from runtime_ref.__main__ import main
from runtime_ref.tokenizer import Tokenizer

MANIFEST = toy_manifest(("ring", "full", "conv"))


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose program is the toy model."""
    toy_bundle(tmp_path / "toy", MANIFEST, template="<{{ messages[0].content }}>")
    for module in ("runtime_ref.programs", "runtime_ref.session"):
        monkeypatch.setattr(f"{module}.load_program", lambda bundle: toy_program(bundle.manifest))
    return tmp_path / "toy"


def succeed(*argv: object) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    assert caught.value.code == 0


def refuse(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """One message on standard error, nothing on standard output, code 2."""
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def write_ids(directory: Path, ids: object) -> Path:
    path = directory / "ids.json"
    path.write_text(ids if isinstance(ids, str) else json.dumps(ids))
    return path


def greedy(bundle: Path, ids: Sequence[int], count: int) -> str:
    from exporter.bundle import read_bundle

    sequence = list(ids)
    for _ in range(count):
        sequence.append(int(oracle(MANIFEST, sequence)[-1].argmax()))
    return Tokenizer(read_bundle(bundle)).decode(sequence[len(ids) :])


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_generate_streams_the_text_of_the_model(bundle: Path, capsys: pytest.CaptureFixture[str], chunk: int) -> None:
    from exporter.bundle import read_bundle

    succeed("generate", "--bundle", bundle, "--prompt", "a longer prompt", "--max-new-tokens", 20, "--chunk", chunk)
    out, err = capsys.readouterr()
    ids = Tokenizer(read_bundle(bundle)).encode("a longer prompt")
    assert out.rstrip("\n") == greedy(bundle, ids, 20).rstrip("\ufffd\n")
    assert "20 tokens, ended by 20 new tokens | prefill 16 tokens, " in err
    assert "tokens/s" in err
    assert "[kv] 0 tokens | sliding 1 x 8 rows" in err  # at load
    assert "[kv] 35 tokens | sliding 1 x 8 rows" in err


def test_generate_draws_by_seed_and_knows_the_chat_template(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        succeed(
            "generate", "--bundle", bundle, "--prompt", "hi", "--chat", "--temperature", 3, "--top-k", 200,
            "--top-p", 0.99, "--seed", seed,
        )  # fmt: skip
        out, err = capsys.readouterr()
        texts.append(out)
        assert "prefill 5 tokens" in err  # BOS < h i >
    assert texts[0] == texts[1] != texts[2]


def test_control_tokens_of_a_prompt_are_text_unless_asked_for(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BOS, <, the prompt and > of the template."""
    for options, tokens in (([], 1 + 1 + 13 + 1), (["--parse-special"], 1 + 1 + 1 + 1)):
        succeed(
            "generate", "--bundle", bundle, "--chat", "--prompt", "<end_of_turn>", "--max-new-tokens", 1, *options
        )  # fmt: skip
        assert f"prefill {tokens} tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "x", "--parse-special"], "no --chat"),
        (["--prompt", "x\udcff"], "text that the tokenizer takes"),
        (["--chat", "--prompt", "x\udcff"], "text that the tokenizer takes"),
        (["--prompt", "x" * 200], "201 tokens after 0; expected at most 96"),
        (["--prompt", "x", "--chunk", "17"], "expected 1 to 16"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--top-k", "4"], "none at temperature 0"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "x", "--colour", "red"], "colour"),
        ([], "--prompt"),
    ],
)
def test_generate_refuses(bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert message in refuse(capsys, "generate", "--bundle", bundle, *options)


@pytest.mark.parametrize("command", ["generate", "score", "memory"])
def test_a_missing_or_altered_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    options: dict[str, list[object]] = {
        "generate": ["--prompt", "x"],
        "score": ["--ids", write_ids(tmp_path, [1]), "--prefill", 0, "--chunk", 1, "--out", tmp_path / "s.npz"],
        "memory": [],
    }
    more = options[command]
    assert "no such directory" in refuse(capsys, command, "--bundle", tmp_path / "nowhere", *more)
    (tmp_path / "empty").mkdir()
    assert "no manifest.json" in refuse(capsys, command, "--bundle", tmp_path / "empty", *more)
    toy_bundle(tmp_path / "toy")
    if command != "memory":  # which reads the manifest alone
        (tmp_path / "toy" / "model.pte").write_bytes(b"altered")
        assert "sha256" in refuse(capsys, command, "--bundle", tmp_path / "toy", *more)


def test_score_writes_what_the_model_says(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = list(range(30, 60))
    options = ["--ids", write_ids(tmp_path, ids), "--prefill", 20, "--chunk", 16, "--out", tmp_path / "s.npz"]
    succeed("score", "--bundle", bundle, *options)
    out, err = capsys.readouterr()
    assert "12 positions of 30 tokens" in out and err.startswith("[kv] 0 tokens | sliding 1 x 8 rows")
    with np.load(tmp_path / "s.npz") as arrays:
        assert arrays["position"].tolist() == [15, 19, *range(20, 30)]
        assert "logits" not in arrays
        want = oracle(MANIFEST, ids)[arrays["position"]]
        assert arrays["argmax"].tolist() == want.argmax(1).tolist()
        assert np.isnan(arrays["logprob"]).tolist() == [False] * 11 + [True]
    succeed("score", "--bundle", bundle, *options, "--logits")
    with np.load(tmp_path / "s.npz") as arrays:
        np.testing.assert_allclose(arrays["logits"], want.numpy(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        ("[1, 2", 0, 1, "ids.json"),
        ({"ids": [1]}, 0, 1, "one list of integers"),
        ([1, 2.0], 0, 1, "one list of integers"),
        ([], 0, 1, "no tokens"),
        ([1, 999], 0, 1, "token id 999"),
        ([1, 2], 3, 1, "0 to 2"),
        ([1, 2], -1, 1, "0 to 2"),
        ([1, 2], 0, 0, "chunk 0"),
        ([1] * 97, 1, 1, "97 tokens"),
    ],
)
def test_score_refuses(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[object, int, int, str]
) -> None:
    ids, prefill, chunk, message = case
    out = tmp_path / "s.npz"
    options = ["--ids", write_ids(tmp_path, ids), "--prefill", prefill, "--chunk", chunk, "--out", out]
    assert message in refuse(capsys, "score", "--bundle", bundle, *options)
    assert not out.exists()


def test_a_full_disk_keeps_the_older_scores(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "s.npz"
    options = ["--ids", write_ids(tmp_path, [1, 2]), "--prefill", 2, "--chunk", 2, "--out", out]
    assert "a directory that exists" in refuse(capsys, "score", "--bundle", bundle, *options)
    out.parent.mkdir()
    out.write_bytes(b"older")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runtime_ref.score.np.savez", full)
    assert "No space left" in refuse(capsys, "score", "--bundle", bundle, *options)
    assert {p.name: p.read_bytes() for p in out.parent.iterdir()} == {"s.npz": b"older"}


def test_memory_by_kind_and_against_full_caches(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = toy_manifest(("ring", "ring", "ring", "full", "conv"), window=512, context=32768)
    toy_bundle(bundle, big)
    succeed("memory", "--bundle", bundle, "--tokens", 100)
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in out.splitlines() if "│" in line]
    assert "Cache after 100 tokens" in out
    assert rows[0] == ["sliding", "3", "512", "0.09 MiB", "0.02 MiB"]
    assert rows[1][:3] == ["global", "1", "128"]
    assert rows[2][:3] == ["conv", "1", "2"]
    assert [row[0] for row in rows[3:]] == ["512", "2048", "8192", "32768"]
    assert rows[-1] == ["32768", "2.09 MiB", "8.00 MiB", "74%"]
    succeed("memory", "--bundle", bundle, "--contexts", "1024, 4096")
    out = capsys.readouterr().out
    assert "Cache after 32768 tokens" in out
    assert "4096" in out
    assert "8192" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "12,many"], "many"),
        (["--contexts", "0"], "positive"),
        (["--contexts", "97"], "0 to 96"),
        (["--tokens", "97"], "0 to 96"),
        (["--tokens", "-1"], "0 to 96"),
    ],
)
def test_memory_refuses(bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert message in refuse(capsys, "memory", "--bundle", bundle, *options)


def test_as_a_process(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "runtime_ref"]
    help_text = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(command in help_text for command in ("generate", "score", "memory"))
    missing = subprocess.run(
        [*run, "memory", "--bundle", str(tmp_path / "nowhere")], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert missing.stdout == ""
    assert missing.stderr == (
        "error: bundle nowhere: got no such directory; expected a bundle directory with manifest.json. "
        "Point at the directory that `export` wrote.\n"
    )
