"""The tokenizer of a bundle: written beside the programs, loaded back and tested on text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exporter.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from exporter.checkpoint.gguf_tokenizer import adds_bos, build_tokenizer, eos_token_ids, tokenizer_config
from exporter.checkpoint.safetensors import read_json
from exporter.errors import CheckpointError
from exporter.spec import TokenizerSpec

TOKENIZER = "tokenizer.json"
_CONFIG, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
_COPIED = (TOKENIZER, _CONFIG, "special_tokens_map.json", _TEMPLATE, _GENERATION)

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


def _load(path: Path, name: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"tokenizer of {name}", got=str(error), expected=f"a readable {TOKENIZER}", repair="Fetch it again."
        ) from error


def _content(token: Any) -> str | None:
    """A token as ``tokenizer_config.json`` spells it: text, or a dictionary with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _copy(checkpoint: SafetensorsCheckpoint, directory: Path) -> TokenizerSpec:
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
    tokenizer = _load(directory / TOKENIZER, checkpoint.name)
    hf_config = checkpoint.hf_config | checkpoint.hf_config.get("text_config", {})
    generation, config = (
        read_json(directory / name) if (directory / name).is_file() else {} for name in (_GENERATION, _CONFIG)
    )

    def token_id(kind: str) -> Any:
        """`generation_config.json` wins over `config.json`; the tokenizer's own name for the token comes last."""
        for values in (generation, hf_config):
            if (value := values.get(f"{kind}_token_id")) is not None:
                return value
        content = _content(config.get(f"{kind}_token"))
        return None if content is None else tokenizer.token_to_id(content)

    bos, eos = token_id("bos"), token_id("eos")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    first = tokenizer.encode("a").ids[:1]
    add_bos = config.get("add_bos_token")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates, an older form
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    if template is not None and not (directory / _TEMPLATE).is_file():
        (directory / _TEMPLATE).write_text(template, encoding="utf-8")
    return TokenizerSpec(
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        add_bos=bos is not None and (first == [bos] if add_bos is None else bool(add_bos)),
        has_chat_template=(directory / _TEMPLATE).is_file(),
    )


def _write(checkpoint: GGUFCheckpoint, directory: Path) -> TokenizerSpec:
    metadata = checkpoint.metadata
    build_tokenizer(metadata).save(str(directory / TOKENIZER))
    config = json.dumps(tokenizer_config(metadata), ensure_ascii=False, indent=2)
    (directory / _CONFIG).write_text(config, encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (directory / _TEMPLATE).write_text(template, encoding="utf-8")
    return TokenizerSpec(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_token_ids(metadata),
        add_bos=adds_bos(metadata),
        has_chat_template=bool(template),
    )


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
    tokenizer = _load(directory / TOKENIZER, checkpoint.name)
    check_round_trip(tokenizer, checkpoint.name)
    # Added tokens may lie beyond it (Gemma's text models keep the image token of the multimodal ones); text never
    # gives them.
    used = {*tokenizer.get_vocab(with_added_tokens=False).values(), *spec.eos_token_ids}
    if max(used) >= checkpoint.spec.vocab_size:
        raise CheckpointError(
            f"tokenizer of {checkpoint.name}",
            got=f"token id {max(used)}",
            expected=f"ids below the model's vocab_size {checkpoint.spec.vocab_size}",
            repair="Tokenizer and weights do not belong together: fetch both again.",
        )
    return spec
