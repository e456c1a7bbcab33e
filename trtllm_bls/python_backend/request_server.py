"""The event loop that runs Triton's requests, and the thread that watches for their callers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trtllm_bls.errors import EngineUnavailable, TrtllmBlsError, to_wire
from trtllm_bls.python_backend.call import SENDERS, Arrays, BeforeErrorStatus, Call, SenderThreads
from trtllm_bls.python_backend.one_core import OneCore
from trtllm_bls.types import CancelCause

# Each question whether a caller has left costs a round trip to the server. The watcher asks for at
# most so many calls per look: for each call every 50 ms up to 60 calls, every 250 ms at 300.
WATCH_SECONDS, WATCHED_AT_ONCE = 0.05, 60
LOOKS_PER_CORE_CHECK = 20  # so the load of the cores is read once a second

log = logging.getLogger(__name__)


class RequestServer:
    """Runs ``handle(call)`` for every request, all concurrently, until closed.

    ``decoupled``: the model may send any number of responses to one request; otherwise exactly one.
    ``senders``: the threads that send. ``log_ends``: log each request that ends without an answer.
    ``prepare_batch`` gets the calls of one ``execute``, if they are several, in Triton's thread and
    before any of them is handled. ``before_error_status`` returns once an error may leave that its
    caller wants as gRPC status (``call.STATUS_ASKED``); without it a timer decides. ``one_core``:
    keep the threads, and the one that makes this, on one core while one is free.
    """

    def __init__(
        self,
        pb_utils: Any,
        handle: Callable[[Call], Awaitable[None]],
        *,
        decoupled: bool = True,
        senders: int = SENDERS,
        log_ends: bool = True,
        prepare_batch: Callable[[Sequence[Call]], None] | None = None,
        before_error_status: BeforeErrorStatus | None = None,
        one_core: bool = False,
    ) -> None:
        self._pb = pb_utils
        self._handle = handle
        self._decoupled = decoupled
        self._prepare_batch = prepare_batch
        self._end_level = logging.INFO if log_ends else logging.DEBUG
        self._open: dict[Call, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._senders = SenderThreads(self._loop, senders, before_error_status)
        self._closing = threading.Event()
        self.refusal: TrtllmBlsError | None = None  # the answer to every new request
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True),
            threading.Thread(target=self._watch, name="watcher", daemon=True),
        ]
        # The objects made at load stay for good. A full collection would look through all of them
        # and pause every stream for tens of milliseconds, so they are frozen. Requests leave no
        # reference cycles, so frequent collections would find nothing.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 50)
        self._one_core: OneCore | None = None
        for thread in self._threads:
            thread.start()
        if one_core:
            self._stay_on_one_core()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that all requests run on."""
        return self._loop

    def accept(self, requests: Iterable[Any]) -> None:
        """Take requests from Triton's ``execute``; returns once they have been read."""
        read = [self._read(request) for request in requests]
        good = [call for call, error in read if error is None]
        if self._prepare_batch is not None and len(good) > 1:
            try:
                self._prepare_batch(good)
            except Exception:
                log.exception("a batch of requests could not be prepared; each is handled alone")
        self._loop.call_soon_threadsafe(self._start, read)

    def _read(self, request: Any) -> tuple[Call, Exception | None]:
        """The call, and the error to answer it with if it cannot be handled."""
        call = Call(self._pb, request, self._senders, self._decoupled)
        try:
            call.read(request)
        except Exception as error:  # raised to Triton, it would answer the whole batch twice
            return call, error
        return call, self.refusal

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End every call still open with an error, run ``finish``, then end the threads."""
        self._closing.set()
        self._run(self.end_all())
        if finish is not None:
            self._run(finish())
        self._run(self._senders.close())
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

    def _start(self, read: Sequence[tuple[Call, Exception | None]]) -> None:
        for call, error in read:
            if error is None:
                self._open[call] = self._loop.create_task(self._answer(call))
            else:
                call.fail(error)

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
            del self._open[call]

    def _abandon(self, call: Call) -> None:
        """Cancel the task of a call, once: a second cancellation would hit its clean-up."""
        if call in self._open and not call.abandoned:
            call.abandoned = True
            self._open[call].cancel(CancelCause.CALLER_LEFT.value)

    async def end_all(self) -> None:
        """End every open call with an error."""
        await asyncio.sleep(0)  # a task that is cancelled before its first step answers nobody
        tasks = list(self._open.values())
        for call, task in self._open.items():
            if not call.abandoned:
                task.cancel(CancelCause.SHUTDOWN.value)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        waiting: list[Call] = []
        for look in itertools.count(1):
            if self._closing.wait(WATCH_SECONDS):
                return
            if self._one_core is not None and look % LOOKS_PER_CORE_CHECK == 0:
                self._check_core(self._one_core)
            if not waiting:
                # copy() is atomic under the GIL; a call that ends meanwhile is not gone.
                waiting = list(self._open.copy())
            asked, waiting = waiting[:WATCHED_AT_ONCE], waiting[WATCHED_AT_ONCE:]
            for call in asked:
                if call.gone():
                    self._loop.call_soon_threadsafe(self._abandon, call)

    def _stay_on_one_core(self) -> None:
        pinned = [*self._threads, *self._senders.threads, threading.current_thread()]
        try:
            core = OneCore([thread.native_id for thread in pinned if thread.native_id])
        except OSError as error:
            log.info("threads run on any core: %s", error)
            return
        # A thread starts on the cores of the one that starts it. Workers of ``asyncio.to_thread``
        # tokenise without the GIL, so they get all cores back.
        workers = ThreadPoolExecutor(thread_name_prefix="worker", initializer=core.free_this_thread)
        self._loop.call_soon_threadsafe(self._loop.set_default_executor, workers)
        self._one_core = core

    def _check_core(self, core: OneCore) -> None:
        try:
            core.check()
        except OSError as error:
            log.info("threads run on any core: %s", error)
            core.close()
            self._one_core = None


def answering(answer: Callable[[Arrays], Arrays]) -> Callable[[Call], Awaitable[None]]:
    """The handler of a model whose answer to a request is made at once, in one piece."""

    async def handle(call: Call) -> None:
        call.send(answer(call.arrays), final=True)

    return handle
