"""One RPC as its caller sees it, its messages and its status; the connection moves its bytes.

And what a caller does about a server that says nothing at all (``StallWatch``).
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol
from urllib.parse import unquote_to_bytes

import grpc

_log = logging.getLogger(__name__)

_TRIES = 3  # of a call that connections have refused unseen by their GOAWAY
_LOOKS = 4  # in the time of a stall; an arrival resets their count, which costs no clock
_MESSAGE_PREFIX = struct.Struct(">BI")  # compressed flag, length
_PREFIX_SIZE, _unpack_prefix = _MESSAGE_PREFIX.size, _MESSAGE_PREFIX.unpack_from
_STATUSES = {str(code.value[0]).encode(): str(code.name) for code in grpc.StatusCode}

OnMessages = Callable[[list[bytes]], None]


class GrpcError(Exception):
    """A call ended with a status other than OK: its name (``"UNAVAILABLE"``) and the details."""

    def __init__(self, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.status = status
        self.details = details


OnEnd = Callable[[GrpcError | None], None]


class _Sender(Protocol):
    def wants_to_send(self, call: GrpcCall) -> None: ...

    def cancel(self, call: GrpcCall) -> None: ...


class GrpcCall:
    """One RPC, made by ``Connection.open``.

    ``on_messages`` gets every message that one read of the socket completed, in order; ``on_end``
    gets None for status OK, else the error, and is the last callback. Both may be assigned anew
    while the call runs. A callback that raises has its call cancelled. ``take`` and all that
    follows it, and the fields from ``headers`` on, are for the connection.
    """

    def __init__(self, headers: bytes, on_messages: OnMessages, on_end: OnEnd) -> None:
        self.on_messages = on_messages
        self.on_end = on_end
        self.replies = 0
        self.done = False
        self.headers = headers
        self.http2: _Sender | None = None
        self.stream_id = 0  # 0 until its headers are sent
        self.window = 0  # bytes that the server takes on this stream
        self.outbox: deque[bytes] = deque()
        self._outbox_taken = 0  # bytes of the first in the outbox that are sent
        self.sent: list[bytes] | None = []  # what to send again, until the server answers
        self.tries_left = _TRIES
        self.give_up_at: float | None = None  # the loop's time, once its stream has been refused
        self.half_closed = self.end_sent = False
        self.splitter = MessageSplitter()

    def send(self, message: bytes) -> None:
        """Queue a message; it leaves when flow control admits it. Nothing happens once done."""
        if self.half_closed:
            raise RuntimeError("a message cannot follow half_close()")
        if not self.done:
            self.outbox.append(_MESSAGE_PREFIX.pack(0, len(message)) + message)
            self._flush()

    def half_close(self) -> None:
        """Tell the server, after what is queued, that no more messages follow."""
        if not self.done and not self.half_closed:
            self.half_closed = True
            self._flush()

    def cancel(self) -> None:
        """End the call without another callback. A call not yet sent sends nothing."""
        if not self.done:
            self._over()
            if self.http2 is not None:
                self.http2.cancel(self)

    def _over(self) -> None:
        self.done = True
        self.outbox.clear()
        self.sent = None
        # Their owner refers to the call: both would stay until a garbage collection.
        self.on_messages, self.on_end = ignore, ignore

    def _flush(self) -> None:
        if self.http2 is not None:
            self.http2.wants_to_send(self)

    def take(self, limit: int) -> bytes:
        """The next bytes to send: up to ``limit`` of one message."""
        first = self.outbox[0]
        taken = first[self._outbox_taken : self._outbox_taken + limit]
        self._outbox_taken += len(taken)
        if self._outbox_taken == len(first):
            self.outbox.popleft()
            self._outbox_taken = 0
            if self.sent is not None:
                self.sent.append(first)
        return taken

    def rewind(self) -> bool:
        """Be as if never sent; False when it was answered."""
        if self.sent is None:
            return False
        self.outbox.extendleft(reversed(self.sent))
        self.sent, self._outbox_taken, self.stream_id, self.end_sent = [], 0, 0, False
        return True

    def deliver(self, messages: list[bytes]) -> None:
        """Give messages to the caller."""
        if self.done:
            return
        self.replies += len(messages)
        try:
            self.on_messages(messages)
        except Exception:
            _log.exception("a callback failed on messages; its call is cancelled")
            self.cancel()

    def end(self, error: GrpcError | None) -> None:
        """Tell the caller of the end."""
        if self.done:
            return
        on_end = self.on_end
        self._over()
        try:
            on_end(error)
        except Exception:
            _log.exception("a callback failed on the end of its call")


def ignore(anything: object) -> None:
    """A callback of a call that nobody waits for."""


class MessageSplitter:
    """Cuts a call's messages out of DATA payloads, which may begin and end anywhere in them."""

    def __init__(self) -> None:
        self.received = 0  # bytes since the stream's window was last opened
        self._partial = bytearray()
        self._partial_needs = 0  # bytes before a look at the partial message is worth while

    def __bool__(self) -> bool:
        """Whether there is part of a message."""
        return bool(self._partial)

    def feed(self, payload: bytes) -> list[bytes]:
        """The messages that ``payload`` completes. Raises ``GrpcError`` for a compressed one."""
        source: bytes | memoryview = payload
        if not self._partial and len(payload) >= _PREFIX_SIZE:  # nearly always one, whole
            compressed, length = _unpack_prefix(payload)
            if not compressed and length == len(payload) - _PREFIX_SIZE:
                return [payload[_PREFIX_SIZE:]]
        elif self._partial:
            self._partial += payload
            if len(self._partial) < self._partial_needs:
                return []
            source = memoryview(self._partial)
        messages = []
        start, size = 0, len(source)
        needs = _MESSAGE_PREFIX.size
        while size - start >= _MESSAGE_PREFIX.size:
            compressed, length = _MESSAGE_PREFIX.unpack_from(source, start)
            if compressed:
                raise GrpcError("INTERNAL", "the server compressed a message without being asked")
            needs = _MESSAGE_PREFIX.size + length
            if size - start < needs:
                break
            messages.append(bytes(source[start + _MESSAGE_PREFIX.size : start + needs]))
            start += needs
            needs = _MESSAGE_PREFIX.size
        if self._partial or start < size:
            self._partial = bytearray(source[start:])
            self._partial_needs = needs
        return messages


def outcome(fields: dict[bytes, bytes]) -> GrpcError | None:
    """What the last headers of a response say: None for OK."""
    code = fields.get(b"grpc-status")
    if code is None:
        return http_error(fields) or GrpcError("UNKNOWN", "the call ended without a grpc-status")
    details = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return None if code == b"0" else GrpcError(_STATUSES.get(code, "UNKNOWN"), details)


def http_error(fields: dict[bytes, bytes]) -> GrpcError | None:
    """Why this is not the beginning of a gRPC response; None if it is one."""
    status = fields.get(b":status", b"200")
    kind = fields.get(b"content-type", b"application/grpc")
    if status != b"200":
        passing = status in (b"429", b"502", b"503", b"504")
        details = f"HTTP status {status.decode('latin-1')}"
        return GrpcError("UNAVAILABLE" if passing else "UNKNOWN", details)
    if not kind.startswith(b"application/grpc"):
        return GrpcError("UNKNOWN", f"not gRPC: content-type is {kind.decode('latin-1')}")
    return None


class StallWatch:
    """Asks ``probe`` once nothing has arrived for ``seconds`` (0 = never) while ``busy``, at most a
    quarter of that time later.

    ``probe`` gives what is wrong with the server, or ``None``; ``give_up`` is then told. So no
    answer ends for being long or queued.
    """

    def __init__(
        self,
        seconds: float,
        busy: Callable[[], bool],
        probe: Callable[[], Awaitable[str | None]],
        give_up: Callable[[str], None],
    ) -> None:
        self._seconds = seconds
        self._busy, self._probe, self._give_up = busy, probe, give_up
        self._silent_looks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None

    def arrived(self) -> None:
        """Something has arrived."""
        self._silent_looks = 0

    def begin(self) -> None:
        """A request has begun."""
        if self._timer is None and self._probing is None and self._seconds:
            self.arrived()
            self._look_later()

    def close(self) -> None:
        """Watch no longer."""
        for pending in (self._timer, self._probing):
            if pending is not None:
                pending.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / _LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._busy():
            return
        self._silent_looks += 1
        if self._silent_looks <= _LOOKS:  # the first may come right after an arrival
            self._look_later()
        else:
            self._probing = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        problem = await self._probe()
        if problem is None:
            self.arrived()
        elif self._silent_looks:  # nothing has arrived meanwhile
            self._give_up(problem)
        self._probing = None
        self._silent_looks = 0
        self._look_later()
