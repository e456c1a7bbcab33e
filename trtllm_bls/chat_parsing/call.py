"""One tool call's JSON, read as it is written."""

from __future__ import annotations

import json
from collections.abc import Callable

_ARGUMENTS, _OTHER_KEYS = ("arguments", "parameters"), ("name", "type", "id")


class _Span:
    """Finds the end of one JSON value, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, char: str) -> bool:
        """Whether the value, an object, list or string, is complete with this character."""
        if self._in_string:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._in_string = False
                return self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallReader:
    """One call's JSON: ``{"name": …, "arguments": {…}}``, or with ``name`` the arguments alone.

    Calls ``begin`` with the name, then ``more`` with pieces of the arguments. ``strict``: an object
    with other keys, or without arguments, is no call.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        more: Callable[[str], None],
        name: str | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.begun = self.done = self.broken = False
        self._begin, self._more = begin, more
        self._strict = strict
        self._step = self._open if name is None else self._whole
        self._span = _Span()
        self._name: str | None = None  # known, not said
        self._key = ""
        self._text = ""  # of the key or value under way
        self._passes = False  # the value under way is passed on as it comes
        self._has_arguments = False
        self._given = ""  # of the arguments, not passed on
        if name is not None:
            self._name_is(name)
            self._say_name()

    def feed(self, text: str) -> int:
        """How many characters belong to the call."""
        used = 0
        for used, char in enumerate(text, 1):  # noqa: B007
            self._step(char)
            if self.done or self.broken:
                break
        if self.begun and self._given:
            self._more(self._given)
            self._given = ""
        return used

    def _name_is(self, name: object) -> None:
        known = self.begun or self._name is not None
        if not isinstance(name, str) or not name or known:
            self.broken = True
            return
        self._name = name
        if self._has_arguments or not self._strict:
            self._say_name()

    def _say_name(self) -> None:
        if self._name is not None and not self.begun:
            self.begun = True
            self._begin(self._name)

    # --- what to do with the next character ---------------------------------------------------

    def _whole(self, char: str) -> None:
        self._given += char
        self.done = self._span.take(char)

    def _open(self, char: str) -> None:
        self._step = self._before_key

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._span, self._text, self._step = _Span(), "", self._in_key
            self._in_key(char)
        elif char == "}":
            self._close()
        elif not char.isspace():
            self.broken = True

    def _in_key(self, char: str) -> None:
        self._text += char
        if self._span.take(char):
            self._key = str(self._value_of(self._text))
            again = self._key in _ARGUMENTS and self._has_arguments
            unknown = self._key not in (*_ARGUMENTS, *_OTHER_KEYS)
            self.broken = self.broken or again or (self._strict and unknown)
            self._step = self._before_value

    def _before_value(self, char: str) -> None:
        if char == ":" and not self._text.endswith(":"):
            self._text += char
        elif not char.isspace():
            self.broken = not self._text.endswith(":")
            self._passes = self._key in _ARGUMENTS and char in "{["
            if self._key in _ARGUMENTS:
                self._has_arguments = True
                self._say_name()
            self._span, self._text, self._step = _Span(), "", self._in_value
            self._in_value(char)

    def _in_value(self, char: str) -> None:
        scalar = self._text[:1] not in ("", "{", "[", '"')
        if scalar and char in ",}":
            self._end_value()
            self._step(char)
            return
        self._text += char
        if self._passes:
            self._given += char
        if self._span.take(char):
            self._end_value()

    def _end_value(self) -> None:
        self._step = self._after_value
        if self._key in _ARGUMENTS:
            if not self._passes:  # some models write the arguments' JSON as a string
                value = self._value_of(self._text)
                text = value if isinstance(value, str) else self._text.strip()
                self._given += "{}" if value is None or not text.strip() else text
        elif self._key == "name":
            self._name_is(self._value_of(self._text))

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            self._close()
        elif not char.isspace():
            self.broken = True

    def _close(self) -> None:
        self.done, self.broken = self.begun, not self.begun
        if not self._has_arguments:
            self._given = "{}"

    def _value_of(self, text: str) -> object:
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError):
            self.broken, value = True, None
        return value
