"""Readers of one tool call while the model writes it: in JSON, in XML tags, in Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

_ARGUMENTS, _OTHER_KEYS = ("arguments", "parameters"), ("name", "type", "id")
# Generators that get one character by each ``send``.
Reading: TypeAlias = Generator[None, str, None]
ReadingText: TypeAlias = Generator[None, str, str]


def begun_at_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a marker.

    ``text`` holds no whole marker.
    """
    lengths = range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1)
    return next((n for n in lengths if any(m.startswith(text[-n:]) for m in markers)), 0)


class Span:
    """Finds the end of an object, list or string of JSON or Python, character by character.

    ``depth``: brackets that are open before the first character.
    """

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        self._quotes, self._depth = quotes, depth
        self._quote = ""
        self._escaped = False

    def feed(self, char: str) -> bool:
        """Whether this character is the last one."""
        if self._quote:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == self._quote:
                self._quote = ""
                return self._depth == 0
        elif char in self._quotes:
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            return self._depth == 0
        return False


class Reader(ABC):
    """Reads one call.

    ``begin`` is called once with the call's name, then ``more`` with pieces of its arguments, which
    add up to JSON. ``begun``: ``begin`` has been called. ``done``: the call is complete.
    ``broken``: the text is no call, or only the beginning of one. ``schemas``: by name, the
    parameters of the tools that may be called; ``None``: they are not known.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        more: Callable[[str], None],
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        self._schemas = schemas
        self.begun = self.done = self.broken = False
        self._begin, self._more = begin, more
        self._given = ""  # arguments that ``more`` has not got yet

    @abstractmethod
    def feed(self, text: str) -> int:
        """Read more text; returns how many of its characters belong to the call."""

    def _say(self, name: str) -> None:
        self.begun = True
        self._begin(name)

    def _pass_on(self) -> None:
        if self.begun and self._given:
            self._more(self._given)
            self._given = ""


class CharReader(Reader):
    """A reader that looks at each character once, as a generator."""

    @cached_property
    def _reading(self) -> Reading:
        reading = self._read()
        next(reading)
        return reading

    def feed(self, text: str) -> int:
        used = 0
        for used, char in enumerate(text, 1):  # noqa: B007
            try:
                self._reading.send(char)
            except StopIteration:
                self.done = True
                break
            except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
                self.broken = True
                break
        self._pass_on()
        return used

    @abstractmethod
    def _read(self) -> Reading:
        """Read the call. Raises ``ValueError``, or what parsers raise, where it is none."""


class CallReader(CharReader):
    """Reads ``{"name": …, "arguments": {…}}``; if ``name`` is given, the arguments alone.

    ``strict``: an object with other keys, or without arguments, is no call.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        more: Callable[[str], None],
        name: str | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self._name = name  # may be known before ``begin`` is called
        self._has_arguments = False
        super().__init__(begin, more)
        if name is not None:
            self._say(name)

    def _read(self) -> Reading:
        char = yield
        if self._name is not None:
            yield from self._value(char, passes=True)
            return
        after = ","
        while after == ",":
            char = yield from _next_solid()
            if char == "}":
                break
            if char != '"':
                raise ValueError("no key")
            key = json.loads((yield from self._value(char)))
            after = yield from self._member(key)
        if not self.begun or after not in ",}":
            raise ValueError("no call")
        if not self._has_arguments:
            self._given = "{}"

    def _member(self, key: str) -> ReadingText:
        """Read what follows a key; returns the character after the value."""
        again = key in _ARGUMENTS and self._has_arguments
        if again or (self._strict and key not in (*_ARGUMENTS, *_OTHER_KEYS)):
            raise ValueError(key)
        if (yield from _next_solid()) != ":":
            raise ValueError("no colon")
        char, after = (yield from _next_solid()), ""
        if key in _ARGUMENTS:
            self._has_arguments = True
            if self._name is not None and not self.begun:
                self._say(self._name)
        passes = key in _ARGUMENTS and char in "{["
        if char in '{["':
            text = yield from self._value(char, passes)
        else:
            text = char
            while (after := (yield)) not in ",}":
                text += after
        if key == "name":
            self._name_is(json.loads(text))
        elif key in _ARGUMENTS and not passes:
            self._given += _arguments(text)
        return after or (yield from _next_solid())

    def _name_is(self, name: object) -> None:
        if not isinstance(name, str) or not name or self._name is not None:
            raise ValueError("no name")
        self._name = name
        if self._has_arguments or not self._strict:
            self._say(name)

    def _value(self, char: str, passes: bool = False) -> ReadingText:
        """Read an object, list or string that begins with ``char``; ``passes``: into arguments."""
        span, text = Span(), ""
        while True:
            text += char
            if passes:
                self._given += char
            if span.feed(char):
                return text
            char = yield


def _next_solid() -> ReadingText:
    """The next character that is not white space."""
    while (char := (yield)).isspace():
        pass
    return char


def _arguments(text: str) -> str:
    """Arguments that are no object: some models write their JSON as a string."""
    value = json.loads(text)
    found = value if isinstance(value, str) else text.strip()
    return found if value is not None and found.strip() else "{}"


_LONGEST_NAME = 256
_KEY = re.compile(r"<parameter=([^<>\n]{1,256})>\n?")
_KEY_BEGUN = re.compile(r"<parameter=[^<>\n]{0,256}")
_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_VALUE_END = re.compile("|".join(_VALUE_ENDS))
_END = "</function>"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class XmlCall(Reader):
    """Reads what follows ``<function=``: ``name>``, ``<parameter=key>value</parameter>``, the end.

    The schemas tell strings from other values; a string is passed on while it is written, another
    value once it is whole.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        more: Callable[[str], None],
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(begin, more, schemas)
        self._properties: Mapping[str, Any] = {}
        self._step: Callable[[XmlCall], bool] = XmlCall._name
        self._text = ""  # not read yet
        self._before = "{"  # what precedes the next key
        self._kinds: set[str] = set()  # JSON types that the current value may have
        self._value = ""  # the current value so far, unless it is a string

    def feed(self, text: str) -> int:
        self._text = text
        while self._text and not (self.done or self.broken) and self._step(self):
            pass
        self._pass_on()
        return len(text) - len(self._text)

    def _name(self) -> bool:
        end = re.search(r"[<>\s]", self._text)
        if end is None and len(self._text) < _LONGEST_NAME:
            return False
        name = self._text[: end.start()] if end else ""
        self._text = self._text[len(name) + 1 :]
        if end is None or end[0] != ">" or not name:
            self.broken = True
            return True
        self._step = XmlCall._parameter
        self._properties = _mapping(_mapping(_mapping(self._schemas).get(name)).get("properties"))
        self._say(name)
        return True

    def _parameter(self) -> bool:
        text = self._text.lstrip()
        key = _KEY.match(text)
        if (key and key.end() == len(text)) or _is_unfinished(text):
            return False  # the line of the key may go on
        if key is None:  # also where the model forgot the end
            self._text = text.removeprefix(_END)
            self._given += "{}" if self._before == "{" else "}"
            self.done = True
            return True
        self._text = text[key.end() :]
        self._kinds = _kinds(self._properties.get(key[1]))
        self._given += f"{self._before}{_dumped(key[1])}: " + '"' * ("string" in self._kinds)
        self._before, self._value, self._step = ", ", "", XmlCall._value_of_key
        return True

    def _value_of_key(self) -> bool:
        end = _VALUE_END.search(self._text)
        sure = end.start() if end else len(self._text) - begun_at_end(self._text, _VALUE_ENDS)
        value, self._text = self._text[:sure], self._text[end.end() if end else sure :]
        if "string" in self._kinds:
            self._given += _dumped(value)[1:-1] + '"' * (end is not None)
        else:
            self._value += value
            self._given += _json_of(self._value, bool(self._kinds)) if end else ""
        if end is not None:
            self._step = XmlCall._parameter
        return end is not None


class PythonCall(CharReader):
    """Reads ``name(key=value, …)`` with Python's literals; it is passed on once it is complete."""

    def _read(self) -> Reading:
        name = text = ""
        while (char := (yield)) != "(":
            name += char
            if len(name) > _LONGEST_NAME or not re.fullmatch(r"[^\W\d][\w.-]*", name):
                raise ValueError("no name")
        if self._schemas is not None and name not in self._schemas:
            raise ValueError("no tool")
        span = Span("\"'", depth=1)
        while not span.feed(char := (yield)):
            text += char
        self._given = _dumped(_keywords(text))
        self._say(name)


class _JsonNames(ast.NodeTransformer):
    """Takes ``true``, ``false`` and ``null`` as literals; other names raise ``KeyError``."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_NAMES[node.id])


def _keywords(text: str) -> dict[str, Any]:
    """The arguments by name. Raises ``ValueError`` for others, and what ``ast`` raises."""
    with warnings.catch_warnings():  # about escapes that Python does not know
        warnings.simplefilter("ignore")
        call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("arguments without names")
    return {str(k.arg): ast.literal_eval(_JsonNames().visit(k.value)) for k in call.keywords}


def _json_of(text: str, typed: bool) -> str:
    """The value as JSON; without a known type, all but objects and lists are strings."""
    if typed or text.lstrip()[:1] in ("{", "["):
        for read in (json.loads, ast.literal_eval):
            try:
                return _dumped(read(text.strip()))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return _dumped(text)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _kinds(schema: object) -> set[str]:
    """The JSON types that a schema names. The client wrote the schema, so it may hold anything."""
    branches = [schema]
    for key in ("anyOf", "oneOf"):
        further = _mapping(schema).get(key)
        branches += further if isinstance(further, list) else []
    named = [_mapping(branch).get("type") for branch in branches]
    types = [kind for kinds in named for kind in (kinds if isinstance(kinds, list) else [kinds])]
    return {kind for kind in types if isinstance(kind, str)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_unfinished(text: str) -> bool:
    """Whether this may be the beginning of a parameter or of the end."""
    begins = any(whole.startswith(text) for whole in ("<parameter=", _END))
    return (begins and text != _END) or _KEY_BEGUN.fullmatch(text) is not None
