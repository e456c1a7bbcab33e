"""What a parameter is: its models, what its value may be, and how its text is read."""

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


@dataclass(frozen=True)
class Parameter:
    """One row: a parameter of ``models``.

    ``default`` holds where a configuration does not have the key. ``shipped`` is the value in the
    checked-in ``config.pbtxt`` where that is another. ``env`` names the variable that overrides
    both. An empty default of a directory or file that is not ``optional`` means it must be given.
    """

    key: str
    models: tuple[str, ...]
    kind: Kind
    default: str
    meaning: str
    env: str = ""
    shipped: str | None = None
    optional: bool = False

    @property
    def in_file(self) -> str:
        """The value in the checked-in configuration."""
        return self.default if self.shipped is None else self.shipped


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


def count_or_auto(least: int) -> Kind:
    """The same, or the word ``auto``, which is read as ``None``."""
    number = count(least)

    def parse(text: str) -> int | None:
        return None if text == "auto" else int(number.parse(text))

    return Kind(f"{number.expected}, or auto", parse)


def choice(*choices: str) -> Kind:
    """One of the words."""

    def parse(text: str) -> str:
        return choices[choices.index(text)]

    return Kind(f"one of: {', '.join(choices)}", parse)


def _model(text: str) -> str:
    if "/" in text:
        raise ValueError(text)
    return text


FLAG = Kind("true or false", _flag)
MODEL = Kind("the name of a model of this server (an address is for `engine`)", _model)
NUMBER = Kind("a number that is not negative", _number)
TEXT = Kind("a text", str)
# Must exist; a relative one starts at the repository.
DIRECTORY = Kind("a directory", Path)
FILE = Kind("a file", Path)
