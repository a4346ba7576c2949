"""A chat template, rendered in one way for the exporter and for the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.errors import BundleError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What a template may name, as ``tokenizer_config.json`` and ``special_tokens_map.json`` have them."""


def token_text(token: object) -> str | None:
    """A token as those files spell it: its text, an object that holds it, or null for none.

    Raises:
        ValueError: anything else.
    """
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None or isinstance(token, str):
        return token
    raise ValueError(f"{token!r} is no token: a text, or an object with a content")


def variables(*files: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a template by their names; those of earlier `files` win. A token that is null is not
    defined, as for Transformers: it renders as nothing.

    Raises:
        ValueError: a token that is no text; it is named.
    """
    found: dict[str, str] = {}
    for file in reversed(files):
        more = file.get("extra_special_tokens")
        extra = dict(more) if isinstance(more, Mapping) else {}
        for name, token in (extra | {name: file[name] for name in SPECIAL_TOKENS if name in file}).items():
            try:
                text = token_text(token)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            found.pop(name, None)
            if text is not None:
                found[name] = text
    return found


def render(
    owner: str, template: str, messages: Sequence[Mapping[str, Any]], known: Mapping[str, str], *, answering: bool
) -> str:
    """The text of `messages`, each with a ``role`` and a ``content``, in jinja's immutable sandbox: a template is
    untrusted code.

    Args:
        owner: whose template it is, for the error.
        known: as `variables` has them.
        answering: whether the text ends where an answer begins.

    Raises:
        BundleError: the template refuses the messages or fails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        known_too: dict[str, Any] = {"chat_template": template, "add_generation_prompt": answering, **known}
        rendered = render_jinja_template([[dict(message) for message in messages]], **known_too)[0][0]
    except Exception as error:  # a template is a program: it raises what Python does
        raise BundleError(
            owner,
            got=f"a chat template that refuses the messages ({type(error).__name__}: {error})",
            expected="one that renders them",
            repair="Send the roles this model knows, or give the checkpoint a chat_template.jinja that works.",
        ) from error
    assert isinstance(rendered, str)
    return rendered
