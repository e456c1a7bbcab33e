"""The event loop that runs Triton's requests, and the thread that watches for their callers."""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import logging
import os
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import Any

from trtllm_bls.errors import EngineUnavailable, TrtllmBlsError, to_wire
from trtllm_bls.python_backend.call import Arrays, Call
from trtllm_bls.python_backend.one_core import OneCore
from trtllm_bls.python_backend.sender_threads import SENDERS, SenderThreads
from trtllm_bls.request_stats import CancelCause

# Asking for a caller costs a round trip, so all calls share so many questions: each is asked every
# 50 ms while there are at most 60 calls, and every 250 ms while there are 300.
WATCH_SECONDS, WATCHED_AT_ONCE = 0.05, 60
CORE_SECONDS = 1.0  # between two looks at what else the core does
# Of many requests that come together so many are started before the loop reads what has arrived for
# those that run: the first of them have their first text while the last still wait.
STARTED_AT_ONCE = 8
# So many are read at once of those that have come in one ``execute``. Triton's thread waits, no
# longer than this, until they are started: to read the next ones meanwhile would only keep the
# interpreter's lock from the loop.
READ_AT_ONCE, START_SECONDS = 16, 0.02

log = logging.getLogger(__name__)


class _Selector(selectors.DefaultSelector):
    """Knows whether its loop sleeps. ``called``: another thread has left it something to do."""

    sleeps = called = False

    def select(self, timeout: float | None = None) -> Any:
        if timeout != 0:
            self.sleeps = True  # from here on who calls wakes it; who has called is seen here
            if self.called:
                timeout = 0
        self.called = False
        try:
            return super().select(timeout)
        finally:
            self.sleeps = False


class ThreadedLoop(asyncio.SelectorEventLoop):
    """The loop of a process whose other threads often have something for it to do.

    asyncio wakes a loop by a write to a socket, also one that is busy. In the write the thread
    gives away the interpreter's lock, for which it then waits until the busy loop lets go of it.
    """

    def __init__(self) -> None:
        self._sleeper = _Selector()
        super().__init__(self._sleeper)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio's own."""
        if self._sleeper.sleeps or self.get_debug():
            return super().call_soon_threadsafe(callback, *args, context=context)
        handle = self.call_soon(callback, *args, context=context)  # appends, which is atomic
        self._sleeper.called = True
        if self._sleeper.sleeps:  # since just now, and it may not have seen the call
            super().call_soon_threadsafe(bool)
        return handle


class RequestServer:
    """Runs ``handle(call)`` for every request, all at once, until closed.

    ``decoupled``: the model may send any number of responses to one request; otherwise exactly one.
    ``senders``: the threads that send. ``log_ends``: log each request that ends without an answer.
    ``together``: is told, in Triton's thread, which calls have come in one ``execute``, if several.
    ``one_core``: keep the threads, and the one that makes this, on one core while one is free; the
    number of this process among its like, so that each has its own.
    """

    def __init__(
        self,
        pb_utils: Any,
        handle: Callable[[Call], Awaitable[None]],
        *,
        decoupled: bool = True,
        senders: int = SENDERS,
        log_ends: bool = True,
        together: Callable[[Sequence[Call]], object] = bool,
        one_core: int | None = None,
    ) -> None:
        self._pb = pb_utils
        self._handle = handle
        self._decoupled = decoupled
        self._together = together
        self._end_level = logging.INFO if log_ends else logging.DEBUG
        self._open: dict[Call, asyncio.Task[None]] = {}
        self._arrived: collections.deque[Call] = collections.deque()
        self._waking = False
        self._all_started = threading.Event()
        self._loop = ThreadedLoop()
        self._senders = SenderThreads(self._loop, senders)
        self._closing = threading.Event()
        self.refusal: TrtllmBlsError | None = None  # the answer to every new request
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True),
            threading.Thread(target=self._watch, name="watcher", daemon=True),
        ]
        # What loading made stays for good: a full collection would look through all of it and hold
        # every stream for tens of milliseconds. Requests are freed as they end, by their reference
        # counts: frequent passes would only look at those that run.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 50)
        self._one_core: OneCore | None = None
        for thread in self._threads:
            thread.start()
        if one_core is not None:
            self._stay_on_one_core(one_core)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that all requests run on."""
        return self._loop

    def accept(self, requests: Iterable[Any]) -> None:
        """Take requests from Triton's ``execute``; returns as soon as several are being run."""
        left, loop_starts = iter(requests), True
        while several := list(itertools.islice(left, READ_AT_ONCE)):
            calls = self._read(several)
            self._all_started.clear()
            self._arrived.extend(calls)
            if self._arrived and not self._waking:  # one wake-up serves all that have come by then
                self._waking = True
                self._loop.call_soon_threadsafe(self._start_arrived)
            if len(calls) > 1 and loop_starts:
                loop_starts = self._all_started.wait(START_SECONDS)

    def _read(self, requests: Iterable[Any]) -> list[Call]:
        """The calls to be run; the others are answered."""
        calls = []
        for request in requests:
            call = Call(self._pb, request, self._senders, self._decoupled)
            try:
                call.read(request)
                if self.refusal is not None:
                    raise self.refusal
            except Exception as error:  # raised to Triton, it would answer the whole batch twice
                call.fail(error)
            else:
                calls.append(call)
        if len(calls) > 1:
            try:
                self._together(calls)
            except Exception:
                log.exception("requests that came together are read one by one")
        return calls

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End every call still open with an error, run ``finish``, then end the threads."""
        self._closing.set()
        self._run(self.end_all())
        if finish is not None:
            self._run(finish())
        self._senders.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        if self._one_core is not None:
            self._one_core.close()
        self._loop.close()

    @property
    def running(self) -> list[str]:
        """The ids of the calls that have not ended; any thread may ask."""
        return [call.id for call in self._open.copy()]  # atomic under the GIL

    @property
    def responses(self) -> int:
        """How many responses have been made so far, errors left out; any thread may ask."""
        return self._senders.responses

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start_arrived(self) -> None:
        self._waking = False
        for _ in range(min(len(self._arrived), STARTED_AT_ONCE)):
            self._start(self._arrived.popleft())
        if self._arrived and not self._waking:
            self._waking = True
            self._loop.call_soon(self._start_arrived)
        if not self._arrived:
            self._loop.call_soon(self._all_started.set)  # when the tasks have begun

    def _start(self, call: Call) -> None:
        self._senders.expect(call)
        task = self._open[call] = self._loop.create_task(self._answer(call))
        call.on_broken = self._on_broken
        task.add_done_callback(partial(self._over, call))

    def _over(self, call: Call, task: asyncio.Task[None]) -> None:
        del self._open[call]

    def _on_broken(self, call: Call) -> None:
        self._loop.call_soon_threadsafe(self._abandon, call)

    def _abandon(self, call: Call) -> None:
        """Cancel the task of a call, once: a second cancellation would hit its clean-up."""
        if call in self._open and not call.abandoned:
            call.abandoned = True
            self._open[call].cancel(CancelCause.CALLER_LEFT.value)

    async def _answer(self, call: Call) -> None:
        try:
            await self._handle(call)
        except asyncio.CancelledError:
            if call.abandoned:
                log.log(self._end_level, "%s: cancelled: nobody takes its answer any more", call.id)
            else:  # a silent end would look like a whole answer
                call.fail(EngineUnavailable("the server is shutting down"))
        except Exception as error:
            if isinstance(error, TrtllmBlsError):
                log.log(self._end_level, "%s: refused or failed: %s", call.id, to_wire(error))
            call.fail(error)
        finally:
            call.finish()

    async def end_all(self) -> None:
        """End every open call with an error."""
        while self._arrived:
            self._start_arrived()
        await asyncio.sleep(0)  # a task that is cancelled before it has begun answers nobody
        tasks = list(self._open.values())
        for call, task in self._open.items():
            if not call.abandoned:
                task.cancel(CancelCause.SHUTDOWN.value)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stay_on_one_core(self, number: int) -> None:
        named = [*self._threads, *self._senders.threads, threading.current_thread()]
        ids = [thread.native_id for thread in named if thread.native_id]
        try:
            core = OneCore(ids, os.getppid() + number)  # another server's begin elsewhere
        except OSError as error:
            log.info("threads run on any core: %s", error)
            return
        free = ThreadPoolExecutor(thread_name_prefix="worker", initializer=core.free_this_thread)
        self._loop.call_soon_threadsafe(self._loop.set_default_executor, free)
        self._one_core = core

    def _look_at_core(self) -> None:
        if self._one_core is None:
            return
        try:
            self._one_core.look()
        except OSError as error:
            log.info("threads run on any core: %s", error)
            self._one_core.close()
            self._one_core = None

    def _watch(self) -> None:
        waiting: list[Call] = []
        for look in itertools.count(1):
            if self._closing.wait(WATCH_SECONDS):
                return
            if look % round(CORE_SECONDS / WATCH_SECONDS) == 0:
                self._look_at_core()
            if not waiting:
                # copy() is atomic under the GIL; a call that ends meanwhile is not gone.
                waiting = list(self._open.copy())
            asked, waiting = waiting[:WATCHED_AT_ONCE], waiting[WATCHED_AT_ONCE:]
            for call in asked:
                if call.gone():
                    self._on_broken(call)


def answering(answer: Callable[[Arrays], Arrays]) -> Callable[[Call], Awaitable[None]]:
    """The handler of a model whose answer to a request is made at once, in one piece."""

    async def handle(call: Call) -> None:
        call.send(answer(call.arrays), final=True)

    return handle
