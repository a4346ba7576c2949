"""A tokenizer whose files are nearly right is written or refused by one typed error, and so is a chat with it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated
from test_gguf_tokenizer import Holder, byte_level, sentencepiece
from tokenizers import processors
from toy import byte_tokenizer, toy_bundle

from exporter.bundle import Bundle
from exporter.checkpoint import open_checkpoint
from exporter.config import CheckpointConfig
from exporter.errors import UserError
from exporter.tokenizer import write_tokenizer
from runtime_ref import tokenizer as runtime

MANY = settings(max_examples=1000, deadline=None)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}<eos>\n{% endfor %}"


def tokenizer_json() -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return dict(json.loads(tokenizer.to_str()))


FILES: dict[str, Any] = {
    "tokenizer": tokenizer_json(),
    "tokenizer_config": {
        "bos_token": "<bos>", "eos_token": {"content": "<eos>", "special": True}, "add_bos_token": True,
        "pad_token": None, "chat_template": [{"name": "default", "template": TEMPLATE}],
        "extra_special_tokens": {"image_token": "<eos>"},
    },
    "special_tokens_map": {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}},
    "generation_config": {"bos_token_id": 256, "eos_token_id": [257, 258]},
    "chat_template": {"chat_template": TEMPLATE},
    "config": {"model_type": "llama", "vocab_size": 300, "eos_token_id": 257, "bos_token_id": 256},
}  # fmt: skip


@MANY
@given(data=st.data())
def test_files_of_hugging_face(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*FILES, "tokenizer", "tokenizer_config"]))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UserError):
        path, out = Path(folder), Path(folder, "out")
        out.mkdir()
        for stem, values in FILES.items():
            text = json.dumps(data.draw(mutated(values)) if stem == name else values)
            (path / f"{stem}.json").write_text(text)
        (path / "model.safetensors").touch()
        write_tokenizer(open_checkpoint(CheckpointConfig(path=path)), out)


@MANY
@given(data=st.data())
def test_metadata_of_gguf(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([byte_level, sentencepiece]))
    values = kind(add_bos_token=True, add_eos_token=False) | {"tokenizer.chat_template": TEMPLATE}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UserError):
        write_tokenizer(Holder(data.draw(mutated(values))), Path(folder))


PIECES = ["{{", "}}", "{%", "%}", "{#", "messages", "[0]", "['content']", " + 1", " / 0", "for m in", "endfor", "if",
          "endif", "m.content", "bos_token", "|", "trim", "tojson", "length", "range(10**9)", "raise_exception('x')",
          "strftime_now('%d')", "''.__class__", ".format(1)", "{{ messages }}", "\n", "é", "a"]  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return toy_bundle(tmp_path_factory.mktemp("fuzz") / "toy", template=TEMPLATE)


@MANY
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), content=st.text(max_size=5))
def test_templates(bundle: Bundle, pieces: list[str], content: str) -> None:
    (bundle.path / runtime.DIRECTORY / "chat_template.jinja").write_text(" ".join(pieces), encoding="utf-8")
    with contextlib.suppress(UserError):
        runtime.Tokenizer(bundle).encode_chat([{"role": "user", "content": content}])


@MANY
@given(data=st.data())
def test_the_files_of_a_bundle(bundle: Bundle, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["tokenizer", "tokenizer_config", "special_tokens_map"]))
    folder = bundle.path / runtime.DIRECTORY
    for stem in ("tokenizer", "tokenizer_config", "special_tokens_map"):
        text = json.dumps(data.draw(mutated(FILES[stem])) if stem == name else FILES[stem])
        (folder / f"{stem}.json").write_text(text)
    with contextlib.suppress(UserError):
        ours = runtime.Tokenizer(bundle)
        ours.decode(ours.encode_chat([{"role": "user", "content": "a<eos>b"}]))
