"""Text to events. How the text is cut makes no difference to what the events add up to.

Text that turns out not to be a call is content, so nothing is lost. The exception is an answer that
guided decoding holds to calls (``FORCED``): such text is the beginning of a call that was cut.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trtllm_bls.chat_parsing.calls import CallReader, PythonCall, Reader, XmlCall, begun_at_end
from trtllm_bls.chat_parsing.formats import XML_CALL, ToolFormat

_LONGEST_HEADER = 512  # characters between a marker and the arguments' brace


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


class ChatParser:
    """Parses one answer; white space around reasoning and around calls is dropped.

    ``reasoning``: its begin and end tag; ``opened``: the prompt ended with the begin tag.
    ``schemas``: the parameters of the tools that may be called, by name, where they are known.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: tuple[str, str] | None = None,
        *,
        opened: bool = False,
        schemas: Mapping[str, Any] | None = None,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._tools = tools or ToolFormat()
        self._reasoning = reasoning
        self._schemas = schemas
        self._calls_alone = tools is not None and not tools.begin
        self._new_id = new_id
        self._num_calls = 0
        self._call: Reader | None = None
        self._buffer = ""  # not looked at yet
        self._blank = ""  # white space that is text only if more text follows
        self._held = ""  # text from a marker on, which is content if no call follows
        self._drops = False  # text between calls is not content
        self._strips = False  # white space before the next text is not part of it
        self._events: list[Event] = []
        # A function of the class. A bound method would be a reference cycle, which keeps the parser
        # until a garbage collection.
        self._step: Callable[[ChatParser], bool] = ChatParser._start
        if opened and reasoning:
            self._step, self._strips = ChatParser._reason, True
        elif self._calls_alone:
            self._step, self._drops = ChatParser._between, True

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return self._num_calls > 0

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this text."""
        self._buffer += text
        while self._buffer and self._step(self):
            pass
        return self._drain_events()

    def flush(self) -> list[Event]:
        """The remaining events of an answer that has ended, perhaps in the middle of a call."""
        begun = self._call is not None and self._call.begun
        if self._step == ChatParser._reason:
            self._add_text(Reasoning, self._buffer)
        else:
            if self._step in (ChatParser._start, ChatParser._read_content):
                self._add_text(Content, self._buffer)
            elif self._calls_alone:
                # A cut call of the only tool: its name is known without the text.
                if not self.has_calls and len(self._schemas or ()) == 1:
                    self._begin(*(self._schemas or ()))
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
        tag = self._reasoning[0] if self._reasoning else ""
        if not text or (tag.startswith(text) and text != tag):
            return False
        if tag and text.startswith(tag):
            self._buffer = text[len(tag) :]
            self._step, self._strips = ChatParser._reason, True
        elif text[0] == self._tools.bare:
            self._hold(len(self._buffer) - len(text))
            self._step = ChatParser._between
        else:
            self._step = ChatParser._read_content
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        before, end = self._until(self._reasoning[1:])
        self._add_text(Reasoning, before)
        if end is None:
            return False
        self._reasoning = None
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
        markers = (*tools.begin, *tools.noise)
        if any(marker.startswith(text) and marker != text for marker in markers):
            return False
        marker = max((m for m in markers if text.startswith(m)), key=len, default="")
        if self._opens_call(text):
            self._step = ChatParser._read_call
        elif marker:
            self._drops = self._drops and marker in tools.noise
            self._hold(len(marker))
        elif tools.header is not None and self._held:
            self._step = ChatParser._header
        else:
            self._give_up()
        return True

    def _opens_call(self, text: str) -> bool:
        """Whether a call begins here; then ``_call`` is its reader."""
        written = self._tools.written
        if written == "python" and text[0].isidentifier():
            self._call = PythonCall(self._begin, self._more, self._schemas)
        elif written == "xml" and text.startswith(XML_CALL):
            self._call = XmlCall(self._begin, self._more, self._schemas)
        elif written == "json" and text[0] == "{":
            strict = bool(self._tools.bare)
            self._call = CallReader(self._begin, self._more, strict=strict)
        else:
            return False
        self._drops = False
        if written == "xml":
            self._hold(len(XML_CALL))
        return True

    def _header(self) -> bool:
        """The name before the arguments."""
        brace = self._buffer.find("{", 0, _LONGEST_HEADER)
        if brace < 0 and len(self._buffer) < _LONGEST_HEADER:
            return False
        named = re.fullmatch(rf"{self._tools.header}\s*", self._buffer[: max(0, brace)])
        if named is None:
            self._give_up()
            return True
        self._hold(brace)
        self._call = CallReader(self._begin, self._more, named.group(1))
        self._step = ChatParser._read_call
        return True

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

    def _until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Remove the text before the first marker, and the marker, from the buffer; return both.

        Without a marker, it is the text that cannot be the beginning of one.
        """
        text = self._buffer
        found = [(text.find(marker), marker) for marker in markers if marker in text]
        if found:
            start, marker = min(found)
            self._buffer = text[start + len(marker) :]
            return text[:start], marker
        sure = len(text) - begun_at_end(text, markers)
        self._buffer = text[sure:]
        return text[:sure], None

    def _hold(self, count: int) -> None:
        if not self._drops:
            self._held += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> None:
        """There is no call: the text held for one is content."""
        held, self._held, self._call = self._held, "", None
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
            self._strips = False
            self._events.append(kind(solid))

    def _begin(self, name: str) -> None:
        self._events.append(ToolCall(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _more(self, text: str) -> None:
        self._events.append(Arguments(self._num_calls - 1, text))

    def _drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
