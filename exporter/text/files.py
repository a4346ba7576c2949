"""LEAF: the files of a tokenizer, as a checkpoint and a bundle have them, read without trust in any of them.

``tokenizer.json`` is the tokenizer, ``tokenizer_config.json`` and ``special_tokens_map.json`` name its special tokens,
``chat_template.jinja`` is the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exporter.errors import UserError

TOKENIZER, CONFIG, SPECIAL_TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What Transformers names a special token, and hands to a chat template."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a pair, which JSON can spell and no text holds."""


class Fault(UserError):
    """What is wrong with a tokenizer or a text. Who knows whose it is says that instead."""

    def __init__(self, got: str, expected: str) -> None:
        super().__init__("tokenizer", got=got, expected=expected, repair="Take the model's own tokenizer files.")

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return partial(Fault, self.got, self.expected), ()


@contextmanager
def library_calls(expected: str) -> Iterator[None]:
    """Whatever the `tokenizers` library raises becomes a `Fault`: it has no narrower type than Exception, and a panic
    of its Rust code is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UserError):
        raise
    except BaseException as error:
        raise Fault(f"{error}" or type(error).__name__, expected) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the file `path`. Truncation and padding that were saved with it are off: they belong to the
    batches of some training run, and would clip or fill a prompt.

    Raises:
        Fault: the file cannot be read or is no tokenizer.
    """
    with library_calls(f"a readable {TOKENIZER}"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> Any:
    """The encoding of `text`: nothing is added to it, control tokens that it spells are found.

    Raises:
        Fault: the tokenizer cannot take the text: a lone surrogate, or a character it has no token for.
    """
    with library_calls("text that the tokenizer takes"):
        return tokenizer.encode(text, add_special_tokens=False)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; empty if there is no such file.

    Raises:
        Fault: the file cannot be read or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Fault(f"{path.name} that cannot be read ({error})", "readable JSON") from error
    if not isinstance(data, dict):
        raise Fault(f"{path.name} with a {type(data).__name__}", "a JSON object")
    return data


def token_text(file: str, values: dict[str, Any], name: str) -> str | None:
    """The special token `name` in `values`, the content of `file`: its text, or an object that holds it as `content`.
    None when it is absent or null.

    Raises:
        Fault: it is something else.
    """
    value = values.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    is_null = value is None or (isinstance(value, dict) and text is None and "content" in value)
    if is_null or (isinstance(text, str) and not _SURROGATE.search(text)):
        return text
    raise Fault(f"{file} with {name} = {value!r}", "the text of a token, an object with its content, or null")


def special_tokens(directory: Path) -> dict[str, str]:
    """Name -> text of each special token that ``tokenizer_config.json`` names or, where that is silent,
    ``special_tokens_map.json``; also of those that only this model has. A token that is null there is none, and a
    template that writes it writes nothing.

    Raises:
        Fault: a file cannot be read, or a token is of another kind.
    """
    found: dict[str, str] = {}
    values = {file: read_object(directory / file) for file in (CONFIG, SPECIAL_TOKENS_MAP)}
    config = values[CONFIG]
    extra = config.get("extra_special_tokens")
    for name, value in {**config, **(extra if isinstance(extra, dict) else {})}.items():
        if name.endswith("_token") and isinstance(value, str) and not _SURROGATE.search(value):
            found[name] = value  # a model's own, as of images
    for name in SPECIAL_TOKENS:
        found.pop(name, None)
        file = next((file for file in values if name in values[file]), CONFIG)
        if (text := token_text(file, values[file], name)) is not None:
            found[name] = text
    return found


def read_template(path: Path) -> str:
    """The text of a chat template.

    Raises:
        Fault: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Fault(f"{path.name} that cannot be read ({error})", "a chat template in UTF-8") from error
