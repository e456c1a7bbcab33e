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
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import cache
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


ChatEvent: TypeAlias = Content | Reasoning | ToolCall | Arguments


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
        self._call: CallReader | None = None
        self._reading: _Reading | None = None  # of the call
        self._buffer = ""  # not looked at yet
        self._blank = ""  # white space that is text only if more text follows
        self._held = ""  # text from a marker on, which is content if no call follows
        self._drops = False  # text between calls is not content
        self._strips = False  # the next text begins a part, without the white space before it
        self._kinds: set[type[Content] | type[Reasoning]] = set()  # of the text so far
        self._events: list[ChatEvent] = []
        # A function of the class. A bound method would be a reference cycle, which keeps the parser
        # until a garbage collection.
        self._step: Callable[[ChatParser], bool] = ChatParser._start
        if opened and reasoning:
            self._step, self._strips = ChatParser._reason, True

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return self._num_calls > 0

    def feed(self, text: str, end: bool = False) -> list[ChatEvent]:
        """The events that are certain with this text; ``end``: there is no more."""
        if self.plain:
            return [Content(text)] if text else []
        self._buffer += text
        while self._buffer and self._step(self):
            pass
        return self._drain_events() + (self.flush() if end else [])

    def flush(self) -> list[ChatEvent]:
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
        """After a marker or a call: begin the next call or message, or return to content."""
        tools, text = self._tools, self._buffer.lstrip()
        self._hold(len(self._buffer) - len(text))
        header = _compiled(tools.header).match(text, partial=True)
        if header is None or header.partial:
            markers = (*tools.begin, *tools.noise)
            if header is not None or any(m.startswith(text) and m != text for m in markers):
                return False
            marker = max((m for m in markers if text.startswith(m)), key=len, default="")
            if not marker:
                self._give_up()
            elif marker not in tools.noise:
                self._drops = False
            elif marker in tools.begin:
                self._drops, self._held = True, ""
            self._hold(len(marker))
            return True
        groups = header.groupdict()
        name = groups.get("name")
        self._drops = False
        self._hold(header.end())
        if name is None and "channel" in groups:
            thinks = groups["channel"] == "analysis" or groups.get("other") is not None
            thinks = thinks and self._reasoning is not None
            self._step = ChatParser._reason if thinks else ChatParser._read_content
            self._held, self._strips = "", True
        else:
            # Arguments in Python are looked at as a whole first: they may be an answer's prose.
            begun = name is not None and tools.written != "python"
            self._call = CallReader(tools, name, groups.get("id"), self._schemas, begun)
            self._reading = _READERS[tools.written](self._call)
            self._step = ChatParser._read_call
            self._tell(self._call)
        return True

    def _read_call(self) -> bool:
        call, reading, over = self._call, self._reading, False
        assert call is not None and reading is not None
        call.text = self._buffer
        try:
            next(reading)
        except (StopIteration, *_NO_CALL):
            over = True
        self._hold(len(self._buffer) - len(call.text))
        self._tell(call)
        if over and not call.begun:
            self._give_up()
        elif over:
            self._call, self._held = None, ""
            self._drops, self._step = True, ChatParser._between
        return over

    # --- helpers ------------------------------------------------------------------------------

    def _until(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """Remove the text before the first marker, and the marker, from the buffer; return both.

        Without a marker, it is the text that cannot be the beginning of one.
        """
        text = self._buffer
        found = _any_of(markers).search(text, partial=True)
        start, end = found.span() if found is not None else (len(text), len(text))
        marker = None if found is None or found.partial else found[0]
        self._buffer = text[start if marker is None else end :]
        return text[:start], marker

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

    def _tell(self, call: CallReader) -> None:
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

    def _drain_events(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return [event for event in events if getattr(event, "index", 0) < self._most_calls]


# --- one call while the model writes it: JSON, XML tags, Python, Gemma's notation ---------------

# What readers raise for a text that is no call, or only the beginning of one.
_NO_CALL = (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError)
# Generators that stop where they need more text of the call.
_Reading: TypeAlias = Generator[None, None, None]
_ReadingText: TypeAlias = Generator[None, None, str]
_ReadingMatch: TypeAlias = Generator[None, None, Any]


@dataclass
class CallReader:
    """A call, from its arguments on; from its name on if ``name`` is ``None``.

    ``schemas``: by name, the parameters of the tools that may be called; ``None``: they are not
    known. ``begun``: this is a call, and its name is known. ``text``: what is not read yet.
    ``given``: JSON of the arguments that nobody has taken yet. ``index``: the call's place in the
    answer, once it is told.
    """

    tools: ToolFormat
    name: str | None
    id: str | None
    schemas: Mapping[str, Any] | None
    begun: bool
    text: str = ""
    given: str = ""
    index: int | None = None

    def match(self, pattern: str) -> _ReadingMatch:
        """Read what matches the pattern, behind white space; ``None`` if nothing does."""
        while True:
            self.text = self.text.lstrip()
            found = _compiled(pattern).match(self.text, partial=True)
            if found is None or not found.partial:
                self.text = self.text[found.end() if found else 0 :]
                return found
            yield

    def until(self, pattern: str, take: Callable[[str], object]) -> _ReadingMatch:
        """Read up to the pattern's match, which is returned; ``take`` gets the text before it."""
        while True:
            end = _compiled(pattern).search(self.text, partial=True)
            take(self.text[: end.start()])
            self.text = self.text[end.start() if end.partial else end.end() :]
            if not end.partial:
                return end
            yield

    def span(self, quotes: str = '"', depth: int = 0, passes: bool = False) -> _ReadingText:
        """Read an object, list or string of JSON or Python, and return it.

        ``depth``: brackets that are open already. ``passes``: it is part of the arguments.
        """
        found, quote, escaped = "", "", False
        while True:
            used = 0
            for used, char in enumerate(self.text, 1):  # noqa: B007
                if quote:
                    if escaped or char == "\\":
                        escaped = not escaped
                    elif char == quote:
                        quote = ""
                elif char in quotes:
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                if not quote and depth == 0:
                    break
            part, self.text = self.text[:used], self.text[used:]
            found += part
            self.given += part if passes else ""
            if part and not quote and depth == 0:
                return found
            yield

    def give_text(self, text: str) -> None:
        """Add to a string of the arguments."""
        self.given += _dumped(text)[1:-1]


def _read_json(call: CallReader) -> _Reading:
    """Read ``{"name": …, "arguments": {…}}``; if the name is known, the arguments alone.

    Where a call has no marker, an object with other keys, or without arguments, is no call.
    """
    if call.name is not None:
        yield from call.span(passes=True)
        return
    yield from call.match(r"\{")
    strict, has_arguments, after = call.tools.bare == "{", False, ","
    while after == ",":
        if (yield from call.match(r'(?=[}"])')) is None:
            raise ValueError("no key")
        if call.text[0] == "}":
            after, call.text = "}", call.text[1:]
            break
        key = json.loads((yield from call.span()))
        holds_arguments = key in ("arguments", "parameters")
        if has_arguments if holds_arguments else strict and key not in ("name", "type", "id"):
            raise ValueError(key)
        if (yield from call.match(":")) is None or (yield from call.match(r"(?=\S)")) is None:
            raise ValueError("no value")
        if holds_arguments:
            has_arguments, call.begun = True, call.name is not None
        passes, is_bare = holds_arguments and call.text[0] in "{[", call.text[0] not in '{["'
        if is_bare:
            parts: list[str] = []
            after = (yield from call.until("[,}]", parts.append))[0]
            text = "".join(parts)
        else:
            text = yield from call.span(passes=passes)
        if key == "name":
            name = json.loads(text)
            if not isinstance(name, str) or not name or call.name is not None:
                raise ValueError("no name")
            call.name, call.begun = name, has_arguments or not strict
        elif holds_arguments and not passes:
            # Arguments that are no object: some models write their JSON as a string.
            value = json.loads(text)
            found = value if isinstance(value, str) else text.strip()
            call.given += found if value is not None and found.strip() else "{}"
        if not is_bare:
            after = (yield from call.match(r"\S"))[0]
    if not call.begun or after not in ",}":
        raise ValueError("no call")
    if not has_arguments:
        call.given = "{}"


def _read_xml(call: CallReader) -> _Reading:
    """Read arguments in tags, for example ``<parameter=key>value</parameter>``, and the end.

    The schemas tell strings from other values; a string is given while it is written, another
    value once it is whole.
    """
    tools, before = call.tools, "{"
    properties = _mapping(_mapping(call.schemas).get(str(call.name))).get("properties")
    while found := (yield from call.match(f"{tools.key}|{tools.end}")):
        if found["key"] is None:
            break
        told = {"true": {"string"}, "false": {"number"}}.get(found.groupdict().get("string"))
        kinds = told or _kinds(_mapping(properties).get(found["key"]))
        call.given += f"{before}{_dumped(found['key'])}: "
        before = ", "
        if "string" in kinds and "null" not in kinds:
            call.given += '"'
            yield from call.until(tools.value_end, call.give_text)
            call.given += '"'
        else:
            parts: list[str] = []
            yield from call.until(tools.value_end, parts.append)
            call.given += _json_of("".join(parts), kinds)
    # Here also where the model forgot the end.
    call.given += "{}" if before == "{" else "}"


def _read_python(call: CallReader) -> _Reading:
    """Read ``key=value, …)`` with Python's literals; it is given once it is complete."""
    if call.schemas is not None and call.name not in call.schemas:
        raise ValueError("no tool")
    text = yield from call.span("\"'", depth=1)
    with warnings.catch_warnings():  # about escapes that Python does not know
        warnings.simplefilter("ignore")
        made = ast.parse(f"f({text}", mode="eval").body
    if not isinstance(made, ast.Call) or made.args or any(k.arg is None for k in made.keywords):
        raise ValueError("arguments without names")
    values = {k.arg: ast.literal_eval(_JsonNames().visit(k.value)) for k in made.keywords}
    call.given, call.begun = _dumped(values), True


class _JsonNames(ast.NodeTransformer):
    """Takes ``true``, ``false`` and ``null`` as literals; other names raise ``KeyError``."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _read_gemma(call: CallReader) -> _Reading:
    """Read ``{key:<|"|>text<|"|>,key:[1,true]}``: keys bare, texts between quotes of their own."""
    quote, closing = r'<\|"\|>', {"{": "}", "[": "]"}
    opened, comma, is_key = "", "", False  # brackets; what comes before the next key or item
    while True:
        begins = yield from call.match(rf"{quote}|(?=[^<])")
        if begins is None:
            raise ValueError("no quote")
        if begins[0]:
            call.given, comma = f'{call.given}{comma}"', ""
            yield from call.until(quote, call.give_text)
            call.given += '"'
            continue
        parts: list[str] = []
        mark = (yield from call.until(r"[][{},:]" if is_key else r"[][{},]", parts.append))[0]
        if word := "".join(parts).strip():
            shown = _dumped(word) if mark == ":" else _json_of(word, {"number"})
            call.given, comma = call.given + comma + shown, ""
        is_key = mark == "{" or (mark == "," and opened[-1] == "{")
        if mark in "{[":
            call.given, comma, opened = call.given + comma + mark, "", opened + mark
        elif mark == ",":
            comma = ", "
        elif mark == ":":
            call.given += ": "
        elif mark != closing[opened[-1]]:
            raise ValueError("another bracket is open")
        else:
            call.given, comma, opened = call.given + mark, "", opened[:-1]
            if not opened:
                return


_READERS: dict[str, Callable[[CallReader], _Reading]] = {
    "json": _read_json,
    "xml": _read_xml,
    "python": _read_python,
    "gemma": _read_gemma,
}


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
