"""Triton's requests in every ``model.py``: each is answered exactly once.

``RequestServer`` runs one task per request on an event loop in a thread of its own. Triton's
``send`` is a round trip to the server and blocks its thread, so sender threads do it. A watcher
thread asks Triton which callers have left. ``Call`` alone knows Triton's response sender and keeps
its rules (docs/design.md names the defects of Triton behind them):

- Every request ends in exactly one FINAL, on every path, also where a send fails.
- An error is the last thing sent and carries FINAL. If the caller wants errors as gRPC status, it
  leaves no sooner than Triton's thread for streams has gone back to reading.
- Only outputs that the caller asked for are sent.
- ``is_cancelled`` is never called after FINAL, nor during a send: ``Call._lock`` guards both. What
  its holder has learned is in ``_closed``, ``_gone`` and ``_ask_after_send``.

All other state of a call belongs to the event loop, so it needs no lock. ``Outbox`` decides,
without I/O, which response leaves next. A sender thread takes one response of one call at a time,
and puts the outcome in ``SenderThreads._reports``. The loop hands over the call's next response
when it has taken that report, so no two sends of a call overlap. It takes reports whenever a call
sends or waits. Waking it for each one would add 20 µs of CPU to a token at 8 streams, so a thread
wakes the loop only where somebody waits: it appends its report and then looks for waiters; the loop
adds a waiter and then takes the reports.

``pb_utils`` comes in as an argument, so tests run without Triton. Nothing here knows of text,
tokens or engines.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import itertools
import json
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from trtllm_bls.errors import (
    CancelCause,
    EngineUnavailable,
    InvalidRequest,
    TrtllmBlsError,
    Unsupported,
    printable,
    to_wire,
    unexpected,
)
from trtllm_bls.orchestrator.garbage import collect_rarely
from trtllm_bls.triton.one_core import OneCore
from trtllm_bls.types import Backoff
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, NO_CONTEXT, context_of

# Each question whether a caller has left costs a round trip to the server. The watcher asks for at
# most so many calls per look: for each call every 50 ms up to 60 calls, every 250 ms at 300.
WATCH_SECONDS, WATCHED_AT_ONCE = 0.05, 60
LOOKS_PER_CORE_CHECK = 20  # so the load of the cores is read once a second
SENDERS = 4  # threads; each waits for the server most of its time
# Responses that wait for a sender thread. A call that would add another one waits for its turn
# instead, and the tokens that arrive meanwhile go into the same response.
MAX_QUEUED = 4 * SENDERS
MAX_ID = 128  # characters of a client's id in a log line
_FINAL_FLAG = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# A client can ask for errors as gRPC status, with metadata that ``serve`` has Triton pass on as a
# parameter. On such an error Triton 24.10 closes the stream. It crashes if the thread that handed
# the request to the model has not returned to reading that stream. ``BeforeErrorStatus`` returns
# once that thread has. Where there is none, or it raises, the error waits for so long, which is
# enough unless the machine keeps that thread from a core for longer.
STATUS_ASKED, ERROR_AS_STATUS_SECONDS = '"triton_grpc_error"', 1.0
# Waiting time before an end that Triton did not accept is sent again; it doubles each time.
_RETRY_SECONDS = Backoff(0.2, 5.0)
_UNSENDABLE = EngineUnavailable("a response could not be sent; the server's log tells why")

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
ArraysFunction: TypeAlias = Callable[[Arrays], Arrays]
BeforeErrorStatus: TypeAlias = Callable[[], Awaitable[None]]
_Result = TypeVar("_Result")
_Response: TypeAlias = Arrays | Exception | None  # ``None``: only the FINAL flag

log = logging.getLogger(__name__)


class RequestServer:
    """Runs ``handle(call)`` for every request, all concurrently, until closed.

    ``decoupled``: the model may send any number of responses to one request; otherwise exactly one.
    ``model``: its name, for which contexts of calls are signed (``wire.call_context``).
    ``senders``: the threads that send. ``log_ends``: log each request that ends without an answer.
    ``prepare_batch`` gets the calls of one ``execute``, if they are several, in Triton's thread and
    before any of them is handled. ``before_error_status`` returns once an error may leave that its
    caller wants as gRPC status (``STATUS_ASKED``); without it a timer decides. ``one_core``:
    keep the threads, and the one that makes this, on one core while one is free.
    ``owns_process``: no code of a user's runs in this process.
    """

    def __init__(
        self,
        pb_utils: Any,
        handle: Callable[[Call], Awaitable[None]],
        *,
        decoupled: bool = True,
        model: str = "",
        senders: int = SENDERS,
        log_ends: bool = True,
        prepare_batch: Callable[[Sequence[Call]], None] | None = None,
        before_error_status: BeforeErrorStatus | None = None,
        one_core: bool = False,
        owns_process: bool = True,
    ) -> None:
        self._pb = pb_utils
        self._handle = handle
        self._decoupled = decoupled
        self._model = model
        self._prepare_batch = prepare_batch
        self._end_level = logging.INFO if log_ends else logging.DEBUG
        self._open: dict[Call, asyncio.Task[None]] = {}
        self.loop = asyncio.new_event_loop()  # all requests run on it
        self._senders = SenderThreads(self.loop, senders, before_error_status)
        self._closing, self._stopping = threading.Event(), False
        self._is_ending = False  # every open call is being ended
        self.refusal: TrtllmBlsError | None = None  # the answer to every new request of a client
        self._threads = [
            threading.Thread(target=self._run_loop, name="event-loop", daemon=True),
            threading.Thread(target=self._watch, name="watcher", daemon=True),
        ]
        if owns_process:
            collect_rarely()
        self._one_core: OneCore | None = None
        for thread in self._threads:
            thread.start()
        pinned = [*self._threads, *self._senders.threads, threading.current_thread()]
        try:
            if one_core:
                self._one_core = OneCore([each.native_id for each in pinned if each.native_id])
        except OSError as error:
            log.info("threads run on any core: %s", error)
        if self._one_core is not None:
            # A thread starts on the cores of the one that starts it. Workers of
            # ``asyncio.to_thread`` tokenise without the GIL, so they get all cores back.
            workers = ThreadPoolExecutor(
                thread_name_prefix="worker", initializer=self._one_core.free_this_thread
            )
            self.loop.call_soon_threadsafe(self.loop.set_default_executor, workers)

    def accept(self, requests: Iterable[Any]) -> None:
        """Take requests from Triton's ``execute``; returns once they have been read."""
        read = [self._read(request) for request in requests]
        good = [call for call, error in read if error is None]
        if self._prepare_batch is not None and len(good) > 1:
            try:
                self._prepare_batch(good)
            except Exception:
                log.exception("a batch of requests could not be prepared; each is handled alone")
        self.loop.call_soon_threadsafe(self._start, read)

    def _read(self, request: Any) -> tuple[Call, Exception | None]:
        """The call, and the error to answer it with if it cannot be handled."""
        call = Call(self._pb, request, self._senders, self._decoupled, self._open)
        try:
            call.read(request, self._model)
        except Exception as error:  # raised to Triton, it would answer the whole batch twice
            return call, error
        # A call by a request that runs already may end with it, also while the server drains.
        return call, None if call.context.models else self.refusal

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End every call still open with an error, run ``finish``, then end the threads."""
        self._closing.set()
        self._run(self.end_all())
        if finish is not None:
            self._run(finish())
        self._run(self._senders.close())
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        for thread in self._threads:
            thread.join()
        if self._one_core is not None:
            self._one_core.close()
        self.loop.close()

    @property
    def running(self) -> list[str]:
        """The ids of the calls that have not ended; any thread may ask."""
        return [call.id for call in self._open.copy()]  # atomic under the GIL

    @property
    def responses(self) -> int:
        """How many responses have been made so far, errors left out; any thread may ask."""
        return self._senders.responses

    def _run_loop(self) -> None:
        """Run the event loop until it is closed, whatever a task of a user's raises."""
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio gives it to the loop, too
                log.error("a task raised %r; requests go on", error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _start(self, read: Sequence[tuple[Call, Exception | None]]) -> None:
        for call, error in read:
            if error is None:
                self._open[call] = self.loop.create_task(self._answer(call))
            else:
                call.fail(error)

    async def _answer(self, call: Call) -> None:
        """Handle a call and end it. Only a handler that returns has succeeded.

        Whatever a handler raises ends the call with an error: a normal end would look like a whole
        answer. That holds for ``BaseException``, too, of which PyO3's ``PanicException`` is one.
        """
        try:
            await self._handle(call)
        except asyncio.CancelledError as error:
            if call.abandoned:
                log.log(self._end_level, "%s: cancelled: nobody takes its answer any more", call.id)
                if call.outbox.sequences:
                    call.finish()
            elif self._is_ending:
                call.fail(EngineUnavailable("the server is shutting down"))
            else:
                call.fail(unexpected(error, call.id))
        except Exception as error:
            if isinstance(error, TrtllmBlsError):
                log.log(self._end_level, "%s: refused or failed: %s", call.id, to_wire(error))
            call.fail(error)
        except BaseException as error:
            call.fail(unexpected(error, call.id))
        else:
            if call.outbox.sequences:
                call.finish()
        finally:
            del self._open[call]

    def _abandon(self, call: Call) -> None:
        """Cancel the task of a call, once: a second cancellation would hit its clean-up."""
        if call in self._open and not call.abandoned:
            call.abandoned = True
            call.cancelled = CancelCause.CALLER_LEFT
            self._open[call].cancel(call.cancelled.value)

    @property
    def loop_thread(self) -> threading.Thread:
        """The thread that runs ``loop``."""
        return self._threads[0]

    def request_of(self, task: asyncio.Task[Any]) -> str | None:
        """The id of the request that a task answers; any thread may ask."""
        for call, answering in self._open.copy().items():
            if answering is task:
                return call.id
        return None

    async def run_in_thread(self, function: Callable[[], _Result]) -> _Result:
        """Run a function in a thread of its own, on any core, and return what it returns.

        A cancelled caller does not wait for its end, which nothing else waits for either: the
        threads of asyncio's executor would keep the process from ending.
        """
        outcome: asyncio.Future[_Result] = self.loop.create_future()
        context = contextvars.copy_context()

        def settle(result: _Result | None, error: BaseException | None) -> None:
            if outcome.done():  # cancelled
                return
            if error is None:
                outcome.set_result(result)  # type: ignore[arg-type]
            else:
                outcome.set_exception(error)

        def run() -> None:
            result: _Result | None = None
            problem: BaseException | None = None
            try:
                if self._one_core is not None:
                    self._one_core.free_this_thread()
                result = context.run(function)
            except StopIteration as error:  # which no future takes
                problem = RuntimeError(f"the function raised {error!r}")
            except BaseException as error:
                problem = error
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(settle, result, problem)

        threading.Thread(target=run, name="of-a-request", daemon=True).start()
        return await outcome

    async def end_all(self) -> None:
        """End every open call with an error."""
        self._is_ending = True
        await asyncio.sleep(0)  # a task that is cancelled before its first step answers nobody
        tasks = list(self._open.values())
        for call, task in self._open.items():
            if not call.abandoned:
                call.cancelled = CancelCause.SHUTDOWN
                task.cancel(call.cancelled.value)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        waiting: list[Call] = []
        for look in itertools.count(1):
            if self._closing.wait(WATCH_SECONDS):
                return
            if self._one_core is not None and look % LOOKS_PER_CORE_CHECK == 0:
                try:
                    self._one_core.check()
                except OSError as error:
                    log.info("threads run on any core: %s", error)
                    self._one_core.close()
                    self._one_core = None
            if not waiting:
                # copy() is atomic under the GIL; a call that ends meanwhile is not gone.
                waiting = list(self._open.copy())
            looked_at, waiting = waiting[:WATCHED_AT_ONCE], waiting[WATCHED_AT_ONCE:]
            for call in looked_at:
                if call.gone():
                    self.loop.call_soon_threadsafe(self._abandon, call)


class Sending(Enum):
    """Whether a response of a call is under way."""

    IDLE = "idle"  # the next one can be handed to a sender thread
    UNDER_WAY = "under way"  # a sender thread has one
    DELAYED = "delayed"  # the next one waits for a timer


class Send(NamedTuple):
    """Hand ``response`` to a sender thread."""

    response: _Response
    final: bool  # it is the call's last
    first: bool  # of the call


class Delay(NamedTuple):
    """Call ``due`` after ``seconds``; ``None``: once an error may leave as gRPC status."""

    seconds: float | None


@dataclass
class Outbox:
    """What one call sends, and when, decided without I/O: its methods return what is to be done.

    ``sequences``: whose last response has not been put yet; none: the call has ended.
    ``error_as_status``: an error that is sent has to wait before.

    | state | event | next state | returns |
    | --- | --- | --- | --- |
    | idle | put | under way | Send |
    | under way or delayed | put | the same | nothing: the response is kept |
    | under way | sent, others are kept | under way | Send |
    | under way | sent, none is kept | idle | nothing |
    | under way | not sent | delayed | Delay, twice as long each time |
    | delayed | due | under way | Send |

    Where the response to be sent is an error that has to wait, the next state is ``delayed``
    instead, once, and ``Delay`` is returned.
    """

    error_as_status: bool = False
    sequences: int = 1
    kept: collections.deque[_Response] = field(default_factory=collections.deque)
    state: Sending = Sending.IDLE
    begun: bool = False  # a response has been handed over
    retry_seconds: float = _RETRY_SECONDS.first

    def put(self, response: _Response, ends: int) -> Send | Delay | None:
        """A response, which is the last of ``ends`` sequences. Not for a call that has ended."""
        self.sequences -= ends
        self.kept.append(response)
        return self.due() if self.state is Sending.IDLE else None

    def sent(self, ended_well: bool) -> Send | Delay | None:
        """A sender thread has done its part; not ``ended_well``: Triton accepted no end."""
        if not ended_well:
            self.sequences = 0
            self.kept.clear()
            self.kept.append(_UNSENDABLE)
            self.state = Sending.DELAYED
            delay = Delay(self.retry_seconds)
            self.retry_seconds = _RETRY_SECONDS.after(self.retry_seconds)
            return delay
        if self.kept:
            return self.due()
        self.state = Sending.IDLE
        return None

    def due(self) -> Send | Delay:
        """The next response can leave, or the time that it waited for has come."""
        if self.error_as_status and isinstance(self.kept[0], Exception):
            self.error_as_status, self.state = False, Sending.DELAYED
            return Delay(None)
        self.state = Sending.UNDER_WAY
        response = self.kept.popleft()
        first, self.begun = not self.begun, True
        return Send(response, not self.sequences and not self.kept, first)


class Call:
    """One Triton request and its answer; ``arrays`` are its inputs, once they have been read.

    ``wanted``: the outputs asked for, which are all if the caller named none. ``decoupled``: any
    number of responses may be sent; otherwise exactly one. ``send``, ``fail``, ``finish`` and
    ``ready`` are called on the event loop. The first three never wait.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(
        self,
        pb_utils: Any,
        request: Any,
        senders: SenderThreads,
        decoupled: bool,
        open_calls: Mapping[Call, asyncio.Task[None]] = MappingProxyType({}),
    ) -> None:
        self._pb = pb_utils
        self._open_calls = open_calls
        self._sender = request.get_response_sender()
        self._senders = senders
        self.decoupled = decoupled
        self.wanted: frozenset[str] = frozenset(request.requested_output_names())
        self.client_id: str = request.request_id()
        # Clients may choose equal ids. This one is unique in the process, for the log.
        name = printable(self.client_id, MAX_ID) if self.client_id else "request"
        self.id = f"{name}-{next(self._numbers)}"
        self.arrays: Arrays = MappingProxyType({})
        self.parameters = "{}"  # of the request, as JSON
        self.context = NO_CONTEXT  # on whose behalf another model makes the call
        self.sequence_id: int | str = 0  # by which Triton knows a sequence of requests; 0: none
        # Of the event loop:
        self.outbox = Outbox()
        self.cancelled: CancelCause | None = None  # why the server has cancelled its task
        self.abandoned = False  # its task has been cancelled since nobody takes its answer
        self.may_be_stopped = self.stopped = False  # by another request with its id
        self.waiting: list[asyncio.Future[None]] = []  # for what is under way
        # Under the lock:
        self._lock = threading.Lock()
        self._closed = False  # FINAL has been sent
        self._gone = False  # the caller has left, or cannot be sent to
        self._ask_after_send = False  # the watcher came by during a send

    def read(self, request: Any, model: str = "") -> None:
        """Copy the inputs of a request to ``model``, in the thread that brings the request."""
        self.parameters = request.parameters()
        self.sequence_id = request.correlation_id()
        if CONTEXT_PARAMETER in self.parameters:  # most requests have none
            self.context = context_of(model, json.loads(self.parameters))
        self.outbox.error_as_status = STATUS_ASKED in self.parameters
        self.arrays = MappingProxyType(
            {tensor.name(): _owned(tensor.as_numpy()) for tensor in request.inputs()}
        )

    def send(self, arrays: Arrays, final: bool = False) -> None:
        """Send one response; with ``final`` it is the last of its sequence, and the call ends with
        the last of its sequences. Ignored once the call has ended."""
        self._put(arrays, int(final))

    def fail(self, error: Exception) -> None:
        """End the call with an error; ignored once it has ended."""
        if self.outbox.sequences:
            self.arrays = MappingProxyType({})  # the error may have to wait
            self._put(error, self.outbox.sequences)

    def finish(self) -> None:
        """End the call without another response if that is allowed; ignored once it has ended."""
        # A model that is not decoupled owes one response.
        self._put(None if self.decoupled else {}, self.outbox.sequences)

    def check_one_response(self, *, sequences: int, **given: int) -> None:
        """Raises ``Unsupported`` where this call, of a model that is not decoupled, would need
        several responses.

        Of ``given``, named as the caller sent them, the first says whether the request is to
        stream, the second how many rows it has.
        """
        (flag, streams), (prompt, rows) = given.items()
        once = "this deployment is not decoupled and answers once per request"
        if streams:
            raise Unsupported(flag, f"true: {once}; send false, or deploy it decoupled")
        if rows > 1:
            raise Unsupported(prompt, f"{rows} rows: {once}; send one row")
        if sequences > 1:
            raise Unsupported("num_return_sequences", f"above 1: {once}; send several requests")

    def stop_namesakes(self, *, newest_only: bool = False) -> None:
        """Cancel the calls with this one's id that ``may_be_stopped``. Raises ``InvalidRequest``
        where it has none."""
        if not self.client_id:
            raise InvalidRequest("stop", "needs the request id of the request that is to stop")
        namesakes = []
        for call in self._open_calls:
            if call.may_be_stopped and call.client_id == self.client_id:
                namesakes.append(call)
        for call in namesakes[-1:] if newest_only else namesakes:
            call.may_be_stopped, call.stopped = False, True
            if not call.abandoned:
                call.cancelled = CancelCause.CALLER_LEFT
                self._open_calls[call].cancel(call.cancelled.value)

    async def ready(self) -> None:
        """Return once everything has been sent and the next response would leave soon.

        A first response waits for nobody. A later one waits for its turn, and the tokens that
        arrive meanwhile become part of it. Does not suspend if nothing is to be waited for.
        """
        has_room = self._senders.take_reports()
        idle = self.outbox.state is Sending.IDLE
        if idle and (not self.outbox.begun or has_room):
            return
        waiter = asyncio.get_running_loop().create_future()
        (self._senders.turns if idle else self.waiting).append(waiter)
        self._senders.take_reports()
        await waiter

    def _put(self, response: _Response, ends: int) -> None:
        if self.outbox.sequences:
            action = self.outbox.put(response, ends)
            self._senders.take_reports()
            self._senders.act(self, action)

    # --- in the watcher's thread ----------------------------------------------------------------

    def gone(self) -> bool:
        """Whether nobody takes the answer: the caller has left, or cannot be sent to.

        While a response is being sent, the sender thread asks instead, as soon as it has left: a
        call that sends without a pause would never be asked otherwise.
        """
        if not self._lock.acquire(blocking=False):
            self._ask_after_send = True
            return self._gone
        try:
            return self._gone or self._ask()
        finally:
            self._lock.release()

    def _ask(self) -> bool:
        """The only place that asks Triton; the lock is held."""
        try:
            return not self._closed and bool(self._sender.is_cancelled())
        except Exception as error:  # whatever Triton raises, the watch goes on
            log.warning("%s: cannot ask for its caller: %s", self.id, error)
            return False

    # --- in a sender thread ---------------------------------------------------------------------

    def deliver(self, response: _Response, final: bool) -> bool:
        """Send one response, or an end in its place if Triton does not accept it.

        Returns false if Triton accepted no end either: the call is still open then.
        """
        with self._lock:
            if self._closed:  # by an error in place of an earlier response
                return True
            if not self._try(response, final):
                self._gone = True  # so the watcher cancels its work, and retries are not logged
                bare_end: _Response = None if self.decoupled else {}
                return self._try(_UNSENDABLE, True) or self._try(bare_end, True)
            if self._ask_after_send:
                self._ask_after_send, self._gone = False, self._gone or self._ask()
            return True

    def _try(self, response: _Response, final: bool) -> bool:
        flags, pb = _FINAL_FLAG if final else 0, self._pb
        try:
            if response is None:
                self._sender.send(flags=flags)
            elif isinstance(response, Exception):
                error = as_triton_error(pb, response, self.id)
                self._sender.send(pb.InferenceResponse([], error=error), flags=flags)
            else:  # Triton 24.10 crashes on an output that the caller did not ask for
                outputs = [
                    pb.Tensor(name, array)
                    for name, array in response.items()
                    if name in self.wanted
                ]
                self._sender.send(pb.InferenceResponse(outputs), flags=flags)
        except Exception as raised:  # Triton raises types of its own
            if not self._gone:
                log.error("%s: a response could not be sent: %s", self.id, raised)
            return False
        self._closed = final
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class SenderThreads:
    """``threads`` threads that send responses, and the turns that calls take to make them.

    All but the threads' own part is called on ``loop``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int,
        before_error_status: BeforeErrorStatus | None = None,
    ) -> None:
        self._loop = loop
        self._before_error_status = before_error_status
        self._delayed: dict[Call, asyncio.Task[None]] = {}  # of calls that send after a while
        self._closing = False
        self._most = MAX_QUEUED + threads
        self._under_way = 0
        # Those who wait until fewer responses are under way, in order.
        self.turns: collections.deque[asyncio.Future[None]] = collections.deque()
        self.responses = 0  # handed over so far, errors left out; any thread may read it
        # What is to be sent, first responses apart since they leave before others. ``_work`` has
        # one ``True`` for each item of both, and one ``False`` to end each thread.
        self._first: collections.deque[tuple[Call, Send]] = collections.deque()
        self._later: collections.deque[tuple[Call, Send]] = collections.deque()
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # What sender threads have done, and whether the loop has been told to take it.
        self._reports: collections.deque[tuple[Call, bool]] = collections.deque()
        self._waking = False
        self.threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def act(self, call: Call, action: Send | Delay | None) -> None:
        """Do what a call's ``Outbox`` has decided."""
        if isinstance(action, Send):
            self._under_way += 1
            self.responses += isinstance(action.response, Mapping)
            (self._first if action.first else self._later).append((call, action))
            self._work.put(True)
        elif action is not None:
            self.delay(call, action.seconds)

    def delay(self, call: Call, seconds: float | None) -> None:
        """See ``Delay``. What is delayed is due when the threads end, too."""
        if not self._closing:
            self._delayed[call] = self._loop.create_task(self._delay(call, seconds))
        elif seconds is None:  # no error is held any longer
            self.act(call, call.outbox.due())

    async def _delay(self, call: Call, seconds: float | None) -> None:
        if seconds is None:
            seconds = ERROR_AS_STATUS_SECONDS
            try:
                if self._before_error_status is not None:
                    await self._before_error_status()
                    seconds = 0
            except Exception as error:  # an error that never left would be worse
                log.info("%s: its error is held for a while: %s", call.id, error)
        await asyncio.sleep(seconds)
        del self._delayed[call]
        self.act(call, call.outbox.due())

    def take_reports(self) -> bool:
        """Note what has been sent since the last time, and give turns to those who wait.

        Returns whether a response would leave soon, and no other call waits for its turn.
        """
        self._waking = False  # before the reports: a thread that saw it set has added its own
        while self._reports:
            call, ended_well = self._reports.popleft()
            self._under_way -= 1
            self.act(call, call.outbox.sent(ended_well))
            if call.waiting and call.outbox.state is Sending.IDLE:
                self.turns.extend(call.waiting)
                call.waiting.clear()
        if self.turns:
            self._give_turns()
        return not self.turns and self._under_way < self._most

    def _give_turns(self) -> None:
        room = self._most - self._under_way
        while self.turns and room > 0:
            waiter = self.turns.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1
        if self.turns and self._under_way < self._most:
            # A task that has its turn may have been cancelled, or have nothing to send. No send
            # would then give its turn to the next one, so look again once those tasks have run.
            self._loop.call_soon(self._give_turns)

    async def close(self) -> None:
        """Send what is pending, then end the threads; what was delayed is tried once, at once.

        No call may be given another response meanwhile.
        """
        await self._nothing_under_way()
        self._closing, delayed = True, self._delayed
        for call, task in delayed.items():
            task.cancel()
            self.act(call, call.outbox.due())
        await asyncio.gather(*delayed.values(), return_exceptions=True)
        await self._nothing_under_way()
        for _ in self.threads:
            self._work.put(False)
        for thread in self.threads:  # which have nothing left to do
            thread.join()

    async def _nothing_under_way(self) -> None:
        while self._under_way:
            waiter = self._loop.create_future()
            self.turns.append(waiter)
            self.take_reports()
            await waiter

    def _run(self) -> None:
        while self._work.get():
            try:
                call, action = self._first.popleft()
            except IndexError:
                call, action = self._later.popleft()
            ended_well = call.deliver(action.response, action.final)
            del action  # an error keeps its request, and this thread may wait long for the next
            self._reports.append((call, ended_well))
            outbox = call.outbox
            waited_for = call.waiting or outbox.kept or not outbox.sequences or self.turns
            if (waited_for or not ended_well) and not self._waking:
                self._waking = True  # one wake-up serves all reports that are there by then
                self._loop.call_soon_threadsafe(self.take_reports)


def _owned(array: NDArray[Any]) -> NDArray[Any]:
    """The array, copied where its memory is Triton's, which may free it any time.

    An array that owns its memory is not copied: numpy releases the GIL for every copy, however
    small, and the thread then waits to get it back.
    """
    owner = array if array.base is None else array.base
    owned = isinstance(owner, np.ndarray) and owner.flags.owndata
    return array if owned else np.array(array)


def as_triton_error(pb_utils: Any, error: Exception, call_id: str) -> Any:
    """A failure as its caller sees it: our own errors as they are, of others only the kind.

    The text of an unexpected error may hold paths, so it goes to the log alone.
    """
    if not isinstance(error, TrtllmBlsError):
        error = unexpected(error, call_id)
    return pb_utils.TritonError(to_wire(error), getattr(pb_utils.TritonError, error.status))
