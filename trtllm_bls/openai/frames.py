"""The WebSocket protocol of uvicorn, with bounds on frames and on the time that a read takes.

uvicorn bounds the bytes of a message, and handles all frames of a read at once. An empty frame has
six bytes and takes 26 µs, so a megabyte of them would hold up every stream of the process for
seconds. Here frames are counted, and a read is handled in turns, between which other tasks run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from uvicorn.protocols.websockets.wsproto_impl import WebsocketBuffer, WSProtocol
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, Event, Message, Ping, Pong
from wsproto.frame_protocol import CloseReason

from trtllm_bls.http.budgets import (
    CONTROL_FRAMES,
    FRAMES_A_MESSAGE,
    FRAMES_A_TURN,
    TURNS_AFTER_CLOSE,
)
from trtllm_bls.http.limits import DISCARD_S
from trtllm_bls.http.shares import PerMinute
from trtllm_bls.openai.sockets import SHUTDOWN


class TooManyFrames(Exception):
    """The client sends more frames than a use needs; the text is for the client."""


class PacedConnection(WSConnection):
    """wsproto's side of a connection, whose ``events`` end after a turn.

    ``has_more``: there may be further events. A turn ends with each whole message too, so that no
    message is read before the application has taken its predecessor.
    """

    def __init__(self) -> None:
        super().__init__(ConnectionType.SERVER)
        self.has_more = False
        self._num_fragments = 0
        self._control_frames = PerMinute(CONTROL_FRAMES)

    def events(self) -> Generator[Event, None, None]:
        """Yield the next events. Raises ``TooManyFrames``."""
        self.has_more = True
        for number, event in enumerate(super().events(), 1):
            self._count(event)
            yield event
            is_whole = isinstance(event, Message) and event.message_finished
            if is_whole or number == FRAMES_A_TURN:
                return
        self.has_more = False

    def _count(self, event: Event) -> None:
        if isinstance(event, Message):
            # A frame that arrives in several reads has an event for each read.
            self._num_fragments += event.frame_finished
            if self._num_fragments > FRAMES_A_MESSAGE:
                raise TooManyFrames(f"a message of more than {FRAMES_A_MESSAGE} frames")
            if event.message_finished:
                self._num_fragments = 0
        elif isinstance(event, (Ping, Pong)) and self._control_frames.is_over():
            raise TooManyFrames(f"more than {CONTROL_FRAMES} pings and pongs in a minute")


class BoundedSocket(WSProtocol):
    """uvicorn's protocol, which handles the frames of a read in turns.

    When the server shuts down, a running response is finished first.
    """

    buffer: WebsocketBuffer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._paced = PacedConnection()
        self.conn = self._paced
        self._next_turn: asyncio.Handle | None = None
        self._turns_after_close = 0
        self._discards = False  # whatever the client still sends

    def data_received(self, data: bytes) -> None:
        if not self._discards:
            super().data_received(data)

    def handle_events(self) -> None:
        """Handle frames for a turn; also called for each read."""
        if self._next_turn is not None:
            return
        try:
            super().handle_events()
        except TooManyFrames as error:
            self._close(str(error))
            return
        if self.close_sent:
            self._turns_after_close += 1
            if self._turns_after_close > TURNS_AFTER_CLOSE:
                self._discard()
                return
        if self._paced.has_more and not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()
        self._continue()

    async def receive(self) -> Any:
        """Return the next event for the application."""
        event = await self.queue.get()
        self._continue()
        return event

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the frames that were not handled."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Tell the application, which ends the connection once its response has ended."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": SHUTDOWN})  # type: ignore[typeddict-item]
        else:
            super().shutdown()

    def _continue(self) -> None:
        """Plan the next turn, or read on, once the application has taken all events."""
        if self._discards or self._next_turn is not None or self.transport.is_closing():
            return
        if not (self.queue.empty() or self.close_sent):
            return
        if self._paced.has_more:
            self._next_turn = self.loop.call_soon(self._take_turn)
        elif self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _take_turn(self) -> None:
        self._next_turn = None
        if not self.transport.is_closing():
            self.handle_events()

    def _close(self, reason: str) -> None:
        code = CloseReason.POLICY_VIOLATION
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(self.conn.send(CloseConnection(code=code, reason=reason)))
        self._discard()

    def _discard(self) -> None:
        """Throw away all further data, and close after ``DISCARD_S``.

        Closing at once would make the kernel reset the connection, and a client that is still
        writing would see the reset instead of the reason.
        """
        self._discards = True
        if self.close_timer is None:
            self.close_timer = self.loop.call_later(DISCARD_S, self.transport.close)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
