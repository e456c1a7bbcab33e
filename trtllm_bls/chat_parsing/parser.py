"""Text to events. How the text is cut makes no difference to what the events add up to.

What turns out not to be a call is content, so nothing is lost; but of a text that a guide holds to
calls alone (``FORCED``), which can only have been cut.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trtllm_bls.chat_parsing.call import CallReader, Reader, begun_at_end
from trtllm_bls.chat_parsing.formats import XML_CALL, ToolFormat
from trtllm_bls.chat_parsing.other_calls import PythonCall, XmlCall

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
    """A call begins; its name is whole. ``index`` counts the answer's calls from 0."""

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
    """One answer. ``reasoning``: its tags; ``opened``: the prompt ended with the first of them.
    ``schemas``: the parameters of the tools that may be called, by name, where they are known.

    White space around reasoning and around calls is dropped.
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
        self._buffer = ""  # not looked at
        self._blank = ""  # white space that belongs to the text only if more text follows
        self._held = ""  # from a marker on; content if no call comes of it
        self._drops = False  # what stands between calls is no content
        self._strips = False  # white space before the next text is none of it
        self._events: list[Event] = []
        # A method of the class: one of this object would keep it until a garbage collection.
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
        """What is certain with this text."""
        self._buffer += text
        while self._buffer and self._step(self):
            pass
        return self._take_events()

    def flush(self) -> list[Event]:
        """The rest; the answer has ended, perhaps in the middle of something."""
        begun = self._call is not None and self._call.begun
        if self._step == ChatParser._reason:
            self._say(Reasoning, self._buffer)
        else:
            if self._step in (ChatParser._start, ChatParser._tell):
                self._say(Content, self._buffer)
            elif self._calls_alone:
                if not self.has_calls and len(self._schemas or ()) == 1:  # which it has to be
                    self._begin(*(self._schemas or ()))
            elif not begun and (self._held or self._step != ChatParser._between):
                self._say(Content, self._held + self._buffer)
            if self._blank and not self.has_calls:
                self._events.append(Content(self._blank))
        self._buffer = self._blank = self._held = ""
        self._call = None
        return self._take_events()

    # --- what is done with the buffer next; each gives false where it needs more text -------------

    def _start(self) -> bool:
        """Nothing but white space so far, of the answer or after its reasoning."""
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
            self._step = ChatParser._tell
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        before, end = self._until(self._reasoning[1:])
        self._say(Reasoning, before)
        if end is None:
            return False
        self._reasoning, self._blank = None, ""
        self._step, self._strips = ChatParser._start, True
        return True

    def _tell(self) -> bool:
        before, marker = self._until(self._tools.begin)
        self._say(Content, before)
        if marker is None:
            return False
        self._buffer = marker + self._buffer
        self._held, self._blank = self._blank, ""
        self._step = ChatParser._between
        return True

    def _between(self) -> bool:
        """After a marker or a call: the next call, or content again."""
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
        """Whether a call begins here; then its reader is there."""
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
        """The text before the first marker, and that marker, both taken from the buffer.

        Without one, all that cannot be the beginning of one.
        """
        text = self._buffer
        places = [(text.find(marker), marker) for marker in markers if marker in text]
        if places:
            place, marker = min(places)
            self._buffer = text[place + len(marker) :]
            return text[:place], marker
        sure = len(text) - begun_at_end(text, markers)
        self._buffer = text[sure:]
        return text[:sure], None

    def _hold(self, count: int) -> None:
        if not self._drops:
            self._held += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> None:
        """No call after all: what was held for one is content."""
        held, self._held, self._call = self._held, "", None
        self._drops, self._step = False, ChatParser._tell
        self._say(Content, held)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Give text, but for what white space may turn out to be its end."""
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

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
