"""Calls in JSON and in Gemma's notation: objects and lists between brackets.

JSON stays as it is, but for mistakes of models, which are mended: quotes and words of Python, a
comma before a bracket that closes, and brackets that are missing before a marker or at the end of
an answer which the model itself has ended. In Gemma's notation keys and texts may be bare words.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from trtllm_bls.text.call_reader import MAX_TOKENS, CallReader, CutCall, Reading
from trtllm_bls.text.json_values import SURROGATES, JsonStrings, without_end_quote
from trtllm_bls.text.tool_schemas import TEXT_KINDS, WORD_KINDS, ValueKinds, any_of

STRING_BODIES = {
    '"': re.compile(r'(?:[^"\\]+|\\.)*', re.S),
    "'": re.compile(r"(?:[^'\\]+|\\.)*", re.S),
}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_JSON_BRACKETS = {"(": "{", ")": "}"}  # for Gemma's; JSON's own stay
_ESCAPES = re.compile(r"\\(.)|\"", re.S)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_MAX_WORD = 4096  # characters of a literal
_WORD_END = re.compile(r"[^\w.+-]")
_GEMMA_QUOTE = r'<\|"\|>'
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class _Next(Enum):
    """The next thing that a notation expects."""

    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    AFTER = "after"  # a comma, or the bracket that closes


# The next thing after an opening bracket or a comma, by the bracket that closes.
_ITEMS = {"}": _Next.KEY, ")": _Next.KEY, "]": _Next.VALUE}


class _Notation:
    """Reads an object or list to its end.

    ``opened``: the closing bracket of each open one. ``is_empty``: the innermost of them has just
    been opened. ``held``: a comma and the white space behind it, which leave with the next item.
    """

    def __init__(self, call: CallReader) -> None:
        self.call = call
        self.unread = call.unread
        self.is_gemma = call.tools.language == "gemma"
        self.space = " " if self.is_gemma else ""  # behind colons and commas; JSON has its own
        self.expects = _Next.VALUE
        self.opened: list[str] = []
        self.is_empty = False
        self.held = ""

    def read(self) -> Reading:
        """Read all of it, which begins here."""
        call = self.call
        unread = self.unread
        while True:
            call.num_tokens += 1
            if call.num_tokens > MAX_TOKENS:
                self._release()
                raise ValueError("too many values")
            self._take_blanks()
            if not unread:
                if self.opened and unread.complete and self.expects is _Next.AFTER:
                    call.output += reversed(self.opened)
                    return
                if unread.ended:
                    self._release()
                yield from call.more()
                continue
            char = unread.text[unread.at]
            is_quote = char in "\"'"
            if self.is_gemma and char == "<":
                is_quote = (yield from call.match(f"(?={_GEMMA_QUOTE})")) is not None
            if self.opened and not is_quote and (yield from call.is_at_marker()):
                # Brackets that are missing before a marker are supplied.
                if self.expects is not _Next.AFTER:
                    self._release()
                    raise ValueError("nothing before a marker")
                call.output += reversed(self.opened)
                return
            if self._closes(char):
                self._close(char)
                if not self.opened:
                    return
            elif self.expects is _Next.COLON:
                self._read_colon(char)
            elif self.expects is _Next.AFTER:
                self._read_comma(char)
            else:
                yield from self._read_item(char, is_quote)

    def _take_blanks(self) -> None:
        blanks = self.unread.skip_blanks()
        if self.is_gemma:
            return
        if self.held:
            self.held += blanks
        else:
            self.call.output.append(blanks)

    def _release(self) -> None:
        self.call.output.append(self.held)
        self.held = ""

    def _closes(self, char: str) -> bool:
        """True for the bracket that closes the innermost one, also behind a comma too many."""
        may_close = self.expects is _Next.AFTER or self.is_empty or bool(self.held)
        return bool(self.opened) and may_close and char == self.opened[-1]

    def _close(self, char: str) -> None:
        self.unread.at += 1
        if not self.is_gemma:
            self.call.output.append(self.held.lstrip(","))
        self.call.output.append(_JSON_BRACKETS.get(char, char))
        self.opened.pop()
        self.held = ""
        self.is_empty = False
        self.expects = _Next.AFTER

    def _read_colon(self, char: str) -> None:
        if char != ":" and not (self.is_gemma and char == "="):
            raise ValueError("no colon")
        self.unread.at += 1
        self.call.output.append(f":{self.space}")
        self.expects = _Next.VALUE

    def _read_comma(self, char: str) -> None:
        if char != ",":
            raise ValueError("no comma")
        self.unread.at += 1
        self.held = f",{self.space}"
        self.expects = _ITEMS[self.opened[-1]]

    def _read_item(self, char: str, is_quote: bool) -> Reading:
        """Read a key or a value, or open a bracket."""
        call = self.call
        self._release()
        self.is_empty = False
        is_key = self.expects is _Next.KEY
        opens = char in "{[" or (char == "(" and self.is_gemma and not self.opened)
        if opens and not is_key:
            self.unread.at += 1
            call.output.append(_JSON_BRACKETS.get(char, char))
            self.opened.append(_CLOSING[char])
            self.is_empty = True
            self.expects = _ITEMS[_CLOSING[char]]
            return
        if is_quote and char == "<":
            yield from _read_gemma_string(call)
        elif is_quote:
            yield from _read_string(call, char)
        elif is_key and self.is_gemma:
            yield from _read_bare_text(call, "[][{}(),:=]", TEXT_KINDS)
        elif is_key:
            raise ValueError("no key")
        elif self.is_gemma:
            end = "[][{},]"
            if self.opened[-1] == ")":
                end = "[][{},)]"
            yield from _read_bare_text(call, end, WORD_KINDS)
        else:
            yield from _read_word(call)
        self.expects = _Next.COLON if is_key else _Next.AFTER


def read_notation(call: CallReader) -> Reading:
    """Read an object or list, which begins here."""
    yield from _Notation(call).read()


def _double_quoted(match: re.Match[str]) -> str:
    """Write an escape, or a quote, of a string in single quotes as JSON has it."""
    char = match[1]
    if char is None:
        return '\\"'
    if char == "'":
        return "'"
    if char in '"\\/bfnrtu':
        return match[0]
    return "\\" + match[0]


def _without_escape(match: re.Match[str]) -> str:
    """Write an escape as JSON has it, which escapes no single quote."""
    return "'" if match[1] == "'" else match[0]


def _read_string(call: CallReader, quote: str) -> Reading:
    """Read a string of JSON, or one in single quotes, which begins here."""
    unread = call.unread
    body = STRING_BODIES[quote]
    unread.at += 1
    call.output.append('"')
    while True:
        text = unread.read(body.match(unread.text, unread.at).end())  # type: ignore[union-attr]
        if quote == "'":
            text = _ESCAPES.sub(_double_quoted, text)
        elif "\\'" in text:
            text = re.sub(r"\\(.)", _without_escape, text, flags=re.S)
        call.output.append(text)
        if unread and unread.text[unread.at] == quote:
            break
        yield from call.more()
    unread.at += 1
    call.output.append('"')


def _read_gemma_string(call: CallReader) -> Reading:
    yield from call.match(_GEMMA_QUOTE)
    call.output.append('"')
    yield from call.until(_GEMMA_QUOTE, call.give_text)
    call.output.append('"')


def _read_bare_text(call: CallReader, end: str, kinds: ValueKinds) -> Reading:
    """Read a key or value of Gemma's notation that has no quotes."""
    parts: list[str] = []
    try:
        yield from call.until(f"(?={end}|{any_of(call.tools.markers)})", parts.append)
    except CutCall:
        text = "".join(parts).strip()
        if text:
            call.output.append(without_end_quote(kinds.json_of(text)))
        raise
    text = "".join(parts).strip()
    if not text:
        raise ValueError("nothing")
    call.output.append(kinds.json_of(text))


def _read_word(call: CallReader) -> Reading:
    """Read a literal of JSON or Python; no character of it is searched twice for its end."""
    unread = call.unread
    num_searched = 0
    while True:
        end = _WORD_END.search(unread.text, unread.at + num_searched)
        if end is not None:
            break
        num_searched = len(unread.text) - unread.at
        if num_searched > _MAX_WORD:
            raise ValueError("no value")
        if unread.ended and num_searched:
            call.output.append(unread.read(len(unread.text)))
            num_searched = 0
        elif unread.complete:
            raise ValueError("no value")
        yield from call.more()
    word = unread.text[unread.at : end.start()]
    if not 0 < len(word) <= _MAX_WORD:
        raise ValueError("no value")
    text = _LITERALS.get(word, word)
    json.loads(text, parse_constant=float)
    unread.at = end.start()
    call.output.append(text)


def _read_value(call: CallReader, char: str) -> Reading:
    if char in "{[":
        yield from read_notation(call)
    elif char in "\"'":
        yield from _read_string(call, char)
    else:
        yield from _read_word(call)


# --- calls of JSON -------------------------------------------------------------------------------


def read_json(call: CallReader) -> Reading:
    """Read ``{"name": …, "arguments": {…}}``; if the name is known, the arguments alone."""
    if call.name is None:
        yield from _NamedCall(call).read()
        return
    call.unread.skip_blanks()
    while not call.unread:
        if call.unread.complete and call.tools.may_be_empty:
            call.output.append("{}")
            return
        yield from call.more()
        call.unread.skip_blanks()
    if call.unread.text[call.unread.at] == "{":
        yield from read_notation(call)
    elif call.tools.may_be_empty and (yield from call.is_at_marker()):
        call.output.append("{}")
    else:
        raise ValueError("no object")


class _NamedCall:
    """Reads an object with a name and arguments, in any order, also within one called function.

    Where a call has no marker (``is_strict``), an object with other keys, or without arguments, is
    no call. ``depth``: braces that are open. ``is_first``: the innermost has just been opened.
    """

    def __init__(self, call: CallReader) -> None:
        self.call = call
        self.is_strict = call.tools.bare == "{" or not call.is_marked
        self.depth = 0
        self.is_first = True
        self.has_arguments = False

    def read(self) -> Reading:
        """Read all of it, which begins here."""
        call = self.call
        unread = call.unread
        while True:
            unread.skip_blanks()
            has_all = call.has_begun and self.has_arguments
            if has_all and not unread and unread.complete:
                return
            char = yield from call.next_solid()
            if self.depth and (yield from call.is_at_marker()):
                if not has_all:
                    raise ValueError("no arguments")
                return  # The rest of the braces was forgotten.
            if char == "{" and self.is_first and self.depth < 2:
                unread.at += 1
                self.depth += 1
                self.is_first = self.depth == 1
            elif char == "}" and self.depth:
                unread.at += 1
                self.depth -= 1
                self.is_first = False
                if not self.depth:
                    self._end()
                    return
            elif char == "," and not self.is_first:
                unread.at += 1
            elif char in "\"'" and self.depth:
                self.is_first = False
                yield from self._read_member(char)
            else:
                raise ValueError("no key")

    def _read_member(self, quote: str) -> Reading:
        call = self.call
        key = json.loads((yield from call.captured(_read_string(call, quote))), strict=False)
        if (yield from call.next_solid()) != ":":
            raise ValueError("no colon")
        call.unread.at += 1
        char = yield from call.next_solid()
        if key == "function" and char == "{":
            self.is_first = True
        elif key in _ARGUMENTS:
            if self.has_arguments:
                raise ValueError("arguments twice")
            self.has_arguments = True
            call.has_begun = call.name is not None
            yield from _read_arguments(call, char)
        elif self.is_strict and key not in ("name", "type", "id"):
            raise ValueError(key)
        else:
            text = yield from call.captured(_read_value(call, char))
            if key in _NAMES:
                self._set_name(text)

    def _set_name(self, text: str) -> None:
        call = self.call
        if not text.startswith('"') or call.name is not None:
            raise ValueError("no name")
        name = SURROGATES.sub("\ufffd", json.loads(text, strict=False))
        if not name:
            raise ValueError("no name")
        tool = call.offered.named(name)
        if call.is_amid_text and tool is None and call.offered.are_known:
            raise ValueError("no tool")
        call.name = tool or name
        call.has_begun = self.has_arguments or not self.is_strict

    def _end(self) -> None:
        if not self.call.has_begun or (self.is_strict and not self.has_arguments):
            raise ValueError("no call")
        if not self.has_arguments:
            self.call.output.append("{}")


def _read_arguments(call: CallReader, char: str) -> Reading:
    """Read the value of ``arguments``, which some models write as a text of JSON."""
    if char in "{[":
        yield from read_notation(call)
        return
    is_string = char in "\"'"
    parts: list[str] = []
    try:
        text = yield from call.captured(_read_value(call, char), parts)
    except CutCall:
        text = "".join(parts)
        if is_string:
            text = _cut_string(text)
        call.output.append(text)
        raise
    if is_string:
        text = json.loads(JsonStrings().feed(text, end=True), strict=False)
    if text.strip() in ("", "null"):
        text = "{}"
    call.output.append(text)


def _cut_string(text: str) -> str:
    """Return the text of a string of JSON that has no end."""
    for end in range(len(text), max(len(text) - 12, 0), -1):  # without half an escape
        try:
            return str(json.loads(text[:end] + '"', strict=False))
        except ValueError:
            continue
    return ""
