"""JSON that models and clients wrote: what it says if it can be read, and how it is mended."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

from trtllm_bls.errors import structure_problem


def json_value(text: str) -> Any:
    """What a JSON text within a body or an answer says; ``None`` where it is none, is too deep, or
    has a number or half a character that other readers of JSON refuse."""
    with suppress(ValueError):  # also of what cannot be encoded
        if structure_problem(text.encode()) is None:
            value = json.loads(text, parse_constant=_finite, parse_float=_finite)
            if _HALF.search(text):
                dumped(value).encode()  # which half a character cannot be
            return value
    return None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


SURROGATES = re.compile("[\ud800-\udfff]")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# What JSON text consists of, inside of strings and outside.
_INSIDE = re.compile(rf'[^"\\\x00-\x1f]+|{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.|["\\\x00-\x1f]', re.S)
_OUTSIDE = re.compile(r'[^"]+|"')
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# The beginning of what ``_INSIDE`` may read in another way with more text.
_CUT = re.compile(rf"(?:{_HIGH})?\\(?:u[0-9a-fA-F]{{0,3}})?|{_HIGH}")


class JsonStrings:
    """Mends what models get wrong inside the strings of JSON: control characters become escapes,
    half of a character U+FFFD. Everything else stays, and so does all that is valid."""

    def __init__(self) -> None:
        self._cut, self._inside = "", False

    def feed(self, text: str, end: bool = False) -> str:
        """The text, as far as it is certain; ``end``: there is no more."""
        text, self._cut = self._cut + SURROGATES.sub("\ufffd", text), ""
        parts, at = list[str](), 0
        while at < len(text):
            if self._inside and not end and _CUT.fullmatch(text, at):
                self._cut = text[at:]
                break
            match = (_INSIDE if self._inside else _OUTSIDE).match(text, at)
            assert match is not None
            at, part = match.end(), match[0]
            if part == '"':
                self._inside = not self._inside
            elif self._inside and part < " ":
                part = dumped(part)[1:-1]
            elif self._inside and match[1]:
                part = r"\ufffd"
            parts.append(part)
        return "".join(parts)
