"""Command lines of both packages end with 0, 1 or 2, whatever they say."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import toy_bundle

from exporter.cli import app as exporter
from runtime_ref import __main__ as runtime
from runtime_ref import bench

MANY = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = [
    "0", "1", "-1", "2", "64", "1e9", "nan", "inf", "9" * 30, "", " ", "[/b]", "a=b", "a.b=[", "1,2", "1,,2", "none",
    "½", "\ud800", "x" * 300, "executorch", "coreml", "-", "--", "/", ".", "*x", "cache.dtype=int8", "name=&a [*a]",
    "max_context_length=0", "executorch.quantization=small", "targets=[coreml]",
]  # fmt: skip
VALUES = st.one_of(st.sampled_from(ODD), st.text(max_size=6), st.integers(-3, 10**6).map(str))
OPTIONS = {
    "exporter": {
        "export": ["--dry-run", "--set", "--model", "--out", "--help"],
        "plan": ["--contexts", "--plot", "--set", "--model"], "inspect": ["--check", "--format"],
        "verify": ["--model", "--set"], "families": [], "nothing": [],
    },
    "runtime_ref": {
        "generate": ["--bundle", "--format", "--prompt", "--chat", "--parse-special", "--max-new-tokens",
                     "--temperature", "--top-p", "--top-k", "--seed", "--chunk"],
        "score": ["--bundle", "--ids", "--prefill", "--chunk", "--out", "--logits"],
        "memory": ["--bundle", "--tokens", "--contexts", "--format"],
        "bench": ["--bundle", "--threads", "--prefills", "--contexts", "--no-nll", "--json"], "nothing": [],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What options most often name."""
    folder = tmp_path_factory.mktemp("commands")
    bundle = toy_bundle(folder / "toy", template="{{ messages[0].content }}").path
    (folder / "c.yaml").write_text(yaml.safe_dump({"name": "x", "checkpoint": {"path": str(folder)}}))
    (folder / "ids.json").write_text("[1, 2, 3]")
    return {
        "--bundle": str(bundle), "--model": str(folder / "c.yaml"), "--ids": str(folder / "ids.json"),
        "--out": str(folder / "out"), "--json": str(folder / "json"), "--plot": str(folder / "p.png"),
    }  # fmt: skip


def end(main: Callable[[], object]) -> int:
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@MANY
@pytest.mark.parametrize("package", OPTIONS)
@given(data=st.data())
def test_any_command_line(
    package: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: st.DataObject
) -> None:
    monkeypatch.chdir(tmp_path)  # names that were drawn are made here
    monkeypatch.setattr(bench, "english_tokens", lambda bundle: [1, 2, 3])
    command = data.draw(st.sampled_from(sorted(OPTIONS[package])))
    arguments = [command]
    if command in ("inspect", "verify"):
        arguments.append(data.draw(st.one_of(st.just(places["--bundle"]), VALUES)))
    for option in data.draw(st.lists(st.sampled_from(OPTIONS[package][command] or ["--x"]), max_size=4)):
        usual = [st.just(places[option])] * 3 if option in places else []
        arguments += [option, *data.draw(st.lists(st.one_of(*usual, VALUES), max_size=1))]
    for option in ("--bundle", "--model"):  # more often than not complete
        if option in OPTIONS[package][command] and option not in arguments and data.draw(st.booleans()):
            arguments += [option, places[option]]
    if package == "runtime_ref":
        code = end(lambda: runtime.main(arguments))
    else:
        monkeypatch.setattr("sys.argv", ["exporter", *arguments])
        code = end(exporter.main)
    assert code in (0, 1, 2), arguments
