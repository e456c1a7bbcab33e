"""Text to events. How the text is cut makes no difference to what the events add up to.

Text that turns out not to be a call is content, so nothing is lost. The exception is an answer that
guided decoding holds to calls (``FORCED``): such text is the beginning of a call that was cut.
"""

from __future__ import annotations

import ast
import json
import secrets
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import regex

from trtllm_bls.chat_parsing.formats import ReasoningTags, ToolFormat


@dataclass(frozen=True)
class Content:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call begins, with its whole name; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, which add up to JSON text as the model wrote it."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments


@cache
def _compiled(pattern: str) -> Any:
    """The pattern for ``regex``, whose own cache costs more than a match."""
    return regex.compile(pattern)


@cache
def _any_of(markers: tuple[str, ...]) -> Any:
    return regex.compile("|".join(map(regex.escape, markers)) or "(?!)")


class ChatParser:
    """Parses one answer.

    White space around reasoning and around calls is dropped. An empty line comes between two parts
    of content, or of reasoning, that something else separated.

    ``opened``: the prompt ended with the tag that begins reasoning.
    ``schemas``: the parameters of the tools that may be called, by name, where they are known.
    ``plain``: there is neither a format nor a tag, and all text is content as it comes.
    Calls beyond ``most_calls`` are left out.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningTags | None = None,
        *,
        opened: bool = False,
        schemas: Mapping[str, Any] | None = None,
        most_calls: int | None = None,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self.plain = tools is None and reasoning is None
        self._tools = tools or (reasoning and reasoning.messages) or ToolFormat()
        self._reasoning = reasoning
        self._schemas = schemas
        self._most_calls = sys.maxsize if most_calls is None else most_calls
        self._new_id = new_id
        self._num_calls = 0
        self._call: Reader | None = None
        self._buffer = ""  # not looked at yet
        self._blank = ""  # white space that is text only if more text follows
        self._held = ""  # text from a marker on, which is content if no call follows
        self._drops = False  # text between calls is not content
        self._strips = False  # the next text begins a part, without the white space before it
        self._kinds: set[type[Content] | type[Reasoning]] = set()  # of the text so far
        self._events: list[Event] = []
        # A function of the class. A bound method would be a reference cycle, which keeps the parser
        # until a garbage collection.
        self._step: Callable[[ChatParser], bool] = ChatParser._start
        if opened and reasoning:
            self._step, self._strips = ChatParser._reason, True

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return self._num_calls > 0

    def feed(self, text: str, end: bool = False) -> list[Event]:
        """The events that are certain with this text; ``end``: there is no more."""
        if self.plain:
            return [Content(text)] if text else []
        self._buffer += text
        while self._buffer and self._step(self):
            pass
        return self._drain_events() + (self.flush() if end else [])

    def flush(self) -> list[Event]:
        """The remaining events of an answer that has ended, perhaps in the middle of a call."""
        begun = self._call is not None and self._call.begun
        if self._step == ChatParser._reason:
            self._add_text(Reasoning, self._buffer)
        elif self._tools.bare == "" and not self._tools.begin:
            # A cut call of the only tool: its name is known without the text.
            if not self.has_calls and len(self._schemas or ()) == 1:
                self._begin(None, *(self._schemas or ()))
        else:
            if self._step in (ChatParser._start, ChatParser._read_content):
                self._add_text(Content, self._buffer)
            elif not begun and (self._held or self._step != ChatParser._between):
                self._add_text(Content, self._held + self._buffer)
            if self._blank and not self.has_calls:
                self._events.append(Content(self._blank))
        self._buffer = self._blank = self._held = ""
        self._call = None
        return self._drain_events()

    # --- steps: each reads the buffer and returns false where it needs more text -----------------

    def _start(self) -> bool:
        """Nothing but white space has come so far, of the answer or after its reasoning."""
        text = self._buffer.lstrip()
        bare = self._tools.bare
        tag = self._reasoning.begin if self._reasoning and bare != "" else ""
        if not text or (tag.startswith(text) and text != tag):
            return False
        if tag and text.startswith(tag):
            self._buffer = text[len(tag) :]
            self._step, self._strips = ChatParser._reason, True
        elif bare is not None and text.startswith(bare):
            self._drops = not bare  # with any other, the text may still be content
            self._hold(len(self._buffer) - len(text))
            self._step = ChatParser._between
        else:
            self._step = ChatParser._read_content
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        before, end = self._until((self._reasoning.end,))
        self._add_text(Reasoning, before)
        if end is None:
            return False
        self._step, self._strips = ChatParser._start, True
        return True

    def _read_content(self) -> bool:
        before, marker = self._until(self._tools.begin)
        self._add_text(Content, before)
        if marker is None:
            return False
        self._buffer = marker + self._buffer
        self._held, self._blank = self._blank, ""
        self._step = ChatParser._between
        return True

    def _between(self) -> bool:
        """After a marker or a call: begin the next call, or return to content."""
        tools, text = self._tools, self._buffer.lstrip()
        self._hold(len(self._buffer) - len(text))
        header = _compiled(tools.header).match(text, partial=True)
        if header is not None and not header.partial:
            self._open(header)
            return True
        markers = (*tools.begin, *tools.noise)
        if header is not None or any(each.startswith(text) and each != text for each in markers):
            return False
        marker = max((each for each in markers if text.startswith(each)), key=len, default="")
        if not marker:
            self._give_up()
        elif marker not in tools.noise:
            self._drops = False
        elif marker in tools.begin:
            self._drops, self._held = True, ""
        self._hold(len(marker))
        return True

    def _open(self, header: Any) -> None:
        """Begin the call, or the message, that the match of a header announces."""
        groups, tools = header.groupdict(), self._tools
        name = groups.get("name")
        self._drops = False
        self._hold(header.end())
        if name is None and "channel" in groups:
            thinks = groups["channel"] == "analysis" or groups.get("other") is not None
            thinks = thinks and self._reasoning is not None
            self._step = ChatParser._reason if thinks else ChatParser._read_content
            self._held, self._strips = "", True
        else:
            self._call = _READERS[tools.written](tools, name, groups.get("id"), self._schemas)
            self._step = ChatParser._read_call
            self._tell(self._call)

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        used = call.feed(self._buffer)
        self._hold(used)
        self._tell(call)
        if call.broken and not call.begun:
            self._give_up()
        elif call.done or call.broken:
            self._call, self._held = None, ""
            self._drops, self._step = True, ChatParser._between
        return used > 0 or self._step != ChatParser._read_call

    # --- helpers ------------------------------------------------------------------------------

    def _until(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """Remove the text before the first marker, and the marker, from the buffer; return both.

        Without a marker, it is the text that cannot be the beginning of one.
        """
        text = self._buffer
        found = _any_of(markers).search(text, partial=True)
        start, end = found.span() if found is not None else (len(text), len(text))
        if found is None or found.partial:
            self._buffer = text[start:]
            return text[:start], None
        self._buffer = text[end:]
        return text[:start], text[start:end]

    def _hold(self, count: int) -> None:
        if not self._drops:
            self._held += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> None:
        """There is no call: the text held for one is content."""
        held, self._held, self._call = self._held, "", None
        self._strips = self._strips or self._drops
        self._drops, self._step = False, ChatParser._read_content
        self._add_text(Content, held)

    def _add_text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Add text, without the white space at its end, which may turn out to be its end."""
        text = self._blank + text
        if self._strips:
            text = text.lstrip()
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        if solid:
            separator = "\n\n" if self._strips and kind in self._kinds else ""
            self._strips = False
            self._kinds.add(kind)
            self._events.append(kind(separator + solid))

    def _tell(self, call: Reader) -> None:
        """Add the events of what is certain of the call."""
        if call.begun and call.index is None:
            call.index = self._num_calls
            self._begin(call.id, str(call.name))
        if call.index is not None and call.given:
            self._events.append(Arguments(call.index, call.given))
            call.given = ""

    def _begin(self, call_id: str | None, name: str) -> None:
        call_id = call_id or self._new_id()[-self._tools.id_length :]
        self._events.append(ToolCall(self._num_calls, call_id, name))
        self._num_calls += 1

    def _drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return [event for event in events if getattr(event, "index", 0) < self._most_calls]


# --- readers of one call while the model writes it: JSON, XML tags, Python, Gemma's notation ------

# Generators that get one character by each ``send``.
_Reading: TypeAlias = Generator[None, str, None]
_ReadingText: TypeAlias = Generator[None, str, str]


class Reader(ABC):
    """Reads one call, from its arguments on; from its name on if ``name`` is ``None``.

    ``begun``: this is a call, and its name is known. ``given``: JSON of its arguments that nobody
    has taken yet. ``done``: the call is complete. ``broken``: the text is no call, or only the
    beginning of one. ``index``: its place in the answer, from when it is told on. ``schemas``: by
    name, the parameters of the tools that may be called; ``None``: they are not known.
    """

    _known_by_name = True  # what follows the name of a call is its arguments, whatever it is

    def __init__(
        self,
        tools: ToolFormat,
        name: str | None,
        call_id: str | None,
        schemas: Mapping[str, Any] | None,
    ) -> None:
        self._tools, self._schemas = tools, schemas
        self.name, self.id = name, call_id
        self.begun = name is not None and self._known_by_name
        self.done = self.broken = False
        self.given = ""
        self.index: int | None = None

    @abstractmethod
    def feed(self, text: str) -> int:
        """Read more text; returns how many of its characters belong to the call."""


class CharReader(Reader):
    """A reader that looks at each character once, as a generator."""

    @cached_property
    def _reading(self) -> _Reading:
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
        return used

    @abstractmethod
    def _read(self) -> _Reading:
        """Read the call. Raises ``ValueError``, or what parsers raise, where it is none."""


class _Span:
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


_ARGUMENTS, _OTHER_KEYS = ("arguments", "parameters"), ("name", "type", "id")


class JsonCall(CharReader):
    """Reads ``{"name": …, "arguments": {…}}``; if ``name`` is given, the arguments alone.

    Where a call has no marker, an object with other keys, or without arguments, is no call.
    """

    def _read(self) -> _Reading:
        char = yield
        if self.name is not None:
            yield from self._value(char, passes=True)
            return
        strict, has_arguments, after = self._tools.bare == "{", False, ","
        while after == ",":
            char = yield from _next_solid()
            if char == "}":
                break
            if char != '"':
                raise ValueError("no key")
            key = json.loads((yield from self._value(char)))
            holds_arguments = key in _ARGUMENTS
            if has_arguments if holds_arguments else strict and key not in _OTHER_KEYS:
                raise ValueError(key)
            if (yield from _next_solid()) != ":":
                raise ValueError("no colon")
            char, after = (yield from _next_solid()), ""
            if holds_arguments:
                has_arguments, self.begun = True, self.name is not None
            passes = holds_arguments and char in "{["
            if char in '{["':
                text = yield from self._value(char, passes)
            else:
                text = char
                while (after := (yield)) not in ",}":
                    text += after
            if key == "name":
                name = json.loads(text)
                if not isinstance(name, str) or not name or self.name is not None:
                    raise ValueError("no name")
                self.name, self.begun = name, has_arguments or not strict
            elif holds_arguments and not passes:
                # Arguments that are no object: some models write their JSON as a string.
                value = json.loads(text)
                found = value if isinstance(value, str) else text.strip()
                self.given += found if value is not None and found.strip() else "{}"
            after = after or (yield from _next_solid())
        if not self.begun or after not in ",}":
            raise ValueError("no call")
        if not has_arguments:
            self.given = "{}"

    def _value(self, char: str, passes: bool = False) -> _ReadingText:
        """Read an object, list or string that begins with ``char``; ``passes``: into arguments."""
        span, text = _Span(), ""
        while True:
            text += char
            if passes:
                self.given += char
            if span.feed(char):
                return text
            char = yield


def _next_solid() -> _ReadingText:
    """The next character that is not white space."""
    while (char := (yield)).isspace():
        pass
    return char


class XmlCall(Reader):
    """Reads arguments in tags, for example ``<parameter=key>value</parameter>``, and the end.

    The schemas tell strings from other values; a string is passed on while it is written, another
    value once it is whole.
    """

    _before = "{"  # what precedes the next key
    _kinds: Collection[str] | None = None  # JSON types of the value being read; none at a key
    _value = ""  # that value so far, unless it streams

    def feed(self, text: str) -> int:
        left = text
        while left and not self.done:
            if self._kinds is None:
                key_or_end = rf"\s*(?:{self._tools.key}|{self._tools.end})"
                found = _compiled(key_or_end).match(left, partial=True)
                if found is not None and found.partial:
                    break
                if found is None or found["key"] is None:  # also where the model forgot the end
                    self.given += "{}" if self._before == "{" else "}"
                    self.done = True
                else:
                    schema = _mapping(_mapping(self._schemas).get(str(self.name)))
                    value = _mapping(schema.get("properties")).get(found["key"])
                    is_string = found.groupdict().get("string")
                    told = {"true": {"string"}, "false": {"number"}}.get(is_string)
                    self._kinds, self._value = told or _kinds(value), ""
                    self.given += f"{self._before}{_dumped(found['key'])}: "
                    self.given += '"' * _streams(self._kinds)
                    self._before = ", "
                left = left[found.end() if found else 0 :]
            else:
                end = _compiled(self._tools.value_end).search(left, partial=True)
                self._value += left[: end.start()]
                left = left[end.start() if end.partial else end.end() :]
                if _streams(self._kinds):
                    self.given += _dumped(self._value)[1:-1] + '"' * (not end.partial)
                    self._value = ""
                elif not end.partial:
                    self.given += _json_of(self._value, self._kinds)
                if end.partial:
                    break
                self._kinds = None
        return len(text) - len(left)


def _streams(kinds: Collection[str]) -> bool:
    """Whether a value of these types is a string, whatever it looks like."""
    return "string" in kinds and "null" not in kinds


class PythonCall(CharReader):
    """Reads ``key=value, …)`` with Python's literals; it is given once it is complete."""

    _known_by_name = False

    def _read(self) -> _Reading:
        name, text = str(self.name), ""
        if self._schemas is not None and name not in self._schemas:
            raise ValueError("no tool")
        span = _Span("\"'", depth=1)
        while not span.feed(char := (yield)):
            text += char
        with warnings.catch_warnings():  # about escapes that Python does not know
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("arguments without names")
        values = {k.arg: ast.literal_eval(_JsonNames().visit(k.value)) for k in call.keywords}
        self.given, self.begun = _dumped(values), True


class _JsonNames(ast.NodeTransformer):
    """Takes ``true``, ``false`` and ``null`` as literals; other names raise ``KeyError``."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


_QUOTE = '<|"|>'
_CLOSING = {"{": "}", "[": "]"}


class GemmaCall(CharReader):
    """Reads ``{key:<|"|>text<|"|>,key:[1,true]}``: keys bare, texts between quotes of their own."""

    _opened = ""  # brackets
    _word = ""  # what stands bare since the last bracket, comma or colon
    _comma = ""  # what comes before the next key or item
    _is_key = False

    def _read(self) -> _Reading:
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

    def _text(self) -> _Reading:
        """Read a text, from behind its first character on, and the quote that ends it."""
        for expected in _QUOTE[1:]:
            if (yield) != expected:
                raise ValueError("no quote")
        self._give('"')
        seen = ""
        while seen != _QUOTE:
            seen += yield
            while not _QUOTE.startswith(seen):
                self.given += _dumped(seen[0])[1:-1]
                seen = seen[1:]
        self.given += '"'

    def _end_word(self, char: str) -> None:
        """Give a bare key or value, of which there is none after a text, and what ends it."""
        if word := self._word.strip():
            self._give(_dumped(word) if char == ":" else _json_of(word, {"number"}))
        self._word, self._is_key = "", char == "," and self._opened[-1] == "{"
        if char == ",":
            self._comma = ", "
        elif char == ":":
            self.given += ": "
        elif char != _CLOSING[self._opened[-1]]:
            raise ValueError("another bracket is open")
        else:
            self.given += char
            self._opened, self._comma = self._opened[:-1], ""

    def _give(self, text: str) -> None:
        self.given += self._comma + text
        self._comma = ""


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


_READERS: dict[str, type[Reader]] = {
    "json": JsonCall,
    "xml": XmlCall,
    "python": PythonCall,
    "gemma": GemmaCall,
}
