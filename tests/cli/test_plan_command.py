"""``python -m exporter plan``: what it prints, draws, refuses, and does not do."""

from __future__ import annotations

import errno
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.image
import pytest
import torch
import yaml
from conftest import write_config

from exporter.checkpoint import Checkpoint
from exporter.cli.app import main
from exporter.cli.plot import HEIGHT, WIDTH

ROOT = Path(__file__).parents[2]
INKLING = ROOT / "configs" / "architectures" / "inkling.yaml"
GPT_OSS_LITE = ROOT / "configs" / "architectures" / "gpt_oss_lite.yaml"
Capture = pytest.CaptureFixture[str]


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    """The exit code of ``python -m exporter plan argv``."""
    monkeypatch.setattr("sys.argv", ["exporter", "plan", *[str(part) for part in argv]])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def rows(monkeypatch: pytest.MonkeyPatch, capfd: Capture, *argv: object) -> list[list[str]]:
    """The cells of every row of the tables."""
    assert run(monkeypatch, *argv) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def refused(monkeypatch: pytest.MonkeyPatch, capfd: Capture, *argv: object) -> str:
    assert run(monkeypatch, *argv) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("error:") == 1
    return " ".join(captured.err.split())


def test_inkling_in_both_units(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    table = rows(monkeypatch, capfd, "--model", INKLING, "--contexts", "8192,32768,131072")
    assert ["8192", "440.00 MiB", "704.00 MiB", "12.12 MiB", "1.13 GiB", "7.57 GiB", "6.71x"] in table
    assert ["131072", "440.00 MiB", "11.00 GiB", "12.12 MiB", "11.44 GiB", "121.01 GiB", "10.58x"] in table
    assert ["131072", "461.37 MB", "11.81 GB", "12.71 MB", "12.29 GB", "129.94 GB", "10.58x"] in table
    assert ["sliding", "55", "880.00 KiB", "901.12 KB", "0 B", "0 B"] in table
    assert ["global", "11", "88.00 KiB", "90.11 KB", "88.00 KiB", "90.11 KB"] in table
    assert ["all", "66", "968.00 KiB", "991.23 KB", "88.00 KiB", "90.11 KB"] in table
    assert len(table) == 2 * 3 + 4


def test_gpt_oss_lite(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    table = rows(monkeypatch, capfd, "--model", GPT_OSS_LITE, "--contexts", "4096,8192,32768,131072")
    assert [row[-1] for row in table[:4]] == ["1.94x", "1.97x", "1.99x", "2.00x"]
    assert table[3][-3:-1] == ["1.13 GiB", "2.25 GiB"]


def test_what_docs_memory_says_is_printed(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    """The last column of the table in docs/memory.md, for the models that need no checkpoint."""
    table = rows(monkeypatch, capfd, "--model", INKLING, "--contexts", "8192,32768,131072")
    document = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for column in (5, 4):  # full caches, total
        numbers = [row[column].removesuffix(" GiB") for row in table[:3]]
        assert f"| {' / '.join(numbers)} GiB |" in document
    assert f"in real GB the full caches at 128k are {table[5][5].removesuffix(' GB')}" in document


def test_what_docs_memory_says_of_dtypes_is_printed(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    """Every column, over the same layers in any dtype."""
    arguments = (
        "--model", ROOT / "configs" / "architectures" / "gemma3_270m_int8.yaml", "--contexts", "512,8192,32768",
    )  # fmt: skip
    columns = [
        [row[4] for row in rows(monkeypatch, capfd, *arguments, *more)[:3]]
        for more in (
            ("--set", "cache.dtype=float32"),
            ("--set", "cache.dtype=float16"),
            ("--set", "cache.dtype=float16", "--set", "cache.global_dtype=int8"),
            (),
        )
    ]
    document = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for context, *sizes in zip((512, 8192, 32768), *columns, strict=True):
        assert f"| {context} | {' | '.join(sizes)} |" in document


def test_a_checkpoint_is_described_without_reading_or_tracing_it(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    monkeypatch.setattr(Checkpoint, "load_state_dict", None)
    monkeypatch.setattr(torch.export, "export", None)
    config = write_config(tmp_path / "tiny.yaml", tiny_checkpoint, max_context_length=100, cache={"ring_slack": 2})
    # 100 tokens: two sliding layers of 8 + 2 rows and a global one, K and V, 2 KV heads x 16 x 4 bytes.
    sliding, glob, full = 2 * 2 * 10 * 128, 2 * 100 * 128, 3 * 2 * 100 * 128
    cells = [f"{count / 1024:.2f} KiB" if count else "0 B" for count in (sliding, glob, 0, sliding + glob, full)]
    table = rows(monkeypatch, capfd, "--model", config)
    assert table[0] == ["100", *cells, f"{full / (sliding + glob):.2f}x"]  # the config's own limit, unasked
    assert table[-1] == ["all", "3", "768 B", "768 B", "256 B", "256 B"]
    # What the model can do, though the config asks for less.
    assert rows(monkeypatch, capfd, "--model", config, "--contexts", "160")[0][0] == "160"
    halves = rows(monkeypatch, capfd, "--model", config, "--set", "cache.dtype=float16")
    assert halves[0][1] == f"{sliding / 2 / 1024:.2f} KiB"
    assert "at most 160" in refused(monkeypatch, capfd, "--model", config, "--contexts", "100,161")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_an_architecture_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from exporter.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    argv = [sys.executable, "-c", code, "plan", "--model", str(INKLING)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "121.01 GiB" in done.stdout


def test_a_plot_is_a_png_of_the_stated_size(monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path) -> None:
    target = tmp_path / "plan.PNG"
    target.write_bytes(b"old")
    assert run(monkeypatch, "--model", INKLING, "--plot", target) == 0
    assert f"wrote {target}" in capfd.readouterr().out
    data = target.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT)
    pixels = matplotlib.image.imread(target, format="png")
    assert pixels[..., :3].std() > 0.05  # something is drawn
    assert [path.name for path in tmp_path.iterdir()] == ["plan.PNG"]


def test_the_lines_of_a_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path, **_: seen.append((self, path.touch())))
    assert run(monkeypatch, "--model", INKLING, "--contexts", "131072,8192", "--plot", tmp_path / "plan.png") == 0
    (axes,) = seen[0][0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {line.get_label().split(":")[0]: dict(zip(*line.get_data(), strict=True)) for line in axes.lines}
    gib = 2**30
    conv = 12_705_792
    assert lines["all layers, full caches"][8192] == 7.5625 * gib + conv
    assert lines["all layers, rings + global"][131072] == 11 * gib + 440 * 2**20 + conv
    assert lines["sliding layers, rings"][512] == lines["sliding layers, rings"][131072] == 440 * 2**20
    assert lines["sliding layers, full caches"][131072] == 110 * gib
    assert lines["global layers"][131072] == 11 * gib
    assert set(lines["convolutions"].values()) == {conv}


@pytest.mark.parametrize(("context", "name"), [("1", "a$b^{"), ("3", "x"), ("1099511627776", "[red]")])
def test_extremes_can_be_drawn(
    *, monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path, context: str, name: str
) -> None:
    layer = {"kind": "global", "num_key_value_heads": 2**40, "head_dim": 2**40}
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"name": name, "layers": [layer]}))
    assert run(monkeypatch, "--model", path, "--contexts", context, "--plot", tmp_path / "a.png") == 0
    assert f"{name}: 1 layers" in capfd.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--contexts", "8192,many"], "positive whole numbers"),
        (["--contexts", "0"], "positive whole numbers"),
        (["--contexts", "131073"], "at most 131072"),
        (["--plot", "plan.pdf"], "ends in .png"),
        (["--plot", "nowhere/plan.png"], "in a directory that exists"),
    ],
)
def test_bad_arguments(
    *, monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path, argv: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(monkeypatch, capfd, "--model", INKLING, *argv)
    assert not list(tmp_path.iterdir())


def test_a_bad_architecture(monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\nlayers: [{kind: sliding, width: 3}]\n")
    message = refused(monkeypatch, capfd, "--model", path)
    assert "unknown key 'width' in layers.0" in message
    assert "no.yaml" in refused(monkeypatch, capfd, "--model", tmp_path / "no.yaml")


def test_a_full_disk_leaves_the_old_picture(monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path) -> None:
    target = tmp_path / "plan.png"
    target.write_bytes(b"old")

    def no_space(self: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", no_space)
    assert "No space left" in refused(monkeypatch, capfd, "--model", INKLING, "--plot", target)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]
    assert target.read_bytes() == b"old"


def test_a_folder_where_the_picture_should_go(monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path) -> None:
    (tmp_path / "plan.png").mkdir()
    assert "it is a directory" in refused(monkeypatch, capfd, "--model", INKLING, "--plot", tmp_path / "plan.png")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]
