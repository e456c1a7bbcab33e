"""What every ``model.py`` does with Triton's requests: answer each exactly once.

One event loop in a thread of its own runs one task per request. Sending is a round trip to the
server that blocks its thread, so a few sender threads do it; at most one send per request is in
flight, and what its task produces meanwhile is answered together (``Call.ready``). One watcher
thread asks Triton which callers have gone and cancels their tasks. The rules that a response sender
must obey (docs/architecture.md names the defects behind them) are kept here and nowhere else:

- every request ends in exactly one FINAL, on every path, also where a send fails;
- an error is the last thing sent and has FINAL in the same send;
- only outputs that the caller asked for are sent;
- nobody asks ``is_cancelled`` of a sender that has been closed: both are done under one lock.

``pb_utils`` comes in as an argument. Knows nothing of text, tokens or engines.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtllm_bls.errors import EngineUnavailable, TrtllmBlsError, printable, to_wire
from trtllm_bls.request_stats import CancelCause

SENDERS = 4  # threads; each waits for the server most of its time
MAX_QUEUED = 4 * SENDERS  # responses made ahead of the threads; the others are made when it is time
# Asking for a caller costs a round trip, so all calls share so many questions: each is asked every
# 50 ms while there are at most 60 calls, and every 250 ms while there are 300.
WATCH_SECONDS, WATCHED_AT_ONCE = 0.05, 60
_MAX_ID = 128  # characters of a client's id in a log line
_FINAL = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 5.0  # where every send fails; doubled

log = logging.getLogger(__name__)


_Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class Call:
    """One Triton request and its answer; ``arrays`` are its inputs, once they have been read.

    ``wanted``: the outputs asked for, which are all if the caller named none. ``send``, ``fail``
    and ``finish`` are called on the event loop and never wait.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, pb_utils: Any, request: Any, senders: SenderThreads, decoupled: bool
    ) -> None:
        self._pb = pb_utils
        self._decoupled = decoupled
        self._sender = request.get_response_sender()
        self._senders = senders
        self.wanted: frozenset[str] = frozenset(request.requested_output_names())
        self._lock = threading.Lock()  # of Triton's sender
        self._closed = False
        self._queue_lock = threading.Lock()
        self._queue: collections.deque[tuple[Callable[[], Any] | None, bool]] = collections.deque()
        self._sending = False
        self._begun = False  # its first response is queued
        self._ended = False  # the last response is queued
        self._asked = False  # whether the caller is gone, while a response was being sent
        self._found_gone = False
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._failure_told = False
        self._waiters: list[asyncio.Future[None]] = []
        self.on_broken: Callable[[], object] = lambda: None  # called when a response cannot be sent
        self.sequences = 1  # that have not ended
        self.abandoned = False  # nobody takes its answer any more
        self.client_id: str = request.request_id()
        # Unique in this process, whatever ids clients choose; it names the call in log lines.
        self.id = f"{printable(self.client_id, _MAX_ID) or 'request'}-{next(self._numbers)}"
        self.arrays: _Arrays = MappingProxyType({})
        self.parameters = "{}"  # of the request, as JSON

    def read(self, request: Any) -> None:
        """Copy the inputs: Triton may free its own any time."""
        self.parameters = request.parameters()
        self.arrays = MappingProxyType(
            {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
        )

    def send(self, arrays: _Arrays, final: bool = False) -> None:
        """Send one response; with ``final`` it is the last of its sequence, and the call ends with
        the last of ``sequences``. Ignored once the call has ended."""
        self.sequences -= final
        self._put(lambda: self._response(arrays), self.sequences == 0)

    def fail(self, error: Exception) -> None:
        """End the call with an error; ignored once it has ended."""
        self._put(lambda: self._error(error), final=True)

    def finish(self) -> None:
        """End the call without another response if that is allowed; ignored once it has ended."""
        self._put(self._bare_end(), final=True)

    async def ready(self) -> None:
        """Return once everything has been sent and the next response would leave soon.

        Without suspending if that is so.
        """
        if self._sending:
            waiter = asyncio.get_running_loop().create_future()
            with self._queue_lock:
                if self._sending:
                    self._waiters.append(waiter)
                else:
                    waiter.set_result(None)
            await waiter
        # A first response waits for nobody; what a later one waits for becomes part of it.
        if self._begun and not self._senders.has_room():
            await self._senders.room()

    def gone(self) -> bool:
        """Whether the caller no longer waits.

        While a response is being sent, the sender thread asks instead, as soon as it has left: a
        call that sends without a pause would never be asked otherwise.
        """
        if not self._lock.acquire(blocking=False):
            self._asked = True
            return self._found_gone
        try:
            return self._found_gone or self._ask()
        finally:
            self._lock.release()

    def _ask(self) -> bool:
        """The only place that asks Triton; the lock is held."""
        try:
            return not self._closed and bool(self._sender.is_cancelled())
        except Exception as error:  # whatever Triton raises, the watch goes on
            log.warning("%s: cannot ask for its caller: %s", self.id, error)
            return False

    def _response(self, arrays: _Arrays) -> Any:
        self._senders.responses += 1
        tensors = [
            self._pb.Tensor(name, array) for name, array in arrays.items() if name in self.wanted
        ]
        return self._pb.InferenceResponse(tensors)

    def _error(self, error: Exception) -> Any:
        return self._pb.InferenceResponse([], error=as_triton_error(self._pb, error, self.id))

    def _bare_end(self) -> Callable[[], Any] | None:
        """The least that ends a call: a model that is not decoupled owes one response."""
        return None if self._decoupled else lambda: self._response({})

    def _put(self, response: Callable[[], Any] | None, final: bool) -> None:
        if self._ended:
            return
        self._begun, self._ended = True, final
        with self._queue_lock:
            self._queue.append((response, final))
            if self._sending:
                return
            self._sending = True
        self._senders.work_on(self)

    # --- in a sender thread -------------------------------------------------------------------

    def send_queued(self) -> list[asyncio.Future[None]]:
        """Send all that is queued; who waits for that."""
        while True:
            with self._queue_lock:
                if not self._queue:
                    self._sending = False
                    waiters, self._waiters = self._waiters, []
                    return waiters
                response, final = self._queue.popleft()
            if not self._send(response, final):
                with self._queue_lock:
                    self._queue.appendleft((self._unsendable, True))
                self._senders.later(self._retry_seconds, self)
                self._retry_seconds = min(2 * self._retry_seconds, _LONGEST_RETRY_SECONDS)
                return []

    def _send(self, response: Callable[[], Any] | None, final: bool) -> bool:
        """Send one response; false if not even the end could be sent."""
        with self._lock:
            if self._closed:
                return True
            if self._try(response, final):
                if self._asked:
                    self._asked, self._found_gone = False, self._ask()
                return True
            _ = self._try(self._unsendable, True) or self._try(self._bare_end(), True)
        self.on_broken()
        return self._closed

    def _try(self, response: Callable[[], Any] | None, final: bool) -> bool:
        try:
            responses = [] if response is None else [response()]
            self._sender.send(*responses, flags=_FINAL if final else 0)
        except Exception as error:  # Triton raises types of its own
            if not self._failure_told:  # there may be many more of it
                log.error("%s: a response could not be sent: %s", self.id, error)
            self._failure_told = True
            return False
        self._closed = final
        return True

    def _unsendable(self) -> Any:
        problem = "a response could not be sent; the server's log tells why"
        return self._error(EngineUnavailable(problem))


class SenderThreads:
    """Threads that send what calls have queued, each call by one thread at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._for_room: collections.deque[asyncio.Future[None]] = collections.deque()
        self._retries: dict[Call, threading.Timer] = {}
        self._ready: collections.deque[asyncio.Future[None]] = collections.deque()
        self._waking = False
        self.responses = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def work_on(self, call: Call) -> None:
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

    def later(self, seconds: float, call: Call) -> None:
        """The same, after a while."""
        timer = self._retries[call] = threading.Timer(seconds, self.work_on, [call])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Send what is queued, then end the threads; what could not be sent is tried once more."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        for timer in list(self._retries.values()):
            timer.cancel()
            timer.join()
        for call in list(self._retries):
            self._send(call)

    def _send(self, call: Call) -> None:
        self._retries.pop(call, None)
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


class RequestServer:
    """Runs ``handle(call)`` for every request, all at once, until closed.

    ``decoupled``: the model may send any number of responses to one request; otherwise exactly one.
    ``senders``: the threads that send. ``log_ends``: log each request that ends without an answer.
    """

    def __init__(
        self,
        pb_utils: Any,
        handle: Callable[[Call], Awaitable[None]],
        *,
        decoupled: bool = True,
        senders: int = SENDERS,
        log_ends: bool = True,
    ) -> None:
        self._pb = pb_utils
        self._handle = handle
        self._decoupled = decoupled
        self._end_level = logging.INFO if log_ends else logging.DEBUG
        self._open: dict[asyncio.Task[None], Call] = {}
        self._arrived: collections.deque[Call] = collections.deque()
        self._waking = False
        self._loop = asyncio.new_event_loop()
        self._senders = SenderThreads(self._loop, senders)
        self._closing = threading.Event()
        self.refusal: TrtllmBlsError | None = None  # the answer to every new request
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True),
            threading.Thread(target=self._watch, name="watcher", daemon=True),
        ]
        # What loading made stays for good: a full collection would look through all of it and hold
        # every stream for tens of milliseconds.
        gc.collect()
        gc.freeze()
        for thread in self._threads:
            thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that all requests run on."""
        return self._loop

    def accept(self, requests: Iterable[Any]) -> None:
        """Take requests from Triton's ``execute``; returns at once."""
        for request in requests:
            call = Call(self._pb, request, self._senders, self._decoupled)
            try:
                call.read(request)
                if self.refusal is not None:
                    raise self.refusal
            except Exception as error:  # raised to Triton, it would answer the whole batch twice
                call.fail(error)
            else:
                self._arrived.append(call)
        if self._arrived and not self._waking:  # one wake-up serves all that have come by then
            self._waking = True
            self._loop.call_soon_threadsafe(self._start_arrived)

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End every call still open with an error, run ``finish``, then end the threads."""
        self._closing.set()
        self._run(self.end_all())
        self._run(finish())
        self._senders.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    @property
    def running(self) -> list[str]:
        """The ids of the calls that have not ended; any thread may ask."""
        return [call.id for call in self._open.copy().values()]  # atomic under the GIL

    @property
    def responses(self) -> int:
        """How many responses have been made so far, errors left out; any thread may ask."""
        return self._senders.responses

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start_arrived(self) -> None:
        self._waking = False
        while self._arrived:
            self._start(self._arrived.popleft())

    def _start(self, call: Call) -> None:
        task = self._loop.create_task(self._answer(call))
        self._open[task] = call
        call.on_broken = lambda: self._loop.call_soon_threadsafe(_abandon, task, call)
        task.add_done_callback(self._open.pop)

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
        tasks = list(self._open)
        for task, call in self._open.items():
            if not call.abandoned:
                task.cancel(CancelCause.SHUTDOWN.value)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        waiting: list[tuple[asyncio.Task[None], Call]] = []
        while not self._closing.wait(WATCH_SECONDS):
            if not waiting:
                # copy() is atomic under the GIL; a call that ends meanwhile is not gone.
                waiting = list(self._open.copy().items())
            asked, waiting = waiting[:WATCHED_AT_ONCE], waiting[WATCHED_AT_ONCE:]
            for task, call in asked:
                if call.gone():
                    self._loop.call_soon_threadsafe(_abandon, task, call)


def _abandon(task: asyncio.Task[None], call: Call) -> None:
    """Cancel the task of a call, once: a second cancellation would hit its clean-up."""
    if not call.abandoned:
        call.abandoned = True
        task.cancel(CancelCause.CALLER_LEFT.value)


def answer_each(
    pb_utils: Any,
    requests: Iterable[Any],
    answer: Callable[[_Arrays], _Arrays],
) -> list[Any]:
    """One response per request of a model that is not decoupled; a failure is its own answer."""
    return [_answered(pb_utils, request, answer) for request in requests]


def _answered(pb_utils: Any, request: Any, answer: Callable[[_Arrays], _Arrays]) -> Any:
    try:
        arrays = answer({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
    except Exception as error:
        failure = as_triton_error(pb_utils, error, printable(request.request_id(), _MAX_ID))
        return pb_utils.InferenceResponse([], error=failure)
    wanted = request.requested_output_names()
    tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in wanted]
    return pb_utils.InferenceResponse(tensors)


def as_triton_error(pb_utils: Any, error: Exception, call_id: str) -> Any:
    """A failure as its caller sees it: our own errors as they are, of others only the kind."""
    if not isinstance(error, TrtllmBlsError):
        log.error("%s: unexpected error", call_id, exc_info=error)
        kind = type(error).__name__
        error = TrtllmBlsError(f"unexpected {kind}; the server's log tells more under {call_id}")
    return pb_utils.TritonError(to_wire(error), getattr(pb_utils.TritonError, error.status))
