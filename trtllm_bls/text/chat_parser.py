"""A parser from text to events. The events add up to the same however the text is cut.

Text that turns out not to be a call is content, so nothing is lost. The exception is an answer that
guided decoding holds to calls (``FORCED``): such text is the beginning of a call that was cut.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

from trtllm_bls.errors import TrtllmBlsError, half_character
from trtllm_bls.text.call_reader import CallReader, CutCall, Reading, Unread
from trtllm_bls.text.call_readers import reading_of
from trtllm_bls.text.chat_formats import ReasoningTags, ToolFormat
from trtllm_bls.text.json_values import json_value
from trtllm_bls.text.tool_schemas import NO_VALUE, OfferedTools, any_of
from trtllm_bls.types import FinishReason


@dataclass(frozen=True)
class Text:
    """More of a text.

    ``span``: its place among the answer's characters. ``begins``: it begins a new part of the
    answer. ``separator``: text between it and an earlier part of its kind, for clients to whom all
    parts of a kind are one text.
    """

    text: str
    span: tuple[int, int] = field(default=(0, 0), compare=False)
    begins: bool = field(default=False, compare=False)
    separator: str = field(default="", compare=False)


class Content(Text):
    """Text of the visible answer."""


class Reasoning(Text):
    """Text that the model thinks before it answers."""


@dataclass(frozen=True)
class ToolCall:
    """A call begins, with its whole name; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments.

    They add up to JSON text as the model wrote it, with the mends of ``JsonStrings``.
    """

    index: int
    text: str


class Refusal(Text):
    """Text of the reason why the model does not answer."""


@dataclass(frozen=True)
class Annotation:
    """A remark on the answer's text, such as a citation, as OpenAI's APIs have it."""

    value: Mapping[str, Any]


ChatEvent: TypeAlias = Content | Reasoning | ToolCall | Arguments | Refusal | Annotation


_TEXT_EVENTS: dict[str, Callable[[str], ChatEvent]]
_TEXT_EVENTS = {"text": Content, "reasoning": Reasoning, "refusal": Refusal}


def check_event(event: Mapping[str, Any]) -> None:
    """Raise ``TrtllmBlsError`` unless this is an event of a pipeline's chat."""
    if len(event) != 1:
        raise TrtllmBlsError(f"an event of chat has one kind, not {sorted(event)!r:.200}")
    ((kind, value),) = event.items()
    value_types = {**dict.fromkeys(_TEXT_EVENTS, str), "annotation": Mapping, "call": Mapping}
    if kind not in value_types:
        kinds = "text, reasoning, refusal, annotation and call"
        raise TrtllmBlsError(f"{kind!r:.80} is no event of chat; there are {kinds}")
    if not isinstance(value, value_types[kind]):
        raise TrtllmBlsError(f"the event {kind} of chat is a {type(value).__name__}")
    if kind == "call":
        for name in ("id", "name", "arguments"):
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

    plain = False
    has_calls = False
    ended = False
    is_cut = False
    is_reasoning = False

    def __init__(self) -> None:
        self._num_calls = 0

    def feed(self, text: str, end: FinishReason | None = None) -> list[ChatEvent]:
        """Return the events of whole lines."""
        events: list[ChatEvent] = []
        for part in itertools.chain.from_iterable(map(json.loads, text.splitlines())):
            ((kind, value),) = part.items()
            if kind in _TEXT_EVENTS:
                events.append(_TEXT_EVENTS[kind](value))
            elif kind == "annotation":
                events.append(Annotation(value))
            else:
                self.has_calls = True
                index = self._num_calls
                self._num_calls += 1
                events.append(ToolCall(index, value["id"], value["name"]))
                events.append(Arguments(index, value["arguments"]))
        return events


_CLOSED = re.compile(r"[})\s]*")


class CallOutcome(Enum):
    """The end of a call: all of it was read, the answer ended inside it, or nobody can read it."""

    WHOLE = "whole"
    CUT = "cut"
    UNREADABLE = "unreadable"


class ChatParser:
    """Parses one answer.

    White space around reasoning and around calls is dropped.

    ``opened``: the prompt ended with the tag that begins reasoning.
    ``schemas``: the parameters of the tools that may be called, by name, where they are known.
    ``plain``: there is neither a format nor a tag, and all text is content as it comes. ``ended``:
    the answer is over, and its last part had ended before it.
    Calls beyond ``max_calls`` are left out. ``outcomes`` of the calls are in their order.
    ``note_call`` is called with ``begun`` for each call, and then with its outcome.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningTags | None = None,
        *,
        opened: bool = False,
        schemas: Mapping[str, Any] | None = None,
        max_calls: int | None = None,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
        note_call: Callable[[str], object] = lambda outcome: None,
    ) -> None:
        self.plain = tools is None and reasoning is None
        self._tools = tools or (reasoning and reasoning.messages) or ToolFormat()
        self._calls_in_thoughts = tools is not None and bool(tools.begin) and tools.bare != ""
        self._reasoning = reasoning
        self._offered = OfferedTools(schemas)
        self._max_calls = max_calls
        self._new_id = new_id
        self._note_call = note_call
        self.ended = False
        self.outcomes: list[CallOutcome] = []
        self._num_calls = 0
        self._call: CallReader | None = None
        self._reading: Reading | None = None  # the reader of that call
        self._unread = Unread()
        self._blank: list[str] = []  # white space that is text only if more text follows
        self._candidate: list[str] = []  # text from a marker on: content if no call follows
        self._drops = False  # text between calls is not content
        self._strips = False  # the next text begins a part, without the white space before it
        self._is_marked = False  # a marker precedes what may be a call
        self._has_bracket = False  # so does a bracket
        self._is_amid_text = False  # text precedes it
        self._is_inside = False  # the markers behind calls have not come
        self._draft_from = -1  # where in the unread text a search for the end of reasoning goes on
        self._kinds: set[type] = set()  # the kinds of text that have had an event
        self._events: list[ChatEvent] = []
        # A function of the class. A bound method would be a reference cycle, which keeps the parser
        # until a garbage collection.
        self._step: Callable[[ChatParser], bool] = ChatParser._start
        if opened and reasoning:
            self._step = ChatParser._reason
            self._strips = True

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._num_calls > 0

    @property
    def _is_forced(self) -> bool:
        """True where guided decoding holds the answer to calls."""
        return self._tools.bare == "" and not self._tools.begin

    @property
    def is_cut(self) -> bool:
        """True if the answer ended inside its last call."""
        return CallOutcome.CUT in self.outcomes[-1:]

    @property
    def is_reasoning(self) -> bool:
        """True while the text is reasoning, and after an answer that ended there."""
        return self._step in (ChatParser._reason, ChatParser._draft)

    def feed(self, text: str, end: FinishReason | None = None) -> list[ChatEvent]:
        """Return the events that are certain with this text; ``end``: why there is no more."""
        self._unread.add(text)
        if self.plain:
            begin = self._unread.dropped
            self._unread.at = len(text)
            if not text:
                return []
            return [Content(text, (begin, begin + len(text)))]
        while self._unread and self._step(self):
            pass
        events = self._drain_events()
        if end is not None:
            events += self.flush(end)
        return events

    def flush(self, end: FinishReason = FinishReason.LENGTH) -> list[ChatEvent]:
        """Return the remaining events of an answer that has ended, perhaps inside a call."""
        unread = self._unread
        is_between = self._step in (ChatParser._start, ChatParser._between)
        num_calls = self._num_calls
        unread.ended = True
        unread.complete = end is FinishReason.END_ID
        while self._step(self) and (unread or self._call is not None):
            pass
        text = unread.read(len(unread.text))
        if self._step in (ChatParser._reason, ChatParser._draft):
            self._add_text(Reasoning, text)
        elif self._is_forced:
            # A cut call of the only tool: its name is known without the text.
            if not self.has_calls and self._offered.only is not None:
                self._begin(None, self._offered.only)
                self._end_call(CallOutcome.CUT)
        else:
            if self._step in (ChatParser._start, ChatParser._read_content):
                self._add_text(Content, text)
            elif self._candidate or self._step != ChatParser._between:
                self._add_text(Content, "".join([*self._candidate, text]))
            blank = "".join(self._blank)
            if blank and not self.has_calls:
                self._events.append(self._text(Content, blank, 0))
        self._blank = []
        self._candidate = []
        self.ended = is_between and not self._events and num_calls == self._num_calls
        return self._drain_events()

    # --- steps: each reads the text and returns false where it needs more ------------------------

    def _start(self) -> bool:
        """Read the beginning of the answer, or of its text after reasoning."""
        unread = self._unread
        tools = self._tools
        self._add_text(Content, unread.skip_blanks())
        if not unread:
            return False
        # Harmony's reasoning is a message like others, of which ``_between`` reads the header.
        if self._reasoning is not None and self._reasoning.messages is None:
            tag = unread.match(f"(?P<begin>{re.escape(self._reasoning.begin)})|{self._stray_tag}")
            if tag is not None and tag.partial:
                return False
            if tag is not None:
                unread.at = tag.end()
                self._strips = True
                if tag["begin"]:
                    self._step = ChatParser._reason
                return True
        loose = None
        if tools.loose:
            loose = unread.match(tools.loose)
        if loose is not None and loose.partial:
            return False
        is_bare = tools.bare is not None and unread.text.startswith(tools.bare, unread.at)
        if loose is not None or is_bare:
            self._begin_calls(drops=tools.bare == "")  # with any other, the text may be content
        else:
            self._step = ChatParser._read_content
        return True

    @property
    def _stray_tag(self) -> str:
        return re.escape(self._reasoning.end) if self._reasoning else "(?!)"

    def _begin_calls(self, *, drops: bool = False) -> None:
        """Look for calls from here on."""
        self._drops = drops
        self._is_marked = drops
        self._has_bracket = False
        self._is_inside = False
        self._is_amid_text = False
        self._candidate = []
        if not drops:
            self._candidate = self._blank
        self._blank = []
        self._step = ChatParser._between

    def _reason(self) -> bool:
        assert self._reasoning is not None
        tools = self._tools
        markers: tuple[str, ...] = (self._reasoning.end,)
        if self._calls_in_thoughts:
            markers += tools.begin
        marker = self._read_until(Reasoning, any_of(markers))
        if marker is None:
            return False
        unread = self._unread
        if marker[0] == self._reasoning.end:
            unread.at = marker.end()
            self._step = ChatParser._start
            self._strips = True
            return True
        header = unread.match(_header_in_thoughts(tools))
        if header is not None and header.partial:
            return False
        if header is not None and self._may_name(header.groupdict().get("name")):
            self._draft_from = 0
            self._step = ChatParser._draft
        else:
            self._add_text(Reasoning, unread.read(unread.at + 1))
        return True

    def _may_name(self, name: str | None) -> bool:
        """True for the name of a tool, and where the name or the tools are not known."""
        return name is None or not self._offered.are_known or self._offered.named(name) is not None

    def _draft(self) -> bool:
        """Hold back a call within reasoning, until that ends or the answer does.

        Models draft calls before they end their reasoning, and forget to end it before a call.
        """
        assert self._reasoning is not None
        unread = self._unread
        begin = unread.at + self._draft_from
        end = unread.find(re.escape(self._reasoning.end), begin)
        if end is not None and not end.partial:
            self._add_text(Reasoning, unread.read(end.start()))
            unread.at = end.end()
            self._step = ChatParser._start
            self._strips = True
            return True
        if not unread.ended:
            searched = len(unread.text) if end is None else end.start()
            self._draft_from = searched - unread.at
            return False
        draft = ChatParser(self._tools, schemas=self._offered.schemas)
        draft.feed(unread.text[unread.at :], FinishReason.END_ID)
        if not unread.complete or draft.outcomes[:1] != [CallOutcome.WHOLE]:
            return False
        self._strips = True
        self._begin_calls()
        return True

    def _read_content(self) -> bool:
        """Read the answer up to what may be a call, or a marker that has lost its call."""
        tools = self._tools
        patterns = [any_of(tools.begin)]
        if tools.loose and tools.loose_at == "any":
            patterns.append(f"(?P<loose>{tools.loose})")
        elif tools.loose and tools.loose_at == "line":
            patterns.append(rf"\n(?P<loose>{tools.loose})")
        marker = self._read_until(Content, "|".join(patterns))
        if marker is None:
            return False
        is_loose = marker.groupdict().get("loose") is not None
        if is_loose:
            self._add_text(Content, self._unread.read(marker.start("loose")))
        self._begin_calls()
        self._is_amid_text = is_loose
        return True

    def _between(self) -> bool:
        """Begin the next call or message after a marker or a call, or return to content."""
        tools = self._tools
        unread = self._unread
        if self._drops and tools.language != "xml":
            self._hold(unread.skip_blanks(_CLOSED))  # Models write a brace too many behind a call.
        else:
            self._hold(unread.skip_blanks())
        if not unread:
            return False
        header = unread.match(tools.header, partial=True)
        if header is None or header.partial:
            markers = tools.begin + tools.noise
            if self._is_inside:
                markers += tools.inner
            text = unread.text[unread.at : unread.at + max(map(len, markers), default=0)]
            marker = ""
            for candidate in markers:
                if candidate.startswith(text) and candidate != text:
                    return False
                if text.startswith(candidate) and len(candidate) > len(marker):
                    marker = candidate
            if header is not None:
                return False
            if not marker:
                self._give_up()
                return True
            if marker in tools.begin:
                self._is_marked = True
                self._is_inside = True
            elif marker in tools.closers:
                self._is_inside = False
                self._is_marked = False
            self._has_bracket |= marker == "["
            if marker in tools.noise and marker in tools.begin:
                self._drops = True
                self._candidate = []
            elif marker in tools.begin:
                self._drops = False
            self._hold(unread.read(unread.at + len(marker)))
            return True
        self._begin_call(header)
        return True

    def _begin_call(self, header: Any) -> None:
        """Begin the call or the message of a header."""
        tools = self._tools
        groups = header.groupdict()
        raw_name = groups.get("name")
        name = None
        if raw_name is not None:
            name = self._offered.named(raw_name)
        is_message = "channel" in groups and name is None
        if is_message and raw_name is not None:
            is_message = not raw_name.startswith("functions.")
        self._drops = False
        self._hold(self._unread.read(header.end()))
        if is_message:
            channels = header.captures("channel")
            is_thought = channels[:1] == ["analysis"] or raw_name is not None
            self._step = ChatParser._read_content
            if is_thought and self._reasoning is not None:
                self._step = ChatParser._reason
            self._candidate = []
            self._strips = True
            return
        if raw_name is not None and name is None:
            name = plain_name(tools, raw_name)
        # Arguments in Python are read as a whole first: they may be an answer's prose.
        has_begun = name is not None and tools.language != "python"
        call = CallReader(tools, name, groups.get("id"), self._offered, has_begun, self._unread)
        has_header = header.end() > header.start() and tools.language != "python"
        call.is_marked = self._is_marked or has_header
        call.is_amid_text = self._is_amid_text and not call.is_marked
        call.is_alone = not (call.is_marked or self._has_bracket)
        self._call = call
        self._reading = reading_of(call)
        self._step = ChatParser._read_call
        self._add_call(call)

    def _read_call(self) -> bool:
        call = self._call
        reading = self._reading
        assert call is not None and reading is not None
        begin = self._unread.at
        outcome: CallOutcome | None = None
        try:
            next(reading)
        except StopIteration:
            outcome = CallOutcome.WHOLE
        except CutCall:
            outcome = CallOutcome.CUT
        except NO_VALUE:
            outcome = CallOutcome.UNREADABLE
        if not call.is_certain:
            self._hold(self._unread.text[begin : self._unread.at])
        self._add_call(call)
        if outcome is None:
            return False
        if not call.is_certain and outcome is CallOutcome.CUT and self._is_forced:
            self._call = None
        elif not call.is_certain:
            self._give_up()
        elif outcome is CallOutcome.UNREADABLE:
            self._step = ChatParser._read_raw
        elif outcome is CallOutcome.CUT:
            self._unread.read(len(self._unread.text))  # the beginning of a tag
            self._finish_call(call, outcome)
        else:
            self._finish_call(call, outcome)
        return True

    def _read_raw(self) -> bool:
        """Give a call that nobody can read as it is, up to the marker behind it."""
        call = self._call
        assert call is not None
        unread = self._unread
        marker = unread.find(any_of(self._tools.markers))
        call.output.append(unread.read_to(marker))
        self._add_call(call)
        if not unread.ended and (marker is None or marker.partial):
            return False
        if marker is not None and marker[0] in self._tools.ends:
            unread.at = marker.end()
        self._finish_call(call, CallOutcome.UNREADABLE)
        return True

    # --- helpers ------------------------------------------------------------------------------

    def _read_until(self, kind: type[Content | Reasoning], pattern: str) -> Any:
        """Add the text before the first match of the pattern, which is returned and not read.

        Without a match, it is the text that cannot be the beginning of one.
        """
        match = self._unread.find(pattern)
        self._add_text(kind, self._unread.read_to(match))
        if match is None or match.partial:
            return None
        return match

    def _hold(self, text: str) -> None:
        if text and not self._drops:
            self._candidate.append(text)

    def _give_up(self) -> None:
        """There is no call: the text that could have been one is content."""
        text = "".join(self._candidate)
        self._candidate = []
        self._call = None
        self._strips = self._strips or self._drops
        self._drops = False
        self._step = ChatParser._read_content
        self._add_text(Content, text)

    def _add_text(self, kind: type[Content | Reasoning], text: str) -> None:
        """Add text, without the white space at its end, which may turn out to be its end."""
        if self._strips:
            self._blank = []
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            part = "".join([*self._blank, solid])
            self._events.append(self._text(kind, part, len(text) - len(solid)))
            self._strips = False
            self._blank = []
        if len(solid) < len(text):
            self._blank.append(text[len(solid) :])

    def _text(self, kind: type[Content | Reasoning], text: str, behind: int) -> ChatEvent:
        """Make the event of text; ``behind`` counts the characters read after its end."""
        end = self._unread.dropped + self._unread.at - behind
        separator = "\n\n" if self._strips and kind in self._kinds else ""
        self._kinds.add(kind)
        return kind(text, (end - len(text), end), self._strips, separator)

    def _add_call(self, call: CallReader, over: bool = False) -> None:
        """Add the events of the call's certain part."""
        if not call.is_certain:
            return
        if call.index is None:
            call.index = self._num_calls
            self._begin(call.id, str(call.name))
        text = call.strings.feed("".join(call.output), over)
        if text:
            self._events.append(Arguments(call.index, text))
            call.arguments.append(text)
        call.output.clear()

    def _finish_call(self, call: CallReader, outcome: CallOutcome) -> None:
        """Add the remainder of a call, whose arguments are an object if it is whole."""
        self._add_call(call, over=True)
        is_object = isinstance(json_value("".join(call.arguments)), dict)
        if outcome is CallOutcome.WHOLE and not is_object:
            outcome = CallOutcome.UNREADABLE
        self._end_call(outcome)
        self._call = None
        self._candidate = []
        self._drops = True
        self._step = ChatParser._between

    def _end_call(self, outcome: CallOutcome) -> None:
        self.outcomes.append(outcome)
        self._note_call(outcome.value)

    def _begin(self, call_id: str | None, name: str) -> None:
        tools = self._tools
        if tools.id_form:
            call_id = family_id(tools, call_id, name, self._num_calls)
        call_id = call_id or self._new_id()[-tools.id_length :]
        self._events.append(ToolCall(self._num_calls, call_id, name))
        self._num_calls += 1
        self._note_call("begun")

    def _drain_events(self) -> list[ChatEvent]:
        events = self._events
        self._events = []
        if self._max_calls is None:
            return events
        return [event for event in events if getattr(event, "index", 0) < self._max_calls]


@cache
def _header_in_thoughts(tools: ToolFormat) -> str:
    """Return the pattern of a header with the markers before it, as it may stand in reasoning."""
    markers = any_of((*tools.begin, *tools.inner))
    return rf"(?:(?:{markers})\s{{0,64}}+){{0,3}}?(?:{tools.header})"


def plain_name(tools: ToolFormat, raw_name: str) -> str:
    """Return the name of a tool that the request may not have."""
    match = _RAW_NAME.fullmatch(raw_name)
    is_id = tools.id_form or "channel" in tools.header
    if is_id and match is not None:
        return match[1]
    return raw_name


_RAW_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d{1,9})?")


def family_id(tools: ToolFormat, raw_id: str | None, name: str, index: int) -> str:
    """Return a call's id in the form that the family's templates expect."""
    number = re.search(r"\d{1,9}\Z", raw_id or "")
    if number is not None:
        index = int(number[0])
    return tools.id_form.format(name=name, index=index)
