"""Reading JSON that models and clients wrote, within limits, and mending the strings in it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

MAX_DEPTH = 100  # lists and objects within each other, in all JSON that is walked
MAX_CONTAINERS = 100_000
_SCALARS = {bool, float, int, type(None)}
_QUOTE = 2
_BACKSLASH = 3


def _byte_meanings() -> bytes:
    """Return the meaning of each byte of JSON for its structure, for ``bytes.translate``.

    Read as int8, 1 begins a list or object, -1 ends one, and 0 means nothing.
    """
    meanings = bytearray(256)
    for byte in b"[{":
        meanings[byte] = 1
    for byte in b"]}":
        meanings[byte] = 255
    meanings[ord('"')] = _QUOTE
    meanings[ord("\\")] = _BACKSLASH
    return bytes(meanings)


_MEANINGS = _byte_meanings()


def structure_problem(text: bytes) -> str | None:
    """Return the reason why JSON would take a parser or a walk too long; ``None`` without one.

    Lists and objects are counted before any is made. The text before a mistake in it is counted as
    a parser reads it, and no parser reads on after one.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return None
    import numpy as np  # most commands do not need it

    kinds = np.frombuffer(text.translate(_MEANINGS), np.int8)
    places = np.flatnonzero(kinds != 0)
    kinds = kinds[places]
    # In a row of backslashes the first, the third and so on escape the character after them.
    follows = np.diff(places, prepend=-2) == 1
    slashes = kinds == _BACKSLASH
    numbers = np.arange(len(kinds))
    in_row = slashes & follows & np.roll(slashes, 1)
    begins = np.maximum.accumulate(np.where(in_row, 0, numbers))
    escapes = slashes & ((numbers - begins) % 2 == 0)
    kinds = kinds[~slashes & ~(follows & np.roll(escapes, 1))]
    in_strings = np.cumsum(kinds == _QUOTE) % 2 == 1
    steps = np.where(in_strings | (kinds == _QUOTE), 0, kinds)  # 1 into a list or object, -1 out
    if np.cumsum(steps).max(initial=0) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} lists and objects within each other; send flatter JSON"
    if np.count_nonzero(steps == 1) > MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS} lists and objects"
    return None


def json_value(text: str) -> Any:
    """Return the value of a JSON text within a body or an answer.

    ``None`` if it is no JSON, is too deep, or has a number or half a character that other readers
    of JSON refuse.
    """
    with suppress(ValueError):  # also from a text that cannot be encoded
        if structure_problem(text.encode()) is None:
            value = json.loads(text, parse_constant=_finite, parse_float=_finite)
            if _HALF.search(text):
                dumped(value).encode()  # raises for half a character
            return value
    return None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def without_end_quote(value: str) -> str:
    """Return JSON without the quote that ends a string, whose text may have been cut."""
    if value.startswith('"'):
        return value[:-1]
    return value


def json_size(value: object, enough: float = math.inf) -> int:
    """Count the characters of a JSON value's texts; any other value counts as one.

    The count ends as soon as it reaches ``enough``.
    """
    size = 0
    unread = [value]
    while unread and size < enough:
        part = unread.pop()
        kind = type(part)  # isinstance with abstract types takes ten times as long
        if kind is str or isinstance(part, str):
            size += len(part)  # type: ignore[arg-type]
            continue
        size += 1
        if kind is dict or isinstance(part, Mapping):
            unread += part.keys()  # type: ignore[attr-defined]
            unread += part.values()  # type: ignore[attr-defined]
        elif kind is list or (isinstance(part, Sequence) and not isinstance(part, bytes)):
            unread += part  # type: ignore[arg-type]
    return size


def json_texts(value: object) -> list[str] | None:
    """Return the texts and keys of a JSON value as a parser makes it.

    ``None`` if it is nested more than ``MAX_DEPTH`` levels deep, or of other types.
    """
    texts: list[str] = []
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                texts.append(item)  # type: ignore[arg-type]
            elif kind is dict or kind is list:
                deeper.append(item)
            elif kind not in _SCALARS:
                return None
        if not deeper:
            return texts
        level = []
        for container in deeper:
            if type(container) is list:
                level += container
                continue
            for key in container:
                if type(key) is not str:
                    return None
            texts += container
            level += container.values()
    return None


SURROGATES = re.compile("[\ud800-\udfff]")
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# The parts of JSON text, inside of strings and outside.
_INSIDE = re.compile(rf'[^"\\\x00-\x1f]+|{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.|["\\\x00-\x1f]', re.S)
_OUTSIDE = re.compile(r'[^"]+|"')
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# A text that ``_INSIDE`` may read in another way once more text has come.
_CUT = re.compile(rf"(?:{_HIGH})?\\(?:u[0-9a-fA-F]{{0,3}})?|{_HIGH}")


class JsonStrings:
    """Mends mistakes of models inside the strings of JSON.

    Control characters become escapes, half of a character becomes U+FFFD. Everything else stays,
    and so does all that is valid.
    """

    def __init__(self) -> None:
        self._cut = ""  # the end of the text so far, which more text may change
        self._inside = False  # a string

    def feed(self, text: str, end: bool = False) -> str:
        """Return the text as far as it is certain; ``end``: no more text comes."""
        text = self._cut + SURROGATES.sub("\ufffd", text)
        self._cut = ""
        parts: list[str] = []
        begin = 0
        while begin < len(text):
            if self._inside and not end and _CUT.fullmatch(text, begin):
                self._cut = text[begin:]
                break
            pattern = _INSIDE if self._inside else _OUTSIDE
            match = pattern.match(text, begin)
            assert match is not None
            begin = match.end()
            part = match[0]
            if part == '"':
                self._inside = not self._inside
            elif self._inside and part < " ":
                part = dumped(part)[1:-1]
            elif self._inside and match[1]:
                part = r"\ufffd"
            parts.append(part)
        return "".join(parts)
