"""LEAF: chat templates: untrusted Jinja code that writes a conversation as one text.

The environment is that of Transformers' `apply_chat_template` (``utils/chat_template_utils.py``): an immutable sandbox
with the same extensions, filters and functions, so that a template writes the same text here and there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from exporter.text.files import Fault
from exporter.text.marks import METHODS, Marks

_REASONING = ("reasoning_content", "thinking", "reasoning")
_PLAIN = "plain_of_marked_text"


class _Generation(Extension):
    """``{% generation %}``, which tells a trainer what a model wrote; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class _Dict:
    """``dict`` for templates, without the attributes of the class."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace``; no name in it begins with an underscore."""

    def __init__(*args: Any, **more: Any) -> None:
        self, values = args[0], dict(*args[1:], **more)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute {name!r} on a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _prepare(environment: ImmutableSandboxedEnvironment) -> None:
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": _Namespace
    }  # fmt: skip


class _MarkedEnvironment(ImmutableSandboxedEnvironment):
    """One in which what a template asks about a text is asked of its plain form (`exporter.text.marks`); `marks` are
    those of the messages that are rendered."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _prepare(self)
        self.marks = Marks((), ())
        self.filters[_PLAIN] = self._plain_of
        for name in ("upper", "lower", "title", "capitalize"):
            own = self.filters[name]
            self.filters[name] = lambda value, own=own: self.marks.recased(
                str(value), own(self.marks.plain(str(value)))
            )
        self.filters["trim"] = lambda value, chars=None: self.marks.method("strip", str(value))(chars)
        self.filters["replace"] = lambda value, old, new, count=None: self.marks.method("replace", str(value))(
            str(old), str(new), -1 if count is None else count
        )
        self.filters["tojson"] = self._tojson

    def _plain_of(self, value: Any) -> Any:
        return self.marks.plain(value)

    def _tojson(self, value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        written = _tojson(value, **options)
        if not ensure_ascii:
            return written
        return "".join(c if c.isascii() or self.marks.is_mark(c) else json.dumps(c)[1:-1] for c in written)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str) and attribute in METHODS:
            return self.marks.method(attribute, obj)
        return super().getattr(obj, attribute)

    def compiled(self, source: str) -> Any:
        """The template, with both sides of every comparison in plain text."""
        tree = self.parse(source)
        for compare in tree.find_all(nodes.Compare):
            compare.expr = self._plain(compare.expr)
            for operand in compare.ops:
                operand.expr = self._plain(operand.expr)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    @staticmethod
    def _plain(expression: nodes.Expr) -> nodes.Expr:
        return nodes.Filter(expression, _PLAIN, [], [], None, None, lineno=expression.lineno)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `marked` is the same with the characters of messages marked; None where that could not be
    rendered. It has another length, or other letters, where the template does with a text what marks do not survive."""

    text: str
    marked: str | None
    marks: Marks

    @property
    def is_exact(self) -> bool:
        """Whether every place of `text` is known to be a message's or the template's."""
        return self.marked is not None and self.marks.plain(self.marked) == self.text


class ChatTemplate:
    """A template and the special tokens that it may write.

    Raises:
        Fault: it is no Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [_Generation, loopcontrols]}
        self._options: dict[str, Any] = options
        environment = ImmutableSandboxedEnvironment(**self._options)
        _prepare(environment)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
            self._marked = _MarkedEnvironment(**self._options)
            self._marked_template = self._marked.compiled(source)
        except Exception as error:  # jinja2's own, and whatever Python says of the code that it wrote
            raise Fault(f"a chat template that is none ({_reason(error)})", "a Jinja template") from error
        self.literals = "\0".join(
            [node.data for node in tree.find_all(nodes.TemplateData)]
            + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        )
        """The texts in the template, none running into the next."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tokens: Sequence[str], add_generation_prompt: bool
    ) -> Rendered:
        """`messages` as one text; `tokens` are the texts that must not be made of a message's characters.

        Raises:
            Fault: a message is no data of JSON's kinds, or the template refuses or fails.
        """
        data = [_message(message) for message in messages]
        marks = Marks(tokens, [self._source, *self._special_tokens.values(), *tokens, *_texts(data)])
        text = self._run(self._template, data, add_generation_prompt)
        self._marked.marks = marks
        try:
            marked = self._run(
                self._marked_template,
                [marks.mark_data(message) for message in data],
                add_generation_prompt,
            )
        except Fault:
            marked = None
        return Rendered(text, marked, marks)

    def _run(self, template: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            rendered: str = template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return rendered
        except TemplateError as error:
            raise Fault(
                f"a chat template that refuses the messages ({_reason(error)})", "messages as it takes"
            ) from error
        except Exception as error:  # a template is code: it may fail in any way that Python does
            reason = f"{type(error).__name__}: {_reason(error)}"
            raise Fault(f"a chat template that fails on the messages ({reason})", "a template that runs") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _message(message: object) -> dict[str, Any]:
    """A message as templates get it: keys that are null are absent, and reasoning has all the names in use."""
    if not isinstance(message, Mapping):
        raise Fault(f"a message that is a {type(message).__name__}", "a mapping with role and content")
    plain = {key: _plain_data(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain_data(value: Any) -> Any:
    """Data of JSON's kinds and nothing else: a template could call the methods of any other object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain_data(key): _plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_data(item) for item in value]
    raise Fault(f"a message that holds a {type(value).__name__}", "text, numbers, lists and mappings")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
