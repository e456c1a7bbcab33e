"""The unread text of an answer and one call in it, which the readers of all languages share.

A reader is a generator that stops where it needs more text. It puts out JSON as soon as that is
certain, and never takes back any of it. It ends in one of three ways: it returns after a whole
call, raises ``CutCall`` where the answer ended inside the call, and raises one of ``NO_VALUE`` at
the first character that no rule explains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import regex

from trtllm_bls.text.chat_formats import ToolFormat
from trtllm_bls.text.json_values import JsonStrings, dumped
from trtllm_bls.text.tool_schemas import OfferedTools, any_of

Reading: TypeAlias = Generator[None, None, None]
ReadingText: TypeAlias = Generator[None, None, str]
ReadingMatch: TypeAlias = Generator[None, None, Any]

# A call of more tokens is unreadable, so that no call keeps the event loop for long.
MAX_TOKENS = 25_000
GAP = r"\s{0,64}+"  # white space
_MAX_MATCH = 8192  # characters that a pattern matches at most
_BLANKS = re.compile(r"\s*")


class CutCall(Exception):
    """The answer ended inside a call."""


@dataclass
class Unread:
    """Text that nobody has read yet: ``text`` from ``at`` on.

    Text that was read is dropped only when more text comes, since each drop copies the remainder.
    ``dropped`` counts the dropped characters. ``ended``: no more text comes. ``complete``: the
    model itself ended the answer there. Any other answer might have gone on, so the beginning of a
    marker at its end is no marker.
    """

    text: str = ""
    at: int = 0
    dropped: int = 0
    ended: bool = False
    complete: bool = False

    def add(self, text: str) -> None:
        """Append text that has come."""
        self.dropped += self.at
        self.text = self.text[self.at :] + text
        self.at = 0

    def __len__(self) -> int:
        return len(self.text) - self.at

    def skip_blanks(self, blanks: re.Pattern[str] = _BLANKS) -> str:
        """Read white space."""
        return self.read(blanks.match(self.text, self.at).end())  # type: ignore[union-attr]

    def read(self, end: int) -> str:
        """Return the text up to there, which is read now."""
        begin = self.at
        self.at = end
        return self.text[begin:end]

    def read_to(self, match: Any) -> str:
        """Return the text up to a match of ``find``, or all text without one; it is read now."""
        if match is None:
            return self.read(len(self.text))
        return self.read(match.start())

    def match(self, pattern: str, *, partial: bool | None = None) -> Any:
        """Match the pattern here; a partial match is the beginning of one.

        ``partial``: there may be one; by default, unless the answer is complete.
        """
        if partial is None:
            partial = not self.complete
        # ``regex`` looks through all of the text for a literal that the pattern ends with.
        end = self.at + _MAX_MATCH
        match = compiled(pattern).match(self.text, self.at, end, partial=partial)
        if match is not None and match.partial and end < len(self.text):
            return None
        return match

    def find(self, pattern: str, begin: int | None = None) -> Any:
        """Find the first match of the pattern; a partial match is the beginning of one."""
        if begin is None:
            begin = self.at
        return compiled(pattern).search(self.text, begin, partial=not self.complete)


@cache
def compiled(pattern: str) -> Any:
    """Compile for ``regex``, whose own cache costs more than a match."""
    return regex.compile(pattern)


@dataclass
class CallReader:
    """A call, from its arguments on; from its name on if ``name`` is ``None``.

    ``has_begun``: this is a call, and its name is known. ``unread``: the text of the answer.
    ``arguments``: JSON of the arguments in events so far. ``output``: JSON that is in none yet.
    ``index``: the call's place in the answer, once it has an event. ``is_marked``: a marker
    precedes the call. ``is_alone``: not even a bracket does. ``is_held``: only the text after the
    call can show that it is one. ``is_amid_text``: text precedes it, so it can only call a tool of
    the request.
    """

    tools: ToolFormat
    name: str | None
    id: str | None
    offered: OfferedTools
    has_begun: bool
    unread: Unread
    output: list[str] = field(default_factory=list)
    strings: JsonStrings = field(default_factory=JsonStrings)
    arguments: list[str] = field(default_factory=list)
    index: int | None = None
    is_marked: bool = True
    is_alone: bool = False
    is_held: bool = False
    is_amid_text: bool = False
    num_tokens: int = 0
    values: dict[int, tuple[int, int]] = field(default_factory=dict)  # see ``xml_calls``

    @property
    def is_certain(self) -> bool:
        """True once events of the call may leave."""
        return self.has_begun and not self.is_held

    def more(self) -> Reading:
        """Wait for more text. Raises ``CutCall`` if there is none."""
        if self.unread.ended:
            raise CutCall
        yield

    def next(self) -> ReadingText:
        """Return the next character, without reading it."""
        while not self.unread:
            yield from self.more()
        return self.unread.text[self.unread.at]

    def next_solid(self) -> ReadingText:
        """Return the next character behind white space, without reading it."""
        self.unread.skip_blanks()
        while not self.unread:
            yield from self.more()
            self.unread.skip_blanks()
        return self.unread.text[self.unread.at]

    def match(self, pattern: str) -> ReadingMatch:
        """Read the text that matches the pattern, and return the match, if there is one."""
        while True:
            match = self.unread.match(pattern)
            if match is None:
                return None
            if not match.partial:
                self.unread.at = match.end()
                return match
            yield from self.more()

    def until(self, pattern: str, take: Callable[[str], object]) -> ReadingMatch:
        """Read up to the pattern's match, which is returned; ``take`` gets the text before it."""
        while True:
            end = self.unread.find(pattern)
            take(self.unread.read_to(end))
            if end is not None and not end.partial:
                self.unread.at = end.end()
                return end
            yield from self.more()

    def is_at_marker(self) -> ReadingMatch:
        """Return true where a marker of the format begins."""
        markers = self.tools.markers
        if self.unread.text[self.unread.at] not in {marker[0] for marker in markers}:
            return False
        return (yield from self.match(f"(?={any_of(markers)})")) is not None

    def give_text(self, text: str) -> None:
        """Add to a string of the arguments."""
        self.output.append(dumped(text)[1:-1])

    def captured(self, reading: Reading, parts: list[str] | None = None) -> ReadingText:
        """Return the output of a reading, which the call does not get; ``parts`` gets it, too."""
        if parts is None:
            parts = []
        while True:
            output = self.output
            self.output = parts
            try:
                next(reading)
            except StopIteration:
                return "".join(parts)
            finally:
                self.output = output
            yield
