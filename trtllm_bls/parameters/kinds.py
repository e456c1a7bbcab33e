"""What a parameter's value may be, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRUE = {"true", "1", "t", "y", "yes"}
_FALSE = {"false", "0", "f", "n", "no"}


def is_true(text: str) -> bool:
    """Whether a parameter's text means true; anything else, also the empty text, does not."""
    return text.strip().lower() in _TRUE


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words, and its reader, which raises ``ValueError``."""

    expected: str
    parse: Callable[[str], Any]


def _flag(text: str) -> bool:
    if text.strip().lower() not in _TRUE | _FALSE:
        raise ValueError(text)
    return is_true(text)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def count(least: int) -> Kind:
    """A whole number of at least ``least``."""

    def parse(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text)

    return Kind(f"a whole number of at least {least}", parse)


def choice(*choices: str) -> Kind:
    """One of the words."""

    def parse(text: str) -> str:
        return choices[choices.index(text)]

    return Kind(f"one of: {', '.join(choices)}", parse)


FLAG = Kind("true or false", _flag)
NUMBER = Kind("a number that is not negative", _number)
TEXT = Kind("a text", str)
# Must exist; a relative one starts at the repository.
DIRECTORY = Kind("a directory", Path)
FILE = Kind("a file", Path)
