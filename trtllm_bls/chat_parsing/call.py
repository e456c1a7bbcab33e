"""One tool call, read as it is written: the rules of a reader, and the one for JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

_ARGUMENTS, _OTHER_KEYS = ("arguments", "parameters"), ("name", "type", "id")
# Takes characters, each by ``send``.
Reading: TypeAlias = Generator[None, str, None]
ReadingText: TypeAlias = Generator[None, str, str]


def begun_at_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of ``text``, which holds none of them, may begin a marker."""
    lengths = range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1)
    return next((n for n in lengths if any(m.startswith(text[-n:]) for m in markers)), 0)


class Span:
    """Finds the end of an object, list or string of JSON or Python, character by character;
    ``depth`` brackets are open."""

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        self._quotes, self._depth = quotes, depth
        self._quote = ""
        self._escaped = False

    def take(self, char: str) -> bool:
        """Whether it is complete with this character."""
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
            return self._depth <= 0
        return False


class Reader(ABC):
    """Calls ``begin`` with the call's name, once, then ``more`` with pieces of its arguments, which
    add up to JSON. ``begun``: the name has been said; ``done``: the call is complete; ``broken``:
    it is none, or not whole."""

    def __init__(self, begin: Callable[[str], None], more: Callable[[str], None]) -> None:
        self.begun = self.done = self.broken = False
        self._begin, self._more = begin, more
        self._given = ""  # of the arguments, not passed on

    @abstractmethod
    def feed(self, text: str) -> int:
        """How many characters belong to the call."""

    def _say(self, name: str) -> None:
        self.begun = True
        self._begin(name)

    def _pass_on(self) -> None:
        if self.begun and self._given:
            self._more(self._given)
            self._given = ""


class CharReader(Reader):
    """A reader that looks at each character once."""

    def __init__(self, begin: Callable[[str], None], more: Callable[[str], None]) -> None:
        super().__init__(begin, more)
        self._reading = self._read()
        next(self._reading)

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
        """Reads the call. Raises ``ValueError``, or what parsers do, where it is none."""


class CallReader(CharReader):
    """One call's JSON: ``{"name": …, "arguments": {…}}``, or with ``name`` the arguments alone.

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
        self._name = name  # known, perhaps not said
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
            char = yield from _solid()
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
        """Reads what follows a key, and gives the character after the value."""
        again = key in _ARGUMENTS and self._has_arguments
        if again or (self._strict and key not in (*_ARGUMENTS, *_OTHER_KEYS)):
            raise ValueError(key)
        if (yield from _solid()) != ":":
            raise ValueError("no colon")
        char, after = (yield from _solid()), ""
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
        return after or (yield from _solid())

    def _name_is(self, name: object) -> None:
        if not isinstance(name, str) or not name or self._name is not None:
            raise ValueError("no name")
        self._name = name
        if self._has_arguments or not self._strict:
            self._say(name)

    def _value(self, char: str, passes: bool = False) -> ReadingText:
        """An object, list or string that begins with ``char``, passed on as it comes or not."""
        span, text = Span(), ""
        while True:
            text += char
            if passes:
                self._given += char
            if span.take(char):
                return text
            char = yield


def _solid() -> ReadingText:
    """The next character that is no white space."""
    while (char := (yield)).isspace():
        pass
    return char


def _arguments(text: str) -> str:
    """Of a value that is no object: some models write the arguments' JSON as a string."""
    value = json.loads(text)
    found = value if isinstance(value, str) else text.strip()
    return found if value is not None and found.strip() else "{}"
