"""Events of a stream, built by hand: only the text between constant bytes changes.

One ``Frames`` per stream. A token costs one escaped string and one join; no dictionary, no
validation. The result is what ``json`` would write of the whole chunk (a test compares them).
"""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole answer begins with, and each chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Frames:
    """Of a chat, chunks have their text in ``delta.content``, else in ``text``."""

    def __init__(self, head: Head, *, usage: bool) -> None:
        chat = head.object == "chat.completion.chunk"
        self._field = b'"delta":{"content":' if chat else b'"text":'
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['
        # With include_usage, every chunk but the last has the field, and it is null.
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._after_text = b"}" * chat + b',"logprobs":null,"finish_reason":null}' + self._end
        self._before_text: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """A chunk with text alone."""
        before = self._before_text.get(index) or self._before(index)
        return before + _encode(text) + self._after_text

    def choice(self, index: int, **fields: object) -> bytes:
        """Any other chunk of one choice."""
        return self._start + _encode({"index": index, **fields}) + self._end

    def usage(self, usage: object) -> bytes:
        """The last chunk, which has no choice."""
        return b"".join((self._start, b'],"usage":', _encode(usage), b"}\n\n"))

    def _before(self, index: int) -> bytes:
        found = self._before_text[index] = self._start + b'{"index":%d,' % index + self._field
        return found
