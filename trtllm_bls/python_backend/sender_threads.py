"""The threads that send responses, and the turns that calls take for them."""

from __future__ import annotations

import asyncio
import collections
import queue
import sys
import threading
from typing import Protocol

SENDERS = 4  # threads; each waits for the server most of its time
MAX_QUEUED = 4 * SENDERS  # responses made ahead of the threads; the others are made when it is time
# More calls than this that have come within so many seconds and have no response yet are a rush:
# their responses come first, and others are made one at a time, where there is nothing else to
# send. Threads then wait less long for the interpreter's lock, since each request that Triton hands
# over needs it twice; at other times that would only cost more switches.
MANY_NEW, NEW_SECONDS = 32, 0.05
RUSH_SWITCH_SECONDS = 0.0005


class Sendable(Protocol):
    """What has responses to send: a ``Call``."""

    def send_queued(self) -> list[asyncio.Future[None]]:
        """Send all that is queued; who waits for that."""


class SenderThreads:
    """Threads that send what calls have queued, each call by one thread at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        # One entry for each call in the two below it, and one to end each thread.
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._urgent: collections.deque[Sendable] = collections.deque()
        self._calls: collections.deque[Sendable] = collections.deque()
        self._for_room: collections.deque[asyncio.Future[None]] = collections.deque()
        self._new: dict[Sendable, float] = {}  # calls without a response, and when they came
        self._rush = False
        self._switch_seconds = sys.getswitchinterval()
        self._under_way: set[Sendable] = set()  # calls that a thread sends, or will
        self._later: dict[Sendable, None] = {}  # have something to send after a while
        self._ready: collections.deque[asyncio.Future[None]] = collections.deque()
        self._waking = False
        self.responses = 0
        self.threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def expect(self, call: Sendable) -> None:
        """``call`` has come; on the event loop."""
        self._new[call] = self._loop.time()
        if not self._rush and len(self._new) > MANY_NEW:
            self._rush = True
            sys.setswitchinterval(min(RUSH_SWITCH_SECONDS, self._switch_seconds))

    def work_on(self, call: Sendable, urgent: bool = False) -> None:
        """Send what ``call`` has queued; what is urgent, before all that is not."""
        if urgent:
            if self._new.pop(call, None) is not None:  # else it was refused where it came
                self._look_at_rush()
            self._urgent.append(call)
        else:
            self._calls.append(call)
        self._under_way.add(call)
        self._work.put(True)

    def has_room(self) -> bool:
        """Whether a response would leave soon, and no other call has waited for that."""
        self._look_at_rush()
        return not self._for_room and self._room() > 0

    def _room(self) -> int:
        """How many more responses may be under way."""
        most = 1 if self._rush else MAX_QUEUED + len(self.threads)
        return most - len(self._under_way)

    def _look_at_rush(self) -> None:
        """Whether it is over; on the event loop."""
        if self._rush:
            since = self._loop.time() - NEW_SECONDS
            while self._new and next(iter(self._new.values())) < since:
                del self._new[next(iter(self._new))]
            if len(self._new) <= MANY_NEW:
                self._rush = False
                sys.setswitchinterval(self._switch_seconds)

    async def room(self) -> None:
        """Return once there is room, in the order of asking; on the event loop."""
        waiter = self._loop.create_future()
        self._for_room.append(waiter)
        if self._room() > 0:  # made since the caller asked: no send may be left to tell of it
            self._wake_loop()
        await waiter

    def later(self, seconds: float, call: Sendable) -> None:
        """The same, after a while."""
        self._later[call] = None
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._work_on_late, call)

    def close(self) -> None:
        """Send what is queued, then end the threads; what was to wait is tried once more."""
        sys.setswitchinterval(self._switch_seconds)
        for _ in self.threads:
            self._work.put(False)
        for thread in self.threads:
            thread.join()
        for call in list(self._later):
            self._send(call)

    def _work_on_late(self, call: Sendable) -> None:
        if call in self._later:
            self.work_on(call)

    def _send(self, call: Sendable) -> None:
        self._later.pop(call, None)
        waiters = call.send_queued()
        self._under_way.discard(call)
        self._ready.extend(waiters)
        if waiters or (self._for_room and self._room() > 0):
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
        self._look_at_rush()
        room = self._room()
        while self._for_room and room > 0:
            waiter = self._for_room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1
        if self._for_room and room <= 0 and self._room() > 0:
            # Those let in may be cancelled and send nothing: look again once they have run.
            self._loop.call_soon(self._wake)

    def _run(self) -> None:
        while self._work.get():
            try:
                call = self._urgent.popleft()
            except IndexError:
                call = self._calls.popleft()
            self._send(call)
