"""One request on the wire, from sending to the last byte.

Rules of this file:

- Every request has a gRPC stream of its own. Its sending side closes right after the request, so
  the server ends the stream when the request is over.
- A reader takes responses off the wire as they arrive; the caller takes events at its own pace.
- A caller that leaves before the final response cancels the request on the server.
- After the final response nothing is cancelled: Triton 24.10 leaks a request if a cancel meets its
  final response. The reader reads on until the server ends the stream.

Knows nothing of channels, models or tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any, cast

import grpc
from tenacity import (
    AsyncRetrying,
    retry_if_result,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from trtllm_bls.client.events import Event, read_event
from trtllm_bls.errors import ConnectionFailed, EngineError, Overloaded, TrtllmBlsError, from_wire

# A server that has sent its final response ends the stream within milliseconds; one that has not
# done so within this many seconds never will.
END_OF_STREAM_S = 5.0
# The longest pause before the first retry, and before any; each is drawn from 0 to its longest, so
# that clients which failed together do not come back together.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.4, 5.0


class Reader:
    """Takes everything off one call; ``items`` ends with ``None`` or with the error."""

    def __init__(
        self, call: Any, translate: Callable[[grpc.RpcError | None], TrtllmBlsError]
    ) -> None:
        """``translate(None)`` is the error for a call that ended before its request was sent."""
        self.items: asyncio.Queue[Event | TrtllmBlsError | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._read())
        self._call = call
        self._translate = translate
        self._answered = False  # the final response, or the error in its place, has arrived
        self._left = False

    def cancel(self) -> bool:
        """Cancel the request on the server unless it is answered; returns whether it was."""
        self._left = True
        return not self._answered and bool(self._call.cancel())

    @staticmethod
    async def join(readers: Collection[Reader]) -> None:
        """Wait until their streams are over; after ``END_OF_STREAM_S`` close them from here."""
        if readers:
            await asyncio.wait({reader.task for reader in readers}, timeout=END_OF_STREAM_S)
        for reader in readers:
            reader._call.cancel()

    async def _read(self) -> None:
        try:
            await self._take_all()
            self.items.put_nowait(None)
        except asyncio.CancelledError:  # the client was closed, unless ``cancel`` was called
            closed = ConnectionFailed("the client was closed during the request")
            # grpc.aio itself cancels a call that is over before its request is written.
            self.items.put_nowait(closed if self._left else self._translate(None))
        except grpc.RpcError as error:
            self.items.put_nowait(self._translate(error))
        except TrtllmBlsError as error:
            self.items.put_nowait(error)
        except Exception as error:  # for example an array shorter than its shape
            self.items.put_nowait(EngineError(f"unreadable response: {error}"))
        finally:
            self._call.cancel()  # nothing to do for a stream that is over

    async def _take_all(self) -> None:
        flagged = False  # the server marks final responses
        async for message in self._call:
            received_at = time.perf_counter()
            if message.error_message:
                self._answered = True
                self.items.put_nowait(from_wire(message.error_message))
                continue
            event = read_event(message.infer_response, received_at)
            flagged = flagged or "triton_final_response" in message.infer_response.parameters
            self._answered = self._answered or event.final
            self.items.put_nowait(event)
        if flagged and not self._answered:
            raise ConnectionFailed("the server ended the stream before the answer was complete")


class Stream:
    """The events of one request: an async iterator, and a context manager that closes it.

    The request is sent when the first event is asked for. Leaving early in any way (``aclose``,
    the end of ``async with``, cancelling the task that waits for an event, dropping the object)
    ends the work on the server. Iteration raises ``ConnectionFailed``, ``DeadlineExceeded`` or
    the server's error (``InvalidRequest``, ``Overloaded``, ``EngineError``, ...) after the events
    that came before; a cancelled stream just ends.

    ``begin(seconds)`` sends the request, to be answered within that time. It is called again up to
    ``retries`` times if the connection failed or the server was overloaded before the first
    response. ``deadline_s`` bounds all attempts together.
    """

    def __init__(
        self,
        request_id: str,
        begin: Callable[[float | None], Reader],
        retries: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.started_at: float | None = None  # time.perf_counter() at sending
        self.cancelled = False  # before the final response
        self._begin = begin
        self._retries = retries
        self._deadline_s = deadline_s
        self._paused: asyncio.Event | None = None  # set to end the pause before another try
        self._reader: Reader | None = None
        self._trying = False  # a failure may be followed by another try
        self._answered = False
        self._over = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        if self._over or self.cancelled:
            raise StopAsyncIteration
        if self._answered:
            await self.aclose()
            raise StopAsyncIteration
        try:
            item = await (self._reader.items.get() if self._reader else self._first())
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, Event) and not self.cancelled:
            self._answered = item.final
            return item
        self._over = True
        if item is None or self.cancelled:
            raise StopAsyncIteration
        assert isinstance(item, TrtllmBlsError)
        raise item

    async def _first(self) -> Event | TrtllmBlsError | None:
        """Send the request, retrying as configured; the first item of its answer."""
        self.started_at = time.perf_counter()
        self._trying = self._retries > 0
        stop = stop_after_attempt(self._retries + 1)
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda item: isinstance(item, (ConnectionFailed, Overloaded))),
            wait=wait_random_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
            stop=stop if self._deadline_s is None else stop | stop_before_delay(self._deadline_s),
            sleep=self._pause,
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )
        item = cast("Event | TrtllmBlsError | None", await retrying(self._attempt))
        self._trying = False
        return item

    async def _attempt(self) -> Event | TrtllmBlsError | None:
        if self.cancelled:
            return None
        left = self._deadline_s
        if left is not None and self.started_at is not None:
            left -= time.perf_counter() - self.started_at
        self._reader = self._begin(left)
        return await self._reader.items.get()

    async def _pause(self, seconds: float) -> None:
        self._reader = None  # it is over; there is nothing to cancel on the server
        self._paused = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(seconds, self._paused.set)
        try:
            await self._paused.wait()
        finally:
            timer.cancel()

    def cancel(self) -> None:
        """End the request on the server; iteration ends without an error.

        Does nothing once the final response has arrived. May be called by another task.
        """
        if self._over or self.cancelled:
            return
        self.cancelled = self._reader is None or self._reader.cancel() or self._trying
        if self._paused is not None:
            self._paused.set()

    async def aclose(self) -> None:
        """Cancel what is unfinished; return when this side of the stream is over."""
        self.cancel()
        self._over = True
        if self._reader:
            await Reader.join([self._reader])

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._reader:  # ``break`` out of a plain ``async for`` ends here
            self._reader.cancel()
