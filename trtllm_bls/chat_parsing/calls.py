"""Readers of one tool call while the model writes it: JSON, XML tags, Python, Gemma's notation."""

from __future__ import annotations

import ast
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from functools import cache, cached_property
from typing import Any, TypeAlias

import regex

from trtllm_bls.chat_parsing.formats import ToolFormat

_ARGUMENTS, _OTHER_KEYS = ("arguments", "parameters"), ("name", "type", "id")
# Generators that get one character by each ``send``.
Reading: TypeAlias = Generator[None, str, None]
ReadingText: TypeAlias = Generator[None, str, str]


@cache
def compiled(pattern: str) -> Any:
    """The pattern for ``regex``, whose own cache costs more than a match."""
    return regex.compile(pattern)


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
    """Reads one call, from its arguments on; from its name on if ``name`` is ``None``.

    ``begin`` is called once with the call's name, then ``more`` with pieces of its arguments, which
    add up to JSON. ``begun``: ``begin`` has been called. ``done``: the call is complete.
    ``broken``: the text is no call, or only the beginning of one. ``schemas``: by name, the
    parameters of the tools that may be called; ``None``: they are not known.
    """

    _says_name_first = True

    def __init__(
        self,
        tools: ToolFormat,
        name: str | None,
        schemas: Mapping[str, Any] | None,
        begin: Callable[[str], None],
        more: Callable[[str], None],
    ) -> None:
        self._tools, self._name, self._schemas = tools, name, schemas
        self.begun = self.done = self.broken = False
        self._begin, self._more = begin, more
        self._given = ""  # arguments that ``more`` has not got yet
        if name is not None and self._says_name_first:
            self._say(name)

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

    Where a call has no marker, an object with other keys, or without arguments, is no call.
    """

    _has_arguments = False

    @property
    def _strict(self) -> bool:
        return self._tools.bare == "{"

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


class XmlCall(Reader):
    """Reads arguments in tags, for example ``<parameter=key>value</parameter>``, and the end.

    The schemas tell strings from other values; a string is passed on while it is written, another
    value once it is whole.
    """

    _text = ""  # not read yet
    _before = "{"  # what precedes the next key
    _in_value = False
    _kinds: Collection[str] = ()  # JSON types that the current value may have
    _value = ""  # the current value so far, unless it streams

    @property
    def _streams(self) -> bool:
        """Whether the current value is a string, whatever it looks like."""
        return "string" in self._kinds and "null" not in self._kinds

    def feed(self, text: str) -> int:
        self._text = text
        while self._text and not self.done:
            if not (self._read_value() if self._in_value else self._read_key()):
                break
        self._pass_on()
        return len(text) - len(self._text)

    def _read_key(self) -> bool:
        """Read the next key, or the end of the call; false: it is not complete."""
        key_or_end = rf"\s*(?:{self._tools.key}|{self._tools.end})"
        found = compiled(key_or_end).match(self._text, partial=True)
        if found is not None and found.partial:
            return False
        if found is None or found["key"] is None:  # also where the model forgot the end
            self._given += "{}" if self._before == "{" else "}"
            self.done = True
        else:
            properties = _mapping(_mapping(self._schemas).get(str(self._name))).get("properties")
            told = {"true": {"string"}, "false": {"number"}}.get(found.groupdict().get("string"))
            self._kinds = told or _kinds(_mapping(properties).get(found["key"]))
            self._given += f"{self._before}{_dumped(found['key'])}: "
            self._given += '"' * self._streams
            self._before, self._value, self._in_value = ", ", "", True
        self._text = self._text[found.end() if found else 0 :]
        return True

    def _read_value(self) -> bool:
        """Read more of a value; false: it is not complete."""
        end = compiled(self._tools.value_end).search(self._text, partial=True)
        value = self._text[: end.start()]
        self._in_value = end.partial
        self._text = self._text[end.start() if end.partial else end.end() :]
        if self._streams:
            self._given += _dumped(value)[1:-1] + '"' * (not end.partial)
        else:
            self._value += value
            self._given += "" if end.partial else _json_of(self._value, self._kinds)
        return not self._in_value


class PythonCall(CharReader):
    """Reads ``key=value, …)`` with Python's literals; it is passed on once it is complete."""

    _says_name_first = False

    def _read(self) -> Reading:
        name, text = str(self._name), ""
        if self._schemas is not None and name not in self._schemas:
            raise ValueError("no tool")
        span = Span("\"'", depth=1)
        while not span.feed(char := (yield)):
            text += char
        self._given = _dumped(_keywords(text))
        self._say(name)


_QUOTE = '<|"|>'
_CLOSING = {"{": "}", "[": "]"}


class GemmaCall(CharReader):
    """Reads ``{key:<|"|>text<|"|>,key:[1,true]}``: keys bare, texts between quotes of their own."""

    _opened = ""  # brackets
    _word = ""  # what stands bare since the last bracket, comma or colon
    _comma = ""  # what comes before the next key or item
    _is_key = False

    def _read(self) -> Reading:
        while True:
            char = yield
            if char == "<" and not self._word.strip():
                yield from self._text()
            elif char in "{[":
                self._give(char)
                self._opened, self._is_key = self._opened + char, char == "{"
            elif char in ",]}" or (char == ":" and self._is_key):
                self._end_word(char)
                if not self._opened:
                    return
            else:
                self._word += char

    def _text(self) -> Reading:
        """Read a text, from behind its first character on, and the quote that ends it."""
        for expected in _QUOTE[1:]:
            if (yield) != expected:
                raise ValueError("no quote")
        self._give('"')
        seen = ""
        while seen != _QUOTE:
            seen += yield
            while not _QUOTE.startswith(seen):
                self._given += _dumped(seen[0])[1:-1]
                seen = seen[1:]
        self._given += '"'

    def _end_word(self, char: str) -> None:
        """Give a bare key or value, of which there is none after a text, and what ends it."""
        if word := self._word.strip():
            self._give(_dumped(word) if char == ":" else _json_of(word, {"number"}))
        self._word, self._is_key = "", char == "," and self._opened[-1] == "{"
        if char == ",":
            self._comma = ", "
        elif char == ":":
            self._given += ": "
        elif char != _CLOSING[self._opened[-1]]:
            raise ValueError("another bracket is open")
        else:
            self._given += char
            self._opened, self._comma = self._opened[:-1], ""

    def _give(self, text: str) -> None:
        self._given += self._comma + text
        self._comma = ""


_JSON_NAMES = {"true": True, "false": False, "null": None}


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


def _json_of(text: str, kinds: Collection[str]) -> str:
    """The value as JSON of one of these types; of none, all but objects and lists are strings."""
    if "string" in kinds and text.strip() != "null":
        return _dumped(text)
    if kinds or text.lstrip()[:1] in ("{", "["):
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
