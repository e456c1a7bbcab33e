"""The threads that send responses, and the turns that calls take for them."""

from __future__ import annotations

import asyncio
import collections
import queue
import threading
from typing import Protocol

SENDERS = 4  # threads; each waits for the server most of its time
MAX_QUEUED = 4 * SENDERS  # responses made ahead of the threads; the others are made when it is time


class Sendable(Protocol):
    """What has responses to send: a ``Call``."""

    def send_queued(self) -> list[asyncio.Future[None]]:
        """Send all that is queued; who waits for that."""


class SenderThreads:
    """Threads that send what calls have queued, each call by one thread at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        self._calls: queue.SimpleQueue[Sendable | None] = queue.SimpleQueue()
        self._for_room: collections.deque[asyncio.Future[None]] = collections.deque()
        self._later: dict[Sendable, None] = {}  # have something to send after a while
        self._ready: collections.deque[asyncio.Future[None]] = collections.deque()
        self._waking = False
        self.responses = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def work_on(self, call: Sendable) -> None:
        """Send what ``call`` has queued."""
        self._calls.put(call)

    def has_room(self) -> bool:
        """Whether a response would leave soon, and no other call has waited for that."""
        return not self._for_room and self._is_short()

    def _is_short(self) -> bool:
        return self._calls.qsize() < MAX_QUEUED

    async def room(self) -> None:
        """Return once there is room, in the order of asking; on the event loop."""
        waiter = self._loop.create_future()
        self._for_room.append(waiter)
        if self._is_short():  # made since the caller asked: no send may be left to tell of it
            self._wake_loop()
        await waiter

    def later(self, seconds: float, call: Sendable) -> None:
        """The same, after a while."""
        self._later[call] = None
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._work_on_late, call)

    def close(self) -> None:
        """Send what is queued, then end the threads; what was to wait is tried once more."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        for call in list(self._later):
            self._send(call)

    def _work_on_late(self, call: Sendable) -> None:
        if call in self._later:
            self.work_on(call)

    def _send(self, call: Sendable) -> None:
        self._later.pop(call, None)
        waiters = call.send_queued()
        self._ready.extend(waiters)
        if waiters or (self._for_room and self._is_short()):
            self._wake_loop()

    def _wake_loop(self) -> None:
        if not self._waking:  # one wake-up of the loop serves all that are ready by then
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._waking = False
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done():
                waiter.set_result(None)
        room = MAX_QUEUED - self._calls.qsize()
        while self._for_room and room > 0:
            waiter = self._for_room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1
        if self._for_room and room <= 0 and self._is_short():
            # Those let in may be cancelled and send nothing: look again once they have run.
            self._loop.call_soon(self._wake)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._send(call)
