"""Text of a conversation that stays text, whatever control tokens it spells.

A template joins its own control tokens and the text of messages into one string; the tokenizer then cannot tell who
wrote ``<end_of_turn>``. So each spelling inside a message is broken by a mark, one character that occurs nowhere else,
before the template sees it, which may trim, repeat or quote what it is given. Behind the template the stretches that
hold a mark are tokenised without it by a tokenizer that knows no control tokens; all others as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from exporter.special_tokens import control_ids

PRIVATE = range(0xE000, 0xF900)
"""Unicode's private use area."""


class PlainText:
    """The messages of a conversation, with their control tokens broken, and how to tokenise what becomes of them.

    Attributes:
        messages: to be rendered in place of those given.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """`tokenizer`: of the model; `template`: what will render `messages`."""
        self._tokenizer = tokenizer
        self._special = control_ids(tokenizer, None)
        # A model's answer may hold what its template looks for, as the end of its thoughts: only others' is broken.
        self._control = control_ids(tokenizer, template)
        written = template + json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str)
        free = (chr(code) for code in PRIVATE if chr(code) not in written)
        self._mark, self._start = next(free), next(free)
        self.messages = [
            self._broken(dict(message), self._special if message.get("role") == "assistant" else self._control)
            for message in messages
        ]

    def _broken(self, value: Any, control: frozenset[int]) -> Any:
        """`value` with a mark in every control token that one of its texts spells."""
        if isinstance(value, Mapping):
            return {key: self._broken(one, control) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(one, control) for one in value]
        if not isinstance(value, str):
            return value
        while True:  # a mark may uncover another token, as in "<<turn>"
            encoded = self._tokenizer.encode(value, add_special_tokens=False)
            spans = [span for id, span in zip(encoded.ids, encoded.offsets, strict=True) if id in control]
            places = [first + 1 + _blanks(value[first:last]) for first, last in spans if last - first > 1]
            if not places:
                # One character that is a control token cannot be text.
                return "".join(char for place, char in enumerate(value) if (place, place + 1) not in spans)
            for place in reversed(places):
                value = value[:place] + self._mark + value[place:]

    def encode(self, rendered: str) -> list[int]:
        """Token ids of what the template made of `messages`, without BOS."""
        whole = self._tokenizer.encode(rendered, add_special_tokens=False)
        if self._mark not in rendered:
            return whole.ids
        plain = self._without_control()
        added = {
            id: self._tokenizer.token_to_id(token.content) for id, token in plain.get_added_tokens_decoder().items()
        }
        first = plain.token_to_id(self._start)
        own = {id: known for id, known in added.items() if known is not None}

        def text(stretch: str, begins: bool) -> list[int]:
            """The ids of a stretch; where it does not begin the text, tokenizers that mark the beginning must know."""
            ids = plain.encode(stretch if begins else self._start + stretch, add_special_tokens=False).ids
            return [own.get(id, id) for id in ids if id != first]

        ids: list[int] = []
        place, last = 0, len(whole.ids)
        cuts = [at for at, id in enumerate(whole.ids) if id in self._control]
        for begin, end in zip([-1, *cuts], [*cuts, last], strict=True):
            until = whole.offsets[end][0] if end < last else len(rendered)
            stretch = rendered[place:until]
            if self._mark in stretch:
                found = text(stretch.replace(self._mark, ""), place == 0)
                if self._control & set(found):  # its letters are in the vocabulary as a whole: one part at a time
                    parts = stretch.split(self._mark)
                    found = [id for at, part in enumerate(parts) for id in text(part, place == 0 and at == 0)]
                ids += [id for id in found if id not in self._control]
            else:
                ids += whole.ids[begin + 1 : end]
            if end < last:
                ids.append(whole.ids[end])
                place = whole.offsets[end][1]
        return ids

    def _without_control(self) -> Tokenizer:
        """The tokenizer without its control tokens, and with one of its own that stands for the text before."""
        saved = json.loads(self._tokenizer.to_str())
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] not in self._control]
        plain = Tokenizer.from_str(json.dumps(saved))
        plain.add_tokens([AddedToken(self._start, special=True, normalized=False)])
        return plain


def _blanks(text: str) -> int:
    """Blanks at the beginning, which a token that takes them along has in its span."""
    return len(text) - len(text.lstrip())
