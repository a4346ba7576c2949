"""The tokenizer of a bundle: written beside the programs, loaded back and tested on text."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exporter.chat import render, variables
from exporter.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from exporter.checkpoint.gguf_tokenizer import adds_bos, build_tokenizer, named_tokens, tokenizer_config
from exporter.checkpoint.safetensors import read_json
from exporter.errors import BundleError, CheckpointError
from exporter.spec import TokenizerSpec
from exporter.special_tokens import NamedTokens, beginning, stops

TOKENIZER = "tokenizer.json"
_CONFIG, _SPECIAL, _GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
_TEMPLATE, _OLDER_TEMPLATE = "chat_template.jinja", "chat_template.json"
_COPIED = (TOKENIZER, _CONFIG, _SPECIAL, _TEMPLATE, _GENERATION)

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


def check_round_trip(tokenizer: Tokenizer, name: str) -> None:
    """Encode and decode `ROUND_TRIP_TEXTS`.

    Raises:
        CheckpointError: a text does not come back as it went in.
    """
    for text in ROUND_TRIP_TEXTS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back != text:
            raise CheckpointError(
                f"tokenizer of {name}",
                got=f"{back!r} after encoding and decoding",
                expected=repr(text),
                repair="Export from a source with the model's own tokenizer.json.",
            )


def load_tokenizer(path: Path, owner: str) -> Tokenizer:
    """A ``tokenizer.json``, which neither cuts nor fills what it encodes.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises nothing narrower, and a panic of its own
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(
            owner, got=str(error), expected=f"a readable {TOKENIZER}", repair="Fetch it again."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _copy(checkpoint: SafetensorsCheckpoint, directory: Path) -> TokenizerSpec:
    source, owner = checkpoint.path, f"tokenizer of {checkpoint.name}"
    if not (source / TOKENIZER).is_file():
        raise CheckpointError(
            owner,
            got=f"a directory without {TOKENIZER}",
            expected=f"{TOKENIZER}, the only form a phone can load",
            repair="Load the tokenizer with transformers.AutoTokenizer and save it with save_pretrained.",
        )
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    tokenizer = load_tokenizer(directory / TOKENIZER, owner)
    saved = read_json(directory / TOKENIZER)
    if saved.get("truncation") or saved.get("padding"):  # of whoever saved it; an app would cut or fill its prompts
        text = json.dumps(saved | {"truncation": None, "padding": None}, ensure_ascii=False, indent=2)
        (directory / TOKENIZER).write_text(text, encoding="utf-8")
    config, special, generation, older = (
        read_json(source / name) if (source / name).is_file() else {}
        for name in (_CONFIG, _SPECIAL, _GENERATION, _OLDER_TEMPLATE)
    )
    template = _template_of(source / _TEMPLATE, config, older, owner)
    if template is not None:
        (directory / _TEMPLATE).write_text(template, encoding="utf-8")
    model = checkpoint.hf_config
    files = [
        NamedTokens(file=_CONFIG, bos=config.get("bos_token"), eos=config.get("eos_token")),
        NamedTokens(file=_SPECIAL, bos=special.get("bos_token"), eos=special.get("eos_token")),
        *(
            NamedTokens(file=name, bos=values.get("bos_token_id"), eos=values.get("eos_token_id"))
            for name, values in (
                (_GENERATION, generation), ("config.json", model), ("config.json", model.get("text_config") or {})
            )
        ),
    ]  # fmt: skip
    try:
        known = variables(config, special)
    except ValueError as error:
        raise CheckpointError(
            owner, got=str(error), expected="special tokens that are texts", repair="Fetch the file again."
        ) from error
    return _spec(tokenizer, files, _flag(config, owner), template, known)


def _flag(config: Mapping[str, Any], owner: str) -> bool | None:
    """``add_bos_token``, or None where nothing is said.

    Raises:
        CheckpointError: it is neither true, false nor null.
    """
    value = config.get("add_bos_token")
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            owner, got=f"add_bos_token: {value!r}", expected="true or false", repair=f"Mend {_CONFIG}."
        )
    return value


def _template_of(file: Path, config: Mapping[str, Any], older: Mapping[str, Any], owner: str) -> str | None:
    """The chat template: of its own file, else of ``tokenizer_config.json``, else of a processor's file.

    Raises:
        CheckpointError: it is no text.
    """
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise CheckpointError(
                owner, got=f"{file.name} that is no UTF-8 ({error})", expected="a text", repair="Fetch it again."
            ) from error
    template = config.get("chat_template") or older.get("chat_template")
    if isinstance(template, list):  # several named templates, an older form
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            owner,
            got=f"a chat_template that is a {type(template).__name__}",
            expected="a text, or a list of named ones with a default",
            repair=f"Write the template to {_TEMPLATE} beside the weights.",
        )
    return template or None


def _spec(
    tokenizer: Tokenizer,
    files: Sequence[NamedTokens],
    add_bos: bool | None,
    template: str | None,
    known: Mapping[str, str],
) -> TokenizerSpec:
    bos, adds = beginning(tokenizer, files, add_bos)
    return TokenizerSpec(
        bos_token_id=bos,
        eos_token_ids=stops(tokenizer, files, bos, template, known),
        add_bos=adds,
        has_chat_template=template is not None,
    )


def _write(checkpoint: GGUFCheckpoint, directory: Path) -> TokenizerSpec:
    metadata, owner = checkpoint.metadata, f"tokenizer of {checkpoint.name}"
    tokenizer = build_tokenizer(metadata)
    (directory / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = tokenizer_config(metadata)
    (directory / _CONFIG).write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")
    template = _template_of(
        directory / _TEMPLATE, {"chat_template": metadata.get("tokenizer.chat_template")}, {}, owner
    )
    if template is not None:
        (directory / _TEMPLATE).write_text(template, encoding="utf-8")
    return _spec(tokenizer, named_tokens(metadata), adds_bos(metadata), template, variables(config))


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> TokenizerSpec:
    """Write the checkpoint's tokenizer into `directory`, which exists; load it back and try it.

    The files load with ``tokenizers.Tokenizer.from_file`` and ``transformers.AutoTokenizer.from_pretrained``. When
    `add_bos` holds, text must begin with exactly one BOS: a chat template may have written it already.

    Raises:
        CheckpointError: no tokenizer, a damaged one, one that loses text, or ids beyond the model's vocabulary.
        UnsupportedModelError: a GGUF tokenizer of a kind that is not known.
    """
    if isinstance(checkpoint, GGUFCheckpoint):
        spec = _write(checkpoint, directory)
    else:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        spec = _copy(checkpoint, directory)
    owner = f"tokenizer of {checkpoint.name}"
    tokenizer = load_tokenizer(directory / TOKENIZER, owner)
    check_round_trip(tokenizer, checkpoint.name)
    # Added tokens may lie beyond it (Gemma's text models keep the image token of the multimodal ones), where neither
    # text nor the chat template gives them.
    used = {
        "the vocabulary": max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0),
        "the end tokens": max(spec.eos_token_ids, default=0),
        "BOS": spec.bos_token_id or 0 if spec.add_bos else 0,
        "what the chat template writes": max(_of_a_chat(tokenizer, directory), default=0),
    }
    for what, largest in used.items():
        if largest >= checkpoint.spec.vocab_size:
            raise CheckpointError(
                owner,
                got=f"token id {largest} ({tokenizer.id_to_token(largest)}) in {what}",
                expected=f"ids below the model's vocab_size {checkpoint.spec.vocab_size}",
                repair="Tokenizer and weights do not belong together: fetch both again, or the weights whose "
                "embedding was resized for the added tokens.",
            )
    return spec


def _of_a_chat(tokenizer: Tokenizer, directory: Path) -> list[int]:
    """Every id of the conversations that the chat template renders."""
    file, config = directory / _TEMPLATE, directory / _CONFIG
    if not file.is_file():
        return []
    known = variables(read_json(config)) if config.is_file() else {}
    turns = [{"role": role, "content": "text"} for role in ("system", "user", "assistant", "user")]
    found: list[int] = []
    for messages in (turns[1:2], turns[:2], turns[1:], turns):
        with contextlib.suppress(BundleError):  # not every template takes every role
            text = render("chat template", file.read_text(encoding="utf-8"), messages, known, answering=True)
            found += tokenizer.encode(text, add_special_tokens=False).ids
    return found
