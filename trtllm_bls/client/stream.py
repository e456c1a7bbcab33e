"""One request on the wire, from sending to the last byte.

Rules of this file. Every request has a gRPC stream of its own whose sending side closes right
after the request, so that the server ends the stream when the request is over. A reader takes
responses off the wire the moment they come; the caller takes events at his own pace. Until the
final response has arrived, whoever leaves cancels the server side too. From then on nobody
cancels: a cancel that meets the final response inside Triton 24.10 leaks the request there. The
reader just reads on until the server ends the stream.

Knows nothing of channels, models or tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from trtllm_bls.client.events import Event, read_event
from trtllm_bls.errors import ConnectionFailed, EngineError, TrtllmBlsError, from_wire

# A server that has sent its final response ends the stream within milliseconds; one that has not
# done so within this many seconds never will.
SETTLE_S = 5.0


class Reader:
    """Takes everything off one call; ``items`` ends with ``None`` or with the error."""

    def __init__(self, call: Any, translate: Callable[[grpc.RpcError], TrtllmBlsError]) -> None:
        self.items: asyncio.Queue[Event | TrtllmBlsError | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._read())
        self._call = call
        self._translate = translate
        self._answered = False  # the final response, or the error in its place, has arrived

    def cancel(self) -> bool:
        """End the request on the server, unless it is answered; whether anything was ended."""
        return not self._answered and bool(self._call.cancel())

    async def settle(self) -> None:
        """Return when the stream is over; give up on a server that leaves it open."""
        await asyncio.wait({self.task}, timeout=SETTLE_S)
        self._call.cancel()

    async def _read(self) -> None:
        try:
            await self._take_all()
            self.items.put_nowait(None)
        except asyncio.CancelledError:  # who cancelled knows; anyone else sees a closed client
            self.items.put_nowait(ConnectionFailed("the client was closed during the request"))
        except grpc.RpcError as error:
            self.items.put_nowait(self._translate(error))
        except TrtllmBlsError as error:
            self.items.put_nowait(error)
        except Exception as error:  # arrays that are not what they say they are
            self.items.put_nowait(EngineError(f"unreadable response: {error}"))
        finally:
            self._call.cancel()  # nothing to do for a stream that is over

    async def _take_all(self) -> None:
        flagged = False  # the server says of its responses whether they are final
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
    """

    def __init__(self, request_id: str, begin: Callable[[], Reader]) -> None:
        self.request_id = request_id
        self.started_at: float | None = None  # time.perf_counter() at sending
        self.cancelled = False  # before the final response
        self._begin = begin
        self._reader: Reader | None = None
        self._answered = False
        self._over = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        if self._over or self.cancelled:
            raise StopAsyncIteration
        if self._reader is None:
            self.started_at = time.perf_counter()
            self._reader = self._begin()
        if self._answered:
            await self.aclose()
            raise StopAsyncIteration
        try:
            item = await self._reader.items.get()
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

    def cancel(self) -> None:
        """End the request on the server; iteration ends without an error.

        Does nothing once the final response has arrived. May be called by another task.
        """
        if self._over or self.cancelled:
            return
        self.cancelled = self._reader is None or self._reader.cancel()

    async def aclose(self) -> None:
        """Cancel what is unfinished; return when this side of the stream is over."""
        self.cancel()
        self._over = True
        if self._reader:
            await self._reader.settle()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._reader:  # ``break`` out of a plain ``async for`` ends here
            self._reader.cancel()
