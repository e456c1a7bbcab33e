"""A stream of responses: what arrives, what waits for its reader, and its one end.

Engines, pipelines and port 8000 read their streams through ``ResponseStream``, so that all have the
same bounds and the same ends. What becomes of the call at the end is a ``Release``: it is closed or
cancelled, goes back to a pool, or its request is aborted first.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from trtllm_bls.errors import EngineError, Overloaded, TrtllmBlsError
from trtllm_bls.wire.grpc_client import GrpcCall, GrpcError, ignore

MOST_WAITING = 16_384  # items of one stream; a reader that is further behind is given up
MOST_WAITING_BYTES = 8 * 2**20  # of one call's messages; from there on the server is held back

Item = TypeVar("Item")


class StreamEnd(Enum):
    """How a stream has ended."""

    LAST = "its last item has arrived"
    FAILED = "an error came in place of its last item"
    LEFT = "its reader has left"


AtEnd: TypeAlias = Callable[[StreamEnd, Exception | None], None]
Release: TypeAlias = Callable[[GrpcCall, StreamEnd], None]


class Arrivals(Generic[Item]):
    """Items that arrive on the event loop while one reader takes them; adding never waits.

    It runs until ``end``, ``fail`` or ``aclose``, or until its reader is ``MOST_WAITING`` items
    behind. Then it is over, and what is added is dropped. What has arrived before can still be
    taken.
    """

    def __init__(self) -> None:
        self._arrived: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_bytes = 0  # of a call's messages that arrived while others waited
        self._over = False
        self._error: Exception | None = None
        self._at_end: list[AtEnd] = []

    def call_at_end(self, callback: AtEnd) -> None:
        """Have ``callback`` called once, as the stream ends, with the error that ended it."""
        self._at_end.append(callback)

    def put(self, items: Iterable[Item]) -> None:
        """Add items; ignored once the stream is over."""
        if self._over:
            return
        self._arrived.extend(items)
        if len(self._arrived) > MOST_WAITING:
            self._arrived.clear()
            self.fail(Overloaded(f"its reader is more than {MOST_WAITING} responses behind"))
        elif self._arrived:
            self._wake()

    def end(self) -> None:
        """End the stream: its last item has arrived."""
        self._finish(StreamEnd.LAST)

    def fail(self, error: Exception) -> None:
        """End the stream; ``wait`` raises ``error`` once what has arrived is taken."""
        self._finish(StreamEnd.FAILED, error)

    async def aclose(self) -> None:
        """End the work at once, unless it has ended. May be called twice."""
        self._finish(StreamEnd.LEFT)

    async def wait(self) -> None:
        """Return once ``take`` has something to give, or nothing more will come.

        Raises the error that ended the stream, once. A reader that is cancelled here may still
        ``take`` what has arrived.
        """
        if not self._arrived and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._arrived:
            error = self._error
            self._error = None
            raise error

    def take(self) -> list[Item]:
        """Return all that has arrived since the last call; after ``wait``, nothing is the end."""
        arrived = self._arrived
        self._arrived = []
        self._waiting_bytes = 0
        return arrived

    def _finish(self, end: StreamEnd, error: Exception | None = None) -> None:
        if self._over:
            return
        self._over = True
        self._error = error
        # The callbacks may refer to this stream: kept, they would be a reference cycle.
        callbacks = self._at_end
        self._at_end = []
        for callback in callbacks:
            callback(end, error)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ResponseStream(Arrivals[Item]):
    """The answer to one request that a server sends over a call of its own.

    It ends as soon as its last response, an error, the call's end or a message that cannot be read
    arrives, whenever its reader looks. The call is then released, once. While messages of
    ``MOST_WAITING_BYTES`` wait, the server may send no more of them: it keeps the rest until the
    reader takes these. A subclass opens ``_call`` with ``on_messages`` and ``on_end``.
    """

    _call: GrpcCall

    def __init__(self, release: Release) -> None:
        super().__init__()
        self.call_at_end(lambda end, error: release(self._call, end))

    @abstractmethod
    def _read(self, messages: list[bytes], items: list[Item]) -> bool:
        """Add what ``messages`` hold to ``items``; true if the last response is among them."""

    @abstractmethod
    def _failure(self, error: GrpcError | None) -> Exception:
        """Return the error for a call that ended early; ``None``: it had the status OK."""

    def on_messages(self, messages: list[bytes]) -> None:
        """Take messages of the call."""
        items: list[Item] = []
        try:
            last = self._read(messages, items)
        except Exception as error:
            self.put(items)
            self.fail(error if isinstance(error, TrtllmBlsError) else self._unreadable(error))
            return
        is_behind = bool(self._arrived)
        self.put(items)
        if last:
            self.end()
        elif is_behind:  # otherwise there is no more than one read of the socket
            self._waiting_bytes += sum(map(len, messages))
            if self._waiting_bytes > MOST_WAITING_BYTES:
                self._call.hold()

    def on_end(self, error: GrpcError | None) -> None:
        """Take the end of the call."""
        self.fail(self._failure(error))

    def take(self) -> list[Item]:
        """See ``Arrivals``. A server that was held back may send again."""
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._call.release()
        return super().take()

    def _unreadable(self, error: Exception) -> Exception:
        return EngineError(f"a response cannot be read: {error}")


def close_or_cancel(call: GrpcCall, end: StreamEnd) -> None:
    """Release a call: close it in order after the last response, else cancel it.

    Triton 24.10 keeps a request for ever whose cancel meets its last response.
    """
    call.on_messages = ignore
    call.on_end = ignore
    if end is StreamEnd.LAST:
        call.half_close()
    else:
        call.cancel()
