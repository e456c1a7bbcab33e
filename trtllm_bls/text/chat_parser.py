"""Text to events. How the text is cut makes no difference to what the events add up to.

Text that turns out not to be a call is content, so nothing is lost. The exception is an answer that
guided decoding holds to calls (``FORCED``): such text is the beginning of a call that was cut.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import regex

from trtllm_bls.errors import TrtllmBlsError, half_character
from trtllm_bls.text.chat_formats import ReasoningTags, ToolFormat
from trtllm_bls.text.json_values import SURROGATES, JsonStrings, dumped, json_value


@dataclass(frozen=True)
class Text:
    """More of a text. ``span``: the characters of the answer that it is. ``begins``: what came
    before it is another part, of whatever kind. ``separator``: what divides it from an earlier part
    of its kind where all parts of a kind are one text."""

    text: str
    span: tuple[int, int] = field(default=(0, 0), compare=False)
    begins: bool = field(default=False, compare=False)
    separator: str = field(default="", compare=False)


class Content(Text):
    """Of the visible answer."""


class Reasoning(Text):
    """Of what the model thinks before it answers."""


@dataclass(frozen=True)
class ToolCall:
    """A call begins, with its whole name; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, which add up to JSON text as the model wrote it, but for what
    ``JsonStrings`` mends."""

    index: int
    text: str


class Refusal(Text):
    """Of why the model does not answer."""


@dataclass(frozen=True)
class Annotation:
    """A remark on the answer's text, such as a citation, as OpenAI's APIs have it."""

    value: Mapping[str, Any]


ChatEvent: TypeAlias = Content | Reasoning | ToolCall | Arguments | Refusal | Annotation


_TEXTS: dict[str, Callable[[str], ChatEvent]]
_TEXTS = {"text": Content, "reasoning": Reasoning, "refusal": Refusal}


def check_event(event: Mapping[str, Any]) -> None:
    """Raises ``TrtllmBlsError`` for what is no event of a pipeline's chat."""
    if len(event) != 1:
        raise TrtllmBlsError(f"an event of chat has one kind, not {sorted(event)!r:.200}")
    ((kind, value),) = event.items()
    value_types = {**dict.fromkeys(_TEXTS, str), "annotation": Mapping, "call": Mapping}
    if kind not in value_types:
        kinds = "text, reasoning, refusal, annotation and call"
        raise TrtllmBlsError(f"{kind!r:.80} is no event of chat; there are {kinds}")
    if not isinstance(value, value_types[kind]):
        raise TrtllmBlsError(f"the event {kind} of chat is a {type(value).__name__}")
    for name in ("id", "name", "arguments") if kind == "call" else ():
        if not isinstance(value.get(name), str):
            raise TrtllmBlsError(f"the event call of chat has no text called {name}")
    try:
        json.dumps(event, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise TrtllmBlsError(f"the event {kind} of chat: {half_character(error)}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise TrtllmBlsError(f"the event {kind} of chat is no JSON: {error}") from error


class EventParser:
    """Reads the parts of an answer that a pipeline has divided itself: lines of JSON lists."""

    plain = has_calls = ended = False

    def __init__(self) -> None:
        self._num_calls = 0

    def feed(self, text: str, end: bool = False) -> list[ChatEvent]:
        """The events of whole lines."""
        events: list[ChatEvent] = []
        for part in itertools.chain.from_iterable(map(json.loads, text.splitlines())):
            ((kind, value),) = part.items()
            if kind in _TEXTS:
                events.append(_TEXTS[kind](value))
            elif kind == "annotation":
                events.append(Annotation(value))
            else:
                self.has_calls, index = True, self._num_calls
                self._num_calls += 1
                events.append(ToolCall(index, value["id"], value["name"]))
                events.append(Arguments(index, value["arguments"]))
        return events


_BLANKS, _CLOSED = re.compile(r"\s*"), re.compile(r"[}\s]*")


@dataclass
class Unread:
    """Text that nobody has read yet: ``text`` from ``at`` on. What is read is dropped only when
    more text comes, since each drop copies the rest."""

    text: str = ""
    at: int = 0
    dropped: int = 0  # characters

    def add(self, text: str) -> None:
        self.dropped += self.at
        self.text, self.at = self.text[self.at :] + text, 0

    def __len__(self) -> int:
        return len(self.text) - self.at

    def skip_blanks(self, blanks: re.Pattern[str] = _BLANKS) -> str:
        """Read white space."""
        return self.read(blanks.match(self.text, self.at).end())  # type: ignore[union-attr]

    def read(self, end: int) -> str:
        """The text up to there, which is read now."""
        begin, self.at = self.at, end
        return self.text[begin:end]

    def match(self, pattern: str) -> Any:
        """What begins here and matches the pattern, or is the beginning of a match."""
        return _compiled(pattern).match(self.text, self.at, partial=True)

    def find(self, pattern: str) -> Any:
        """The first match of the pattern, or the beginning of one, which is at least the end."""
        return _compiled(pattern).search(self.text, self.at, partial=True)


@cache
def _compiled(pattern: str) -> Any:
    """The pattern for ``regex``, whose own cache costs more than a match."""
    return regex.compile(pattern)


@cache
def _any_of(markers: tuple[str, ...]) -> str:
    return "|".join(map(regex.escape, markers)) or "(?!)"


class ChatParser:
    """Parses one answer.

    White space around reasoning and around calls is dropped.

    ``opened``: the prompt ended with the tag that begins reasoning.
    ``schemas``: the parameters of the tools that may be called, by name, where they are known.
    ``plain``: there is neither a format nor a tag, and all text is content as it comes. ``ended``:
    the answer is over, and its last part was so before it.
    Calls beyond ``most_calls`` are left out. ``note_unreadable`` is called for each call whose
    arguments are no JSON object.
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
        note_unreadable: Callable[[], object] = lambda: None,
    ) -> None:
        self.plain = tools is None and reasoning is None
        self._tools = tools or (reasoning and reasoning.messages) or ToolFormat()
        self._reasoning = reasoning
        self._schemas = schemas
        self._most_calls = sys.maxsize if most_calls is None else most_calls
        self._new_id, self._note_unreadable = new_id, note_unreadable
        self.ended = False
        self._num_calls = 0
        self._call: CallReader | None = None
        self._reading: _Reading | None = None  # of the call
        self._unread = Unread()
        self._blank: list[str] = []  # white space that is text only if more text follows
        self._candidate: list[str] = []  # text from a marker on: content if no call follows
        self._drops = False  # text between calls is not content
        self._strips = False  # the next text begins a part, without the white space before it
        self._kinds: set[type] = set()  # of the text so far
        self._events: list[ChatEvent] = []
        # A function of the class. A bound method would be a reference cycle, which keeps the parser
        # until a garbage collection.
        self._step: Callable[[ChatParser], bool] = ChatParser._start
        if opened and reasoning:
            self._step, self._strips = ChatParser._reason, True

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str, end: bool = False) -> list[ChatEvent]:
        """The events that are certain with this text; ``end``: there is no more."""
        self._unread.add(text)
        if self.plain:
            begin = self._unread.dropped
            self._unread.at = len(text)
            return [Content(text, (begin, begin + len(text)))] if text else []
        while self._unread and self._step(self):
            pass
        return self._drain_events() + (self.flush() if end else [])

    def flush(self) -> list[ChatEvent]:
        """The remaining events of an answer that has ended, perhaps in the middle of a call."""
        call, is_between = self._call, self._step in (ChatParser._start, ChatParser._between)
        if call is not None:
            call.give_cut_value()
            self._add_call(call, over=True)
        rest = self._unread.read(len(self._unread.text))
        if self._step == ChatParser._reason:
            self._add_text(Reasoning, rest)
        elif self._tools.bare == "" and not self._tools.begin:
            # A cut call of the only tool: its name is known without the text.
            if not self.has_calls and len(self._schemas or ()) == 1:
                self._begin(None, *(self._schemas or ()))
        else:
            if self._step in (ChatParser._start, ChatParser._read_content):
                self._add_text(Content, rest)
            elif not (call and call.begun) and (
                self._candidate or self._step != ChatParser._between
            ):
                self._add_text(Content, "".join([*self._candidate, rest]))
            if (blank := "".join(self._blank)) and not self.has_calls:
                self._events.append(self._text(Content, blank, 0))
        self._blank, self._candidate, self._call = [], [], None
        self.ended = is_between and not self._events
        return self._drain_events()

    # --- steps: each reads the text and returns false where it needs more ------------------------

    def _start(self) -> bool:
        """Nothing but white space has come so far, of the answer or after its reasoning."""
        unread, bare = self._unread, self._tools.bare
        self._add_text(Content, unread.skip_blanks())
        tag = self._reasoning.begin if self._reasoning and bare != "" else ""
        text = unread.text[unread.at : unread.at + len(tag) + 1]
        if not unread or (tag.startswith(text) and text != tag):
            return False
        if tag and text.startswith(tag):
            unread.read(unread.at + len(tag))
            self._step, self._strips = ChatParser._reason, True
        elif bare is not None and unread.text.startswith(bare, unread.at):
            self._drops = not bare  # with any other, the text may still be content
            self._candidate, self._blank = [] if self._drops else self._blank, []
            self._step = ChatParser._between
        else:
            self._step = ChatParser._read_content
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        end = self._read_until(Reasoning, (self._reasoning.end,))
        if not end:
            return False
        self._unread.at += len(end)
        self._step, self._strips = ChatParser._start, True
        return True

    def _read_content(self) -> bool:
        if not self._read_until(Content, self._tools.begin):
            return False
        self._candidate, self._blank = self._blank, []
        self._step = ChatParser._between
        return True

    def _between(self) -> bool:
        """After a marker or a call: begin the next call or message, or return to content."""
        tools, unread = self._tools, self._unread
        # Models write a brace too many behind a call.
        is_behind = self._drops and tools.language != "xml"
        self._hold(unread.skip_blanks(_CLOSED if is_behind else _BLANKS))
        header = unread.match(tools.header)
        if header is None or header.partial:
            markers = (*tools.begin, *tools.noise)
            text = unread.text[unread.at : unread.at + max(map(len, markers), default=0)]
            if header is not None or any(m.startswith(text) and m != text for m in markers):
                return False
            marker = max((m for m in markers if text.startswith(m)), key=len, default="")
            if not marker:
                self._give_up()
            elif marker not in tools.noise:
                self._drops = False
            elif marker in tools.begin:
                self._drops, self._candidate = True, []
            self._hold(unread.read(unread.at + len(marker)))
            return True
        groups = header.groupdict()
        name = groups.get("name")
        self._drops = False
        self._hold(unread.read(header.end()))
        if name is None and "channel" in groups:
            thinks = groups["channel"] == "analysis" or groups.get("other") is not None
            thinks = thinks and self._reasoning is not None
            self._step = ChatParser._reason if thinks else ChatParser._read_content
            self._candidate, self._strips = [], True
        else:
            # Arguments in Python are looked at as a whole first: they may be an answer's prose.
            begun = name is not None and tools.language != "python"
            self._call = CallReader(tools, name, groups.get("id"), self._schemas, begun, unread)
            self._reading = _READERS[tools.language](self._call)
            self._step = ChatParser._read_call
            self._add_call(self._call)
        return True

    def _read_call(self) -> bool:
        call, reading, over, begin = self._call, self._reading, False, self._unread.at
        assert call is not None and reading is not None
        try:
            next(reading)
        except (StopIteration, *_NO_CALL):
            over = True
        if not call.begun:
            self._hold(self._unread.text[begin : self._unread.at])
        self._add_call(call, over)
        if over and not call.begun:
            self._give_up()
        elif over:
            self._call, self._candidate = None, []
            self._drops, self._step = True, ChatParser._between
        return over

    # --- helpers ------------------------------------------------------------------------------

    def _read_until(self, kind: type[Content | Reasoning], markers: tuple[str, ...]) -> str:
        """Add the text before the first marker, which is returned and not read.

        Without a marker, it is the text that cannot be the beginning of one.
        """
        marker = self._unread.find(_any_of(markers))
        self._add_text(
            kind, self._unread.read(marker.start() if marker else len(self._unread.text))
        )
        return "" if marker is None or marker.partial else str(marker[0])

    def _hold(self, text: str) -> None:
        if text and not self._drops:
            self._candidate.append(text)

    def _give_up(self) -> None:
        """There is no call: the text that could have been one is content."""
        text, self._candidate, self._call = "".join(self._candidate), [], None
        self._strips = self._strips or self._drops
        self._drops, self._step = False, ChatParser._read_content
        self._add_text(Content, text)

    def _add_text(self, kind: type[Content | Reasoning], text: str) -> None:
        """Add text, without the white space at its end, which may turn out to be its end."""
        if self._strips:
            self._blank, text = [], text.lstrip()
        solid = text.rstrip()
        if solid:
            whole = "".join([*self._blank, solid])
            self._events.append(self._text(kind, whole, len(text) - len(solid)))
            self._strips, self._blank = False, []
        if len(solid) < len(text):
            self._blank.append(text[len(solid) :])

    def _text(self, kind: type[Content | Reasoning], text: str, behind: int) -> ChatEvent:
        """The event of text that ends so many characters before the one that is read next."""
        end = self._unread.dropped + self._unread.at - behind
        separator = "\n\n" if self._strips and kind in self._kinds else ""
        self._kinds.add(kind)
        return kind(text, (end - len(text), end), self._strips, separator)

    def _add_call(self, call: CallReader, over: bool = False) -> None:
        """Add the events of what is certain of the call."""
        if call.begun and call.index is None:
            call.index = self._num_calls
            self._begin(call.id, str(call.name))
        if call.index is not None:
            if text := call.strings.feed("".join(call.output), over):
                self._events.append(Arguments(call.index, text))
                call.arguments.append(text)
            call.output.clear()
            if over and not isinstance(json_value("".join(call.arguments)), dict):
                self._note_unreadable()

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
    known. ``begun``: this is a call, and its name is known. ``unread``: the text of the answer.
    ``output``: JSON of the arguments that is not in ``arguments``, those of the events so far.
    ``index``: the call's place in the answer, once there is an event of it. ``value``: of a value
    that is put out once it is whole, what there is, and how to put that out if no more comes.
    """

    tools: ToolFormat
    name: str | None
    id: str | None
    schemas: Mapping[str, Any] | None
    begun: bool
    unread: Unread
    output: list[str] = field(default_factory=list)
    strings: JsonStrings = field(default_factory=JsonStrings)
    arguments: list[str] = field(default_factory=list)
    index: int | None = None
    value: tuple[list[str], Callable[[str], str]] | None = None

    @property
    def next(self) -> str:
        """The next character, which has come."""
        return self.unread.text[self.unread.at]

    def match(self, pattern: str) -> _ReadingMatch:
        """Read what matches the pattern, behind white space; ``None`` if nothing does."""
        while True:
            self.unread.skip_blanks()
            match = self.unread.match(pattern)
            if match is None or not match.partial:
                self.unread.at = match.end() if match else self.unread.at
                return match
            yield

    def whole(self, pattern: str, cut: Callable[[str], str]) -> _ReadingMatch:
        """Read up to the pattern's match: the text before it, and the match."""
        parts: list[str] = []
        self.value = parts, cut
        end = yield from self.until(pattern, parts.append)
        self.value = None
        return "".join(parts), end

    def give_cut_value(self) -> None:
        """The answer has ended: put out what there is of a value."""
        if self.value is not None and (text := "".join(self.value[0])).strip():
            self.output.append(self.value[1](text))

    def until(self, pattern: str, take: Callable[[str], object]) -> _ReadingMatch:
        """Read up to the pattern's match, which is returned; ``take`` gets the text before it."""
        while True:
            end = self.unread.find(pattern)
            take(self.unread.read(end.start()))
            if not end.partial:
                self.unread.at = end.end()
                return end
            yield

    def span(
        self,
        quotes: str = '"',
        depth: int = 0,
        passes: bool = False,
        cut: Callable[[str], str] = lambda text: "",
    ) -> _ReadingText:
        """Read an object, list or string of JSON or Python, and return it.

        It ends before a marker, too, where brackets are forgotten. ``depth``: brackets that are
        open already. ``passes``: it is part of the arguments. ``cut``: what to give of it if no
        more comes.
        """
        parts, quote, escaped = list[str](), "", False
        self.value = parts, cut
        markers = tuple(m for m in (*self.tools.begin, *self.tools.noise) if len(m) > 1)
        marker_pattern, first = _compiled(_any_of(markers)), {marker[0] for marker in markers}
        while True:
            text, end = self.unread.text, self.unread.at
            over = False
            while end < len(text) and not over:
                char = text[end]
                end += 1
                if quote:
                    if escaped or char == "\\":
                        escaped = not escaped
                    elif char == quote:
                        quote = ""
                elif char in first and (m := marker_pattern.match(text, end - 1, partial=True)):
                    end, over = end - 1, not m.partial
                    break
                elif char in quotes:
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                over = not quote and depth == 0
            (self.output if passes else parts).append(self.unread.read(end))
            if over:
                self.value = None
                return "".join(parts)
            yield

    def give_text(self, text: str) -> None:
        """Add to a string of the arguments."""
        self.output.append(dumped(text)[1:-1])


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
        if call.next == "}":
            after = call.unread.read(call.unread.at + 1)
            break
        key = json.loads((yield from call.span()))
        holds_arguments = key in ("arguments", "parameters")
        if has_arguments if holds_arguments else strict and key not in ("name", "type", "id"):
            raise ValueError(key)
        if (yield from call.match(":")) is None or (yield from call.match(r"(?=\S)")) is None:
            raise ValueError("no value")
        if holds_arguments:
            has_arguments, call.begun = True, call.name is not None
        passes, is_bare = holds_arguments and call.next in "{[", call.next not in '{["'
        cut = _cut_string if holds_arguments else lambda text: ""
        if is_bare:
            text, end = yield from call.whole("[,}]", cut)
            after = end[0]
        else:
            text = yield from call.span(passes=passes, cut=cut)
        if key == "name":
            name = SURROGATES.sub("\ufffd", str(json.loads(text))) if text[:1] == '"' else None
            if not isinstance(name, str) or not name or call.name is not None:
                raise ValueError("no name")
            call.name, call.begun = name, has_arguments or not strict
        elif holds_arguments and not passes:
            # Arguments that are no object: some models write their JSON as a string.
            value = json.loads(text, strict=False)
            arguments = value if isinstance(value, str) else text.strip()
            call.output.append(arguments if value is not None and arguments.strip() else "{}")
        if not is_bare:  # a brace that was forgotten is left to what follows
            yield from call.match(r"(?=\S)")
            after = call.unread.read(call.unread.at + 1) if call.next in ",}" else call.next
    if not call.begun or after not in ",}":
        raise ValueError("no call")
    if not has_arguments:
        call.output.append("{}")


def _read_xml(call: CallReader) -> _Reading:
    """Read arguments in tags, for example ``<parameter=key>value</parameter>``, and the end.

    The schemas tell strings from other values; a string is put out while it is written,
    another value once it is whole.
    """
    tools, before = call.tools, "{"
    properties = _mapping(_mapping(call.schemas).get(str(call.name))).get("properties")
    while match := (yield from call.match(f"{tools.key}|{tools.end}")):
        if (key := match["key"]) is None:
            break
        marked = {"true": {"string"}, "false": {"number"}}.get(match.groupdict().get("string"))
        kinds = marked or _kinds(_mapping(properties).get(key))
        call.output.append(f"{before}{dumped(key)}: ")
        before = ", "
        if "string" in kinds and "null" not in kinds:
            call.output.append('"')
            yield from call.until(tools.value_end, call.give_text)
            call.output.append('"')
        else:
            text, _ = yield from call.whole(tools.value_end, partial(_cut, kinds, ""))
            call.output.append(_json_of(text, kinds))
    # Here also where the model forgot the end.
    call.output.append("{}" if before == "{" else "}")


def _read_python(call: CallReader) -> _Reading:
    """Read ``key=value, …)`` with Python's literals; they are put out once they are complete."""
    if call.schemas is not None and call.name not in call.schemas:
        raise ValueError("no tool")
    node = _python("f(" + (yield from call.span("\"'", depth=1)))
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("arguments without names")
    call.output.append(dumped({k.arg: _literal(k.value) for k in node.keywords}))
    call.begun = True


def _python(text: str) -> ast.expr:
    with warnings.catch_warnings():  # about escapes that Python does not know
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.AST | None) -> Any:
    """The value of Python's literals, also by the names of JSON. Raises what ``_NO_CALL`` has.

    Keys are text at once, as in JSON: a model can choose numbers whose hashes are equal.
    """
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_key(_literal(key)): _literal(value) for key, value in pairs}
    if isinstance(node, ast.Name):
        return _NAMES[node.id]
    if isinstance(node, (ast.Constant, ast.UnaryOp)):
        return ast.literal_eval(node)
    raise ValueError("no literal")


def _key(value: object) -> str:
    if isinstance(value, (list, dict)):
        raise TypeError("no key")
    return value if isinstance(value, str) else dumped(value)


def _read_gemma(call: CallReader) -> _Reading:
    """Read ``{key:<|"|>text<|"|>,key:[1,true]}``: keys bare, texts between quotes of their own."""
    quote, closing, give = r'<\|"\|>', {"{": "}", "[": "]"}, call.output.append
    opened, comma, is_key = list[str](), "", False  # brackets; what precedes the next key or item
    while True:
        begins = yield from call.match(rf"{quote}|(?=[^<])")
        if begins is None:
            raise ValueError("no quote")
        if begins[0]:
            give(f'{comma}"')
            comma = ""
            yield from call.until(quote, call.give_text)
            give('"')
            continue
        cut = partial(_cut, {"string"} if is_key else {"number"}, comma)
        word, end = yield from call.whole(r"[][{},:]" if is_key else r"[][{},]", cut)
        mark = end[0]
        if word := word.strip():
            give(comma + (dumped(word) if mark == ":" else _json_of(word, {"number"})))
            comma = ""
        is_key = mark == "{" or (mark == "," and opened[-1] == "{")
        if mark in "{[":
            give(comma + mark)
            comma = ""
            opened.append(mark)
        elif mark == ",":
            comma = ", "
        elif mark == ":":
            give(": ")
        elif mark != closing[opened.pop()]:
            raise ValueError("another bracket is open")
        else:
            give(mark)
            comma = ""
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
        return dumped(text)
    if kinds or text.lstrip()[:1] in ("{", "["):
        for read in (json.loads, lambda text: _literal(_python(text))):
            with suppress(*_NO_CALL):
                return dumped(read(text.strip()))
    return dumped(text)


def _cut_string(text: str) -> str:
    """What a string of JSON says that has no end; bare words are as they are."""
    if not text.startswith('"'):
        return text.strip()
    for end in range(len(text), max(len(text) - 12, 0), -1):  # without half an escape
        with suppress(ValueError):
            return str(json.loads(text[:end] + '"', strict=False))
    return ""


def _cut(kinds: Collection[str], before: str, text: str) -> str:
    """The beginning of a value; a string's, or of what cannot be read, is left open."""
    value = _json_of(text.strip(), kinds)
    return before + (value[:-1] if value.startswith('"') else value)


def _kinds(schema: object) -> set[str]:
    """The JSON types that a schema names. The client wrote the schema, so it may hold anything."""
    branches = [schema]
    for key in ("anyOf", "oneOf"):
        further = _mapping(schema).get(key)
        branches += further if isinstance(further, list) else []
    kinds: list[object] = []
    for branch in branches:
        kind = _mapping(branch).get("type")
        kinds += kind if isinstance(kind, list) else [kind]
    return {kind for kind in kinds if isinstance(kind, str)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
