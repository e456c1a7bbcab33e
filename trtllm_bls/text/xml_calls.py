"""Calls in XML: ``<parameter=key>value</parameter>`` and its like, by the tags of a format."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import regex

from trtllm_bls.text.call_reader import (
    GAP,
    MAX_TOKENS,
    CallReader,
    CutCall,
    Reading,
    ReadingMatch,
    compiled,
)
from trtllm_bls.text.chat_formats import ToolFormat
from trtllm_bls.text.json_values import dumped, without_end_quote
from trtllm_bls.text.notation_calls import read_notation
from trtllm_bls.text.tool_schemas import TEXT_KINDS, ValueKinds, any_of

# A value is held back for so many characters at most where its end is not certain.
MAX_HELD = 1 << 17


class _Tags(NamedTuple):
    """Patterns of a format in XML.

    ``between`` arguments: the next key, the call's end, or a tag without a meaning. In a ``value``:
    its closer, or a tag that may show that the closer is missing; ``held``: the same, and another
    call. ``after_value`` and ``after_call``: texts behind a closer, or behind the end of a call,
    which show that it belongs to no value.
    """

    between: str
    value: str
    held: str
    after_value: str
    after_call: str


_NAMED_GROUP = regex.compile(r"\(\?P<\w+>")


@cache
def _tags(tools: ToolFormat, complete: bool) -> _Tags:
    """Return the patterns of a format in XML; ``complete``: for the end of an answer."""
    answer_end = r"|\Z" if complete else ""
    markers = any_of(tools.markers)
    ends = any_of(tools.ends)
    key = _NAMED_GROUP.sub("(?:", tools.key)
    header = _NAMED_GROUP.sub("(?:", tools.header)
    between = f"{tools.key}|(?P<end>{ends}|(?={markers}))|(?P<stray>{tools.stray})"
    missing = (
        f"(?P<next>{tools.line_key or tools.key})"
        rf"|(?P<end>(?:\r?\n[ \t]{{0,64}}+)?(?:{any_of((*tools.ends, *tools.closers))}))"
    )
    value = f"(?P<closer>{tools.closer})|{missing}"
    return _Tags(
        between,
        value,
        f"{value}|(?P<begin>{header}(?={GAP}(?:{key}|{ends})))",
        f"{GAP}(?:{key}|{ends}|{markers}|{tools.stray}{answer_end})",
        f"{GAP}(?:{markers}{answer_end})",
    )


def read_xml(call: CallReader) -> Reading:
    """Read arguments in tags, for example ``<parameter=key>value</parameter>``, and the end.

    The schemas tell texts from other values; a text is put out while it is written, another value
    once it is whole. Arguments may also be one object of JSON.
    """
    tools = call.tools
    unread = call.unread
    separator = "{"
    while True:
        call.num_tokens += 1
        if call.num_tokens > MAX_TOKENS:
            raise ValueError("too many arguments")
        unread.skip_blanks()
        if not unread:
            if unread.ended and unread.complete and separator != "{":
                break
            yield from call.more()
            continue
        match = yield from call.match(_tags(tools, unread.complete).between)
        if match is None and separator == "{" and unread.text[unread.at] == "{":
            yield from read_notation(call)
            yield from _end_of_object(call)
            return
        if match is None:
            raise ValueError("neither a key nor an end")
        if match["stray"]:
            continue
        if match["key"] is None:
            break
        call.output.append(f"{separator}{dumped(match['key'])}: ")
        separator = ", "
        yield from _read_argument(call, match)
    call.output.append("{}" if separator == "{" else "}")


def _end_of_object(call: CallReader) -> Reading:
    """Read the text after arguments in JSON, up to the end of the call."""
    while True:
        call.unread.skip_blanks()
        if not call.unread and call.unread.complete:
            return
        if not call.unread:
            yield from call.more()
            continue
        tag = yield from call.match(_tags(call.tools, call.unread.complete).between)
        if tag is None or tag["key"] is not None:
            raise ValueError("no end")
        if tag["stray"] is None:
            return


_TEXT_MARKS = ("true", "string")
_TYPED_KINDS = ValueKinds({"type": ["null", "integer", "number", "boolean", "object", "array"]})


def _read_argument(call: CallReader, key: Any) -> Reading:
    """Read a value, whose key has been matched."""
    kinds = call.offered.kinds(str(call.name), key["key"])
    mark = key.groupdict().get("string")
    if mark is not None:
        kinds = _TYPED_KINDS
        if mark.lower() in _TEXT_MARKS:
            kinds = TEXT_KINDS
    if kinds.is_text:
        call.output.append('"')
        yield from _read_tagged(call, call.give_text)
        call.output.append('"')
        return
    parts: list[str] = []
    try:
        yield from _read_tagged(call, parts.append)
    except CutCall:
        text = "".join(parts).strip()
        if text:
            call.output.append(without_end_quote(kinds.json_of(text)))
        raise
    call.output.append(kinds.json_of("".join(parts)))


def _read_tagged(call: CallReader, take: Callable[[str], object]) -> Reading:
    """Read a value and its closer.

    A value ends at its closer; where the text has none before the call's end, at the next key; else
    at the call's end. From the first thing on that may be either, the text is held back.
    """
    unread = call.unread
    start = unread.dropped + unread.at
    while start not in call.values:
        tags = _tags(call.tools, unread.complete)
        match = unread.find(tags.value)
        take(unread.read_to(match))
        if match is None or match.partial:
            yield from call.more()
        elif match["next"] and not call.offered.has_argument(str(call.name), match["key"]):
            take(unread.read(unread.at + 1))
        else:
            yield from _HeldValues(call, start).settle()
            if start not in call.values:
                take(unread.read(len(unread.text)))
    end, following = call.values.pop(start)
    take(unread.read(end - unread.dropped))
    unread.at = following - unread.dropped


class _HeldValues:
    """Finds where the value from ``start`` on ends, and those that follow it, in text that stays
    unread.

    A key may be the next argument's or part of the value. As brackets do, keys and closers belong
    together, so the value has a closer of its own if there is one more of them before the call's
    end. A closer is certain where a key or the call's end follows it.

    Places are characters of the answer. ``starts``: the starts of this value and of those behind
    the ``keys`` within it. ``opened``: values without a closer so far, as indices of ``starts``.
    ``ends``: the end of a value, and the place behind its closer where reading goes on, by the
    value's start. ``own_closer``: begin and end of a closer that may be this value's.
    """

    def __init__(self, call: CallReader, start: int) -> None:
        self.call = call
        self.unread = call.unread
        self.begin = call.unread.dropped + call.unread.at
        self.cursor = self.begin
        self.starts = [start]
        self.keys: list[int] = []
        self.opened = [0]
        self.ends: dict[int, tuple[int, int]] = {}
        self.own_closer: tuple[int, int] | None = None
        self.end_of_call: int | None = None

    def settle(self) -> Reading:
        """Note the ends in ``call.values``; none where the answer was cut inside the value."""
        while self.cursor - self.begin <= MAX_HELD:
            tag = yield from self._next_tag()
            if tag is None or self._take(*tag):
                break
        is_cut = self.unread.ended and not self.unread.complete
        if self.opened and self.end_of_call is None and is_cut:
            return
        for index in self.opened:
            end = self.end_of_call
            if index < len(self.keys):
                end = self.keys[index]
            if end is not None:
                self.ends[self.starts[index]] = (end, end)
        if self.own_closer is not None:
            self.ends[self.starts[0]] = self.own_closer
        self.call.values.update(self.ends)

    def _next_tag(self) -> ReadingMatch:
        """Return the next tag, and true if later text makes it certain; ``None`` at the end."""
        unread = self.unread
        while True:
            tags = _tags(self.call.tools, unread.complete)
            tag = unread.find(tags.held, self.cursor - unread.dropped)
            is_partial = tag is not None and tag.partial
            follows = None
            if tag is not None and not is_partial and (tag["closer"] or tag["end"]):
                pattern = tags.after_call
                if tag["closer"]:
                    pattern = tags.after_value
                is_open = not unread.complete
                follows = compiled(pattern).match(unread.text, tag.end(), partial=is_open)
                is_partial = follows is not None and follows.partial
            if tag is not None and not is_partial:
                self.cursor = unread.dropped + tag.end()
                return tag, follows is not None
            if unread.ended:
                return None
            searched = len(unread.text) if tag is None else tag.start()
            self.cursor = unread.dropped + searched
            if self.cursor - self.begin > MAX_HELD:
                return None
            yield from self.call.more()

    def _take(self, tag: Any, is_certain: bool) -> bool:
        """Take the next tag; return true if the ends are known now."""
        begin = self.cursor - len(tag[0])
        if tag["begin"] is not None:
            return self.end_of_call is not None
        if tag["closer"] is not None and len(self.opened) > 1:
            self.ends[self.starts[self.opened.pop()]] = (begin, self.cursor)
        elif tag["closer"] is not None:
            if self.own_closer is None or is_certain:
                self.own_closer = (begin, self.cursor)
            if is_certain:
                self.ends.clear()
                self.opened.clear()
            return is_certain
        elif tag["end"] is not None:
            if self.end_of_call is None:
                self.end_of_call = begin
            return is_certain
        elif self.call.offered.has_argument(str(self.call.name), tag["key"]):
            self.opened.append(len(self.starts))
            self.starts.append(self.cursor)
            self.keys.append(begin)
        return False
