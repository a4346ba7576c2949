"""The tokenizer of a bundle: written beside the programs, loaded back and tested on text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exporter.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from exporter.checkpoint.gguf_tokenizer import build_tokenizer, chat_template, claims, tokenizer_config
from exporter.errors import CheckpointError
from exporter.spec import TokenizerSpec
from exporter.text.ends import Claims, TokenizerFiles, begin_and_end, check_encodes, claims_of, largest_ids
from exporter.text.files import (
    CONFIG,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TOKENIZER,
    Fault,
    library_calls,
    load_tokenizer,
    read_object,
)

_GENERATION, _PROCESSOR_TEMPLATE = "generation_config.json", "chat_template.json"
_COPIED = (TOKENIZER, CONFIG, SPECIAL_TOKENS_MAP, TEMPLATE, _GENERATION)

# Things that tokenizers are known to lose: digits, runs of blanks, line ends, bytes outside the vocabulary.
ROUND_TRIP_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 1234567, or 3.14; e-mail: a_b@c.org (50%)!",
    "two  three   four    blanks, a\ttab\t\tand two",
    "one line\nanother\n\nand\r\na third\n\n\n",
    "def f(x: int) -> int:\n    return {'a': [x ** 2, x // 3]}\n",
    "naïve café, Straße, ¿qué?, Привет",
    "你好，世界。今天是2024年。",  # noqa: RUF001
    "مرحبا بالعالم",
    "emoji 🙂👩‍👩‍👧🚀 and a flag 🇩🇪",
)


@contextmanager
def _said_of(name: str) -> Iterator[None]:
    """A fault of the tokenizer of the checkpoint `name` is an error of that checkpoint."""
    try:
        yield
    except Fault as fault:
        raise CheckpointError(
            f"tokenizer of {name}",
            got=fault.got,
            expected=fault.expected,
            repair="Export from a source with the model's own tokenizer files, whole and as they were published.",
        ) from fault


def check_round_trip(tokenizer: Tokenizer, name: str) -> None:
    """Encode and decode `ROUND_TRIP_TEXTS`.

    Raises:
        CheckpointError: a text does not come back as it went in.
    """
    with _said_of(name):
        check_encodes(tokenizer, ROUND_TRIP_TEXTS)


def _template_of(value: Any, file: str) -> str | None:
    """The default one of what a JSON file says of chat templates: one, or several by name in either form that
    Transformers has written. None if there is none.

    Raises:
        Fault: it is something else.
    """
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
        value = {item["name"]: item.get("template") for item in value}
    if isinstance(value, dict):
        value = value.get("default")
    if value is None or isinstance(value, str):
        return value
    raise Fault(f"{file} with chat_template = {str(value)[:80]!r}", "a template, or templates by name")


def _write_without_batching(path: Path) -> None:
    """Truncation and padding in ``tokenizer.json`` are of training batches: whoever loads the copy gets neither.

    Raises:
        Fault: the file is no tokenizer.
    """
    with library_calls(f"a readable {TOKENIZER}"):
        saved = Tokenizer.from_file(str(path))
        batched = saved.truncation is not None or saved.padding is not None
    if batched:
        data = read_object(path) | {"truncation": None, "padding": None}
        _write_text(path, json.dumps(data, ensure_ascii=False, indent=2))


def _copy(checkpoint: SafetensorsCheckpoint, directory: Path) -> Claims:
    if not (checkpoint.path / TOKENIZER).is_file():
        raise CheckpointError(
            f"tokenizer of {checkpoint.name}",
            got=f"a directory without {TOKENIZER}",
            expected=f"{TOKENIZER}, the only form a phone can load",
            repair="Load the tokenizer with transformers.AutoTokenizer and save it with save_pretrained.",
        )
    for name in _COPIED:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, directory / name)
    _write_without_batching(directory / TOKENIZER)
    templates = [
        _template_of(read_object(checkpoint.path / file).get("chat_template"), file)
        for file in (CONFIG, _PROCESSOR_TEMPLATE)
    ]
    template = next((template for template in templates if template is not None), None)
    if template is not None and not (checkpoint.path / TEMPLATE).is_file():
        _write_text(directory / TEMPLATE, template)
    return claims_of(checkpoint.hf_config, read_object(directory / _GENERATION))


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise Fault(f"{path.name} that is no text ({error})", "text in UTF-8") from error


def _write(checkpoint: GGUFCheckpoint, directory: Path) -> Claims:
    metadata = checkpoint.metadata
    _write_text(directory / TOKENIZER, build_tokenizer(metadata).to_str(pretty=True))  # whose errors are Python's
    config = json.dumps(tokenizer_config(metadata), ensure_ascii=False, indent=2)
    _write_text(directory / CONFIG, config)
    if template := chat_template(metadata):
        _write_text(directory / TEMPLATE, template)
    return claims(metadata)


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> TokenizerSpec:
    """Write the checkpoint's tokenizer into `directory`, which exists; load it back and try it.

    The files load with ``tokenizers.Tokenizer.from_file`` and ``transformers.AutoTokenizer.from_pretrained``. When
    `add_bos` holds, text must begin with exactly one BOS: a chat template may have written it already.

    Raises:
        CheckpointError: no tokenizer, a damaged one, one that loses text, files that contradict each other, or ids
            beyond the model's vocabulary.
        UnsupportedModelError: a GGUF tokenizer of a kind that is not known.
    """
    with _said_of(checkpoint.name):
        if isinstance(checkpoint, GGUFCheckpoint):
            claims = _write(checkpoint, directory)
        else:
            assert isinstance(checkpoint, SafetensorsCheckpoint)
            claims = _copy(checkpoint, directory)
        files = TokenizerFiles(load_tokenizer(directory / TOKENIZER), directory)
        check_encodes(files.tokenizer, ROUND_TRIP_TEXTS)
        spec = begin_and_end(files, claims)
        largest_of = largest_ids(files, spec)
    for what, largest in largest_of.items():
        if largest >= checkpoint.spec.vocab_size:
            raise CheckpointError(
                f"tokenizer of {checkpoint.name}",
                got=f"token id {largest} ({files.tokenizer.id_to_token(largest)}) in {what}",
                expected=f"ids below the model's vocab_size {checkpoint.spec.vocab_size}",
                repair="Tokenizer and weights do not belong together: fetch both again, or the weights whose embedding "
                "was resized for the added tokens.",
            )
    return spec
