"""Which token begins a text and which end one: decided here, from every file that names one.

**BOS** is what the tokenizer itself puts before a text. Where its post-processing adds nothing, the name or id of BOS
is that of the tokenizer's files, then of the model's, and it is added if ``add_bos_token`` says so.

**Stop tokens** are all that any file names as the end of a text or turn, and the one that the chat template writes
after an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from exporter.chat import render, token_text
from exporter.errors import BundleError, CheckpointError

NO_TOKEN = {-1, 2**32 - 1}
"""How files say that there is none; the second is the first as GGUF stores it."""
ANSWER = "Answer"


@dataclass(frozen=True, kw_only=True)
class NamedTokens:
    """What one file says, e.g. ``generation_config.json``.

    Attributes:
        file: its name, for errors.
        bos, eos: an id, a list of ids, a token's text, or None, as the file has them.
    """

    file: str
    bos: Any = None
    eos: Any = None


def ids_of(tokenizer: Tokenizer, file: str, value: Any) -> list[int]:
    """The ids that `value` of a file means: an id, a list of ids, a token's text, or none.

    Raises:
        CheckpointError: it is none of these.
    """
    if isinstance(value, list):
        return [one for each in value for one in ids_of(tokenizer, file, each)]
    if isinstance(value, int) and not isinstance(value, bool) and (value >= 0 or value in NO_TOKEN):
        return [] if value in NO_TOKEN else [value]
    try:
        text = token_text(value)
    except ValueError as error:
        raise CheckpointError(
            f"tokenizer, {file}",
            got=f"{value!r} as a special token",
            expected="an id from 0, a list of ids, or a token's text",
            repair="Fetch the file again, or mend it by the model's card.",
        ) from error
    found = None if text is None else tokenizer.token_to_id(text)
    return [] if found is None else [found]


def beginning(tokenizer: Tokenizer, files: Iterable[NamedTokens], add_bos: bool | None) -> tuple[int | None, bool]:
    """BOS, and whether a text begins with it.

    Args:
        files: those of the tokenizer first.
        add_bos: ``add_bos_token``; None where nothing is said.

    Raises:
        CheckpointError: the tokenizer puts several tokens before a text.
    """
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    before = next((whole[:k] for k in range(len(whole)) if whole[k : k + len(bare)] == bare), [])
    if len(before) > 1:
        raise CheckpointError(
            "tokenizer",
            got=f"{len(before)} tokens that it puts before every text: {before}",
            expected="one BOS, or none",
            repair="Let tokenizer.json's post_processor write BOS alone, and the chat template the others.",
        )
    if before:
        return before[0], add_bos is not False
    bos = next((one for each in files for one in ids_of(tokenizer, each.file, each.bos)), None)
    return bos, bos is not None and bool(add_bos)


def stops(
    tokenizer: Tokenizer,
    files: Iterable[NamedTokens],
    bos: int | None,
    template: str | None,
    known: Mapping[str, str],
) -> tuple[int, ...]:
    """Every token that ends a generation, in the order the files name them, the chat template's last. An id of a token
    of text is a left-over of another vocabulary where others are named."""
    found = [one for each in files for one in ids_of(tokenizer, each.file, each.eos)]
    if template is not None:
        end = end_of_turn(tokenizer, template, known)
        found += [] if end is None or end == bos else [end]
    added = tokenizer.get_added_tokens_decoder()
    return tuple(dict.fromkeys([one for one in found if one in added] or found))


def end_of_turn(tokenizer: Tokenizer, template: str, known: Mapping[str, str]) -> int | None:
    """The control token that `template` writes after an answer, before anything but blanks: what the model was trained
    to say next. Some templates write it only before the turn that follows."""
    control = control_ids(tokenizer, template)
    for after in _after_an_answer(template, known):
        ids = tokenizer.encode(after.lstrip(), add_special_tokens=False).ids
        if ids and ids[0] in control:
            return ids[0]
    return None


def _after_an_answer(template: str, known: Mapping[str, str]) -> Iterator[str]:
    question, answer = {"role": "user", "content": "Question"}, {"role": "assistant", "content": ANSWER}
    for messages in ([question, answer], [question, answer, question]):
        try:
            text = render("chat template", template, messages, known, answering=False)
        except BundleError:  # it may demand a system message, or tools
            continue
        if ANSWER in text:
            yield text.rpartition(ANSWER)[2]


def control_ids(tokenizer: Tokenizer, template: str | None) -> frozenset[int]:
    """Tokens that steer the model: the special ones, and others that were added and that its chat template writes
    (``<tool_call>``). Blanks that were added are text."""
    return frozenset(
        id
        for id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or (template is not None and token.content.strip() and token.content in template)
    )
