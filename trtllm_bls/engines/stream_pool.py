"""Kept ``ModelStreamInfer`` calls: each carries one request at a time, then waits for the next.

Opening a call costs more than a short request does, and speculative decoding makes two requests a
round. Since a call carries one request at a time, its cancellation ends exactly that one. (Requests
that share a call cannot be told apart by a cancel, and in Triton 24.10 one that is refused can end
the server.) Calls are never cancelled while idle but ended politely, by closing our side: soon,
since Triton does not shut down while any call is open, and after many replies, since Triton 24.10
keeps about a kilobyte for each until the call ends.
"""

from __future__ import annotations

import asyncio
import contextlib

from trtllm_bls.engines.grpc_transport import Call, Connection, GrpcError

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
IDLE_SECONDS = 1.0  # rounds of speculative decoding come back within milliseconds
MAX_IDLE = 64
MAX_REPLIES = 512  # half a megabyte inside Triton 24.10
_CLOSE_SECONDS = 1.0  # for the server to end its side


class StreamPool:
    """The calls of one connection that carry nothing at the moment."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: dict[Call, asyncio.TimerHandle] = {}
        self._ending: set[Call] = set()
        self._all_ended = asyncio.Event()

    def take(self) -> Call:
        """A call that carries nothing; the latest used, so that the others may expire."""
        if not self._idle:
            return self._connection.open(METHOD, _ignore_messages, _ignore_end)
        call, expiry = self._idle.popitem()
        expiry.cancel()
        return call

    def give_back(self, call: Call) -> None:
        """Take back a call whose request has had its final reply."""
        call.on_messages = _ignore_messages
        if call.replies >= MAX_REPLIES or len(self._idle) >= MAX_IDLE:
            self.end(call)
            return
        call.on_end = lambda error: self._forget(call)
        loop = asyncio.get_running_loop()
        self._idle[call] = loop.call_later(IDLE_SECONDS, self._expire, call)

    def end(self, call: Call) -> None:
        """Close our side of a call; what still arrives is dropped."""
        call.on_messages = _ignore_messages
        call.on_end = lambda error: self._forget(call)
        if not call.done:
            self._ending.add(call)
            call.half_close()

    async def close(self) -> None:
        """End what is idle, in order; calls that carry a request are their requests' business."""
        for call in list(self._idle):
            self._expire(call)
        if self._ending:
            self._all_ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), _CLOSE_SECONDS)

    def _expire(self, call: Call) -> None:
        self._forget(call)
        self.end(call)

    def _forget(self, call: Call) -> None:
        expiry = self._idle.pop(call, None)
        if expiry is not None:
            expiry.cancel()
        self._ending.discard(call)
        if not self._ending:
            self._all_ended.set()


def _ignore_messages(messages: list[bytes]) -> None:
    pass


def _ignore_end(error: GrpcError | None) -> None:
    pass
