"""Text to events. How the text is cut makes no difference to what the events add up to.

Text that turns out not to be a call is content, so nothing is lost. The exception is an answer that
guided decoding holds to calls (``FORCED``): such text is the beginning of a call that was cut.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import regex

from trtllm_bls.chat_parsing.calls import (
    CallReader,
    GemmaCall,
    PythonCall,
    Reader,
    XmlCall,
    compiled,
)
from trtllm_bls.chat_parsing.formats import ReasoningTags, ToolFormat

_READERS: dict[str, type[Reader]] = {
    "json": CallReader,
    "xml": XmlCall,
    "python": PythonCall,
    "gemma": GemmaCall,
}


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
        self._calls_alone = tools is not None and not tools.begin
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
        elif self._calls_alone:
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
        found = compiled(tools.header).match(text, partial=True)
        if found is not None and not found.partial:
            self._open(found)
            return True
        markers = (*tools.begin, *tools.noise)
        if found is not None or any(each.startswith(text) and each != text for each in markers):
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
            begin = partial(self._begin, groups.get("id"))
            self._call = _READERS[tools.written](tools, name, self._schemas, begin, self._more)
            self._step = ChatParser._read_call

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        used = call.feed(self._buffer)
        self._hold(used)
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

    def _begin(self, call_id: str | None, name: str) -> None:
        call_id = call_id or self._new_id()[-self._tools.id_length :]
        self._events.append(ToolCall(self._num_calls, call_id, name))
        self._num_calls += 1

    def _more(self, text: str) -> None:
        self._events.append(Arguments(self._num_calls - 1, text))

    def _drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return [event for event in events if getattr(event, "index", 0) < self._most_calls]
