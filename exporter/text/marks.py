"""LEAF: characters that remember that they came from a message.

A message is rendered twice: as it is, and with characters of private use in the place of those that tokens are spelled
with. A marked character goes through a template as any other does: joined, cut, repeated, looped over. Where the two
renderings are the same text but for the marks, every marked place is known to be the message's and every other the
template's. The marked text has the length of the plain one, place for place.

Templates also look into a message (``'</think>' in content``, ``content.split('</think>')``). Such questions are asked
of the plain text, and what they cut is cut from the marked one: `Marks.method`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

FIRST, LAST = 0xF0000, 0xFFFFD
"""The supplementary private-use area A."""
_ASKING = frozenset({
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
})  # fmt: skip
_CUTTING = frozenset({
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "removeprefix",
    "removesuffix",
})  # fmt: skip
_CASES = frozenset({"upper", "lower", "title", "capitalize", "swapcase", "casefold"})
METHODS = _ASKING | _CUTTING | _CASES | {"replace"}
"""Methods of str that see what the characters are."""
NAMED_BY_THE_CALLER = ("role", "type")
"""Values of a message that are no text: templates build tokens of them."""


class Marks:
    """Marks for the characters of `tokens`, none of which occurs in `texts`.

    White space, quotes, backslashes and control characters stay as they are: templates trim and escape them.
    """

    def __init__(self, tokens: Iterable[str], texts: Iterable[str]) -> None:
        self._tokens = tuple(token for token in tokens if not token.isspace())
        seen = {c for text in texts for c in text}
        letters = {c for token in self._tokens for c in token}
        # A template may write a letter in the other case.
        letters |= {c for c in seen if not letters.isdisjoint(c.upper() + c.lower() + c.title() + c.casefold())}
        taken = {ord(c) for c in seen if FIRST <= ord(c) <= LAST}
        free = (point for point in range(FIRST, LAST + 1) if point not in taken)
        marked = sorted(c for c in letters if not c.isspace() and c not in "\"\\'" and c.isprintable())
        self._to = dict(zip(map(ord, marked), free, strict=False))
        self._back = {point: letter for letter, point in self._to.items()}

    def mark(self, text: str) -> str:
        """`text` of a message, marked."""
        return text.translate(self._to)

    def plain(self, value: Any) -> Any:
        """A text, or the texts of a tuple or list, without marks; anything else as it is."""
        if isinstance(value, str):
            return value.translate(self._back)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.plain, value)) if type(value) in (list, tuple) else value
        return value

    def is_mark(self, char: str) -> bool:
        """Whether a character is a mark."""
        return ord(char) in self._back

    def mark_data(self, value: Any, *, named: bool = False) -> Any:
        """`value` of JSON's kinds with every text in it marked; `named` texts and keys only if they spell a token."""
        if isinstance(value, str):
            return value if named and not self._spells(value) else self.mark(value)
        if isinstance(value, Mapping):
            return {
                self.mark_data(key, named=True): self.mark_data(item, named=key in NAMED_BY_THE_CALLER)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark_data(item, named=named) for item in value]
        return value

    def _spells(self, text: str) -> bool:
        return any(token in text for token in self._tokens)

    def method(self, name: str, text: str) -> Callable[..., Any]:
        """The method `name` of the marked `text`, one of `METHODS`, answered as for the plain text."""
        if name == "replace":
            return lambda old, new, count=-1: self._replace(text, old, new, count)
        if name in _CASES:
            return lambda: self.recased(text, getattr(self.plain(text), name)())

        def call(*args: Any, **more: Any) -> Any:
            plain, args = self.plain(text), tuple(map(self.plain, args))
            more = {key: self.plain(value) for key, value in more.items()}
            result = getattr(plain, name)(*args, **more)
            if name in _ASKING:
                return result
            first = args[0] if args else more.get("sep")
            return _piece(text, plain, name, first, result) if isinstance(result, str) else type(result)(
                _pieces(text, plain, 0 if name.endswith("partition") else first, result)
            )  # fmt: skip

        return call

    def recased(self, text: str, changed: str) -> str:
        """`changed`, which is the plain form of the marked `text` with other letters, marked in the same places."""
        if len(changed) != len(text):  # a letter became two
            return self.mark(changed) if any(map(self.is_mark, text)) else changed
        return "".join(self.mark(new) if self.is_mark(old) else new for old, new in zip(text, changed, strict=True))

    def _replace(self, text: str, old: str, new: str, count: int) -> str:
        plain, old = self.plain(text), self.plain(old)
        if not old:
            return text.replace(old, new, count)
        parts, start = [], 0
        while count != 0 and (found := plain.find(old, start)) >= 0:
            parts.append(text[start:found])
            start, count = found + len(old), count - 1
        return new.join([*parts, text[start:]])


def _piece(text: str, plain: str, name: str, chars: str | None, result: str) -> str:
    """What of `text` is `result`, which is `plain` cut at one end or, by strip, at both."""
    if name == "strip":
        start = len(plain) - len(plain.lstrip(chars))
    else:
        start = 0 if name in ("rstrip", "removesuffix") else len(plain) - len(result)
    return text[start : start + len(result)]


def _pieces(text: str, plain: str, separator: str | int | None, result: Iterable[str]) -> Iterator[str]:
    """What of `text` are the pieces of `plain`: one after the other, with a separator of known length in between, or
    with white space that no piece begins with."""
    end: int | None = None
    for piece in result:
        if separator is None:
            start = plain.find(piece, end or 0)
        elif end is None:
            start = 0
        else:
            start = end + (separator if isinstance(separator, int) else len(separator))
        end = start + len(piece)
        yield text[start:end]
