"""Damaged tokenizers of every kind, templates and files of anything: a tokenizer and its chats, or one typed error.

`test_fuzz_tokenizer` damages the other files and GGUF metadata.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import KINDS
from toy import toy_manifest

from exporter.bundle import Bundle
from exporter.checkpoint import SafetensorsCheckpoint, open_checkpoint
from exporter.config import CheckpointConfig
from exporter.errors import UserError
from exporter.tokenizer import write_tokenizer
from runtime_ref.tokenizer import TextStream, Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% else %}<turn>{{ m.role "
    "~ '\\n' + m['content'].split('</x>')[-1] }}{% endif %}{{ eos_token }}{% endfor %}"
)
SHORT = "{{ bos_token }}{{ messages[-1]['content'] }}{{ eos_token }}"
CONFIG = {
    "bos_token": "<bos>", "eos_token": {"content": "<eos>", "special": True}, "unk_token": None, "add_bos_token": True,
    "chat_template": [{"name": "default", "template": SHORT}],
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**70, 1e400, "", "a", "<bos>", "\ud800", "\0", [], {}, [None], [[]],
    {"a": 1}, {"content": None}, {"default": 1}, {"type": "BPE"}, {"type": "Sequence", "decoders": []}, {"Fixed": 64},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, ["<bos>", 256], "{{ 1 / 0 }}", "{% for %}",
]  # fmt: skip
MANY = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, but no more than the first of a long list or mapping."""
    found = [path]
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items[:20]:
        found += places(item, (*path, key))
    return found


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one to three of its parts gone, doubled, renamed or of another kind."""
    value, odd = copy.deepcopy(value), st.sampled_from(ODD).map(copy.deepcopy)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(odd)
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["set", "set", "remove", "rename", "double"])):
            case "set":
                parent[path[-1]] = draw(odd)
            case "remove":
                del parent[path[-1]]
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["type", "", "id", "content"]))] = parent.pop(path[-1])
            case "double" if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[path[-1]]))
    return value


@st.composite
def damaged_text(draw: st.DrawFn, text: str) -> str:
    """`text` with some of its letters gone, doubled or exchanged, or parts of another template within."""
    parts = [
        "{{", "}}", "{%", "%}", "-", "'", "(", ")", "|", "~", "+ 1", "[0]", ".x", "content", "messages", "endif",
        "m.content", "range(9**9)", "* 99", "<turn>", "\n", "{#", "namespace()", "loop", "| tojson", "| int",
    ]  # fmt: skip
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 6))
        text = text[:start] + draw(st.sampled_from(["", text[start:end] * 2, *parts])) + text[end:]
    return text


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], None]:
    """Export the tokenizer of these files and chat with it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("bundle")
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400, "eos_token_id": 257}))
    (source / "model.safetensors").touch()
    (out / "tokenizer").mkdir()
    files = {
        "tokenizer.json": KINDS["byte_level"]().to_str(), "tokenizer_config.json": json.dumps(CONFIG),
        "special_tokens_map.json": '{"eos_token": "<eos>"}', "generation_config.json": '{"eos_token_id": [257]}',
    }  # fmt: skip
    checkpoint = open_checkpoint(CheckpointConfig(path=source))
    assert isinstance(checkpoint, SafetensorsCheckpoint)

    def run(changed: dict[str, str]) -> None:
        for path in (out / "tokenizer").iterdir():
            path.unlink()
        for name in {*files, *changed, "chat_template.jinja"}:
            (source / name).unlink(missing_ok=True)
        for name, text in (files | changed).items():
            (source / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            spec = write_tokenizer(checkpoint, out / "tokenizer")
            tokenizer = Tokenizer(Bundle(out, toy_manifest().model_copy(update={"tokenizer": spec})))
            prompt = tokenizer.encode("hi there")
            list(map(TextStream(tokenizer, prompt).push, prompt))
            messages = [{"role": "system", "content": " s "}, {"role": "user", "content": "a<turn></x>b <eos>"}]
            ids = tokenizer.encode_chat(messages) if spec.has_chat_template else []
        except UserError:
            return
        assert all(type(token) is int and 0 <= token < 400 for token in [*prompt, *ids])

    run({})
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tokenizers(attempt: Callable[[dict[str, str]], None], kind: str) -> None:
    whole = json.loads(KINDS[kind]().to_str())

    @settings(MANY, max_examples=1000 // len(KINDS))
    @given(value=damaged(whole))
    def check(value: Any) -> None:
        attempt({"tokenizer.json": json.dumps(value)})

    check()


@settings(MANY, max_examples=300)
@given(text=damaged_text(TEMPLATE))
def test_damaged_templates(attempt: Callable[[dict[str, str]], None], text: str) -> None:
    attempt({"chat_template.jinja": text})


@settings(MANY, max_examples=100)
@given(
    name=st.sampled_from(["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]),
    text=st.one_of(
        st.text(max_size=20), st.sampled_from(["[" * 3_000, '{"a":' * 3_000, "\ud800", "9" * 5000, "", "{}", "nan"])
    ),
)
def test_files_that_are_anything(attempt: Callable[[dict[str, str]], None], name: str, text: str) -> None:
    attempt({name: text})
