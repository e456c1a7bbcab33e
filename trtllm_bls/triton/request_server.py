"""The server of Triton's requests in every ``model.py``. It answers each request exactly once.

``RequestServer`` runs one task per request on an event loop in a thread of its own. Triton's
``send`` is a round trip to the server and blocks its thread, so sender threads do it. A watcher
thread asks Triton which callers have left. ``Call`` alone knows Triton's response sender and keeps
its rules (docs/design.md names the defects of Triton behind them):

- Every request ends in exactly one FINAL, on every path, also if a send fails.
- An error is the last thing sent and carries FINAL. If the caller wants errors as gRPC status, the
  error leaves only after Triton's thread for streams has gone back to reading.
- Only requested outputs are sent.
- ``is_cancelled`` is never called after FINAL or during a send. ``Call._lock`` guards both, and the
  fields ``_closed``, ``_gone`` and ``_ask_after_send``.
- A call lets go of its sender with FINAL.

All other state of a call belongs to the event loop, so it needs no lock. ``Outbox`` decides,
without I/O, which response leaves next. A sender thread takes one response of one call at a time,
and puts the outcome in ``SenderThreads._reports``. The loop hands over the call's next response
when it has taken that report, so no two sends of a call overlap. It takes reports whenever a call
sends or waits. Waking it for each one would add 20 µs of CPU to a token at 8 streams, so a thread
wakes the loop only if a task waits. Neither side can miss the other: the thread appends its report
and then looks for waiters, and the loop adds a waiter and then takes the reports.

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
from trtllm_bls.garbage import collect_rarely
from trtllm_bls.triton.one_core import OneCore
from trtllm_bls.types import Backoff
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, NO_CONTEXT, context_of

# The watcher asks Triton whether a caller has left, which costs a round trip to the server. It asks
# for a limited number of calls per look: each call every 50 ms up to 60 calls, every 250 ms at 300.
WATCH_SECONDS = 0.05
WATCHED_AT_ONCE = 60
LOOKS_PER_CORE_CHECK = 20  # reads the load of the cores once a second
SENDERS = 4  # threads; each waits for the server most of its time
# The responses that may wait for a sender thread. A call that would add another one waits for its
# turn instead, and the tokens that arrive meanwhile go into the same response.
MAX_QUEUED = 4 * SENDERS
MAX_ID = 128  # characters of a client's id in a log line
_FINAL_FLAG = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# A client can ask for errors as gRPC status, with metadata that ``serve`` has Triton pass on as a
# parameter. On such an error Triton 24.10 closes the stream. It crashes if the thread that handed
# the request to the model has not returned to reading that stream. ``BeforeErrorStatus`` returns
# once that thread has. Without it, or if it raises, the error waits for ERROR_AS_STATUS_SECONDS.
# That is enough unless the thread gets no core for longer.
STATUS_PARAMETER = '"triton_grpc_error"'
ERROR_AS_STATUS_SECONDS = 1.0
_RETRY_SECONDS = Backoff(0.2, 5.0)  # before an end that Triton did not accept is sent again
_UNSENDABLE = EngineUnavailable("a response could not be sent; the server's log tells why")

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
ArraysFunction: TypeAlias = Callable[[Arrays], Arrays]
BeforeErrorStatus: TypeAlias = Callable[[], Awaitable[None]]
_Result = TypeVar("_Result")
_Response: TypeAlias = Arrays | Exception | None  # ``None``: only the FINAL flag

log = logging.getLogger(__name__)


class RequestServer:
    """Runs ``handle(call)`` for every request, all concurrently, until ``close``.

    ``decoupled``: the model may send any number of responses to one request; otherwise exactly one.
    ``model``: the name in the signatures of call contexts (``wire.call_context``). ``senders``: the
    number of sender threads. ``log_ends``: log each request that ends without an answer.
    ``prepare_batch`` gets the calls of an ``execute`` with several requests. It runs in Triton's
    thread, before any of the calls is handled. ``before_error_status`` returns once an error may
    leave as gRPC status (``STATUS_PARAMETER``); without it a timer decides. ``one_core``: keep the
    threads, and the calling one, on one core while one is free. ``owns_process``: this process runs
    no user's code.
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
        self._closing = threading.Event()
        self._stopping = False
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
                self._one_core = OneCore(
                    [thread.native_id for thread in pinned if thread.native_id]
                )
        except OSError as error:
            log.info("threads run on any core: %s", error)
        if self._one_core is not None:
            # A thread inherits the cores of the thread that starts it. The workers of
            # ``asyncio.to_thread`` tokenise without the GIL, so they get all cores back.
            workers = ThreadPoolExecutor(
                thread_name_prefix="worker", initializer=self._one_core.free_this_thread
            )
            self.loop.call_soon_threadsafe(self.loop.set_default_executor, workers)

    def accept(self, requests: Iterable[Any]) -> None:
        """Read the requests of Triton's ``execute``, and have the event loop handle them."""
        calls = [self._read(request) for request in requests]
        accepted_calls = [call for call, error in calls if error is None]
        if self._prepare_batch is not None and len(accepted_calls) > 1:
            try:
                self._prepare_batch(accepted_calls)
            except Exception:
                log.exception("a batch of requests could not be prepared; each is handled alone")
        self.loop.call_soon_threadsafe(self._start, calls)

    def _read(self, request: Any) -> tuple[Call, Exception | None]:
        """Return a request's call, and the error if the call cannot be handled."""
        call = Call(self._pb, request, self._senders, self._decoupled, self._open)
        try:
            call.read(request, self._model)
        except Exception as error:  # if ``execute`` raised, Triton would answer the batch again
            return call, error
        # The server accepts the calls of a pipeline's running request also while it drains.
        if call.context.models:
            return call, None
        return call, self.refusal

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End every call still open with an error, run ``finish``, then end the threads.

        Raises what ``finish`` raises, after that.
        """
        self._closing.set()
        self._run(self.end_all())
        try:
            if finish is not None:
                self._run(finish())
        finally:
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
        """The ids of the calls that have not ended. Any thread may read it."""
        return [call.id for call in self._open.copy()]  # copy() is atomic under the GIL

    @property
    def responses(self) -> int:
        """The number of responses so far, without errors. Any thread may read it."""
        return self._senders.responses

    def _run_loop(self) -> None:
        """Run the event loop until ``close``, whatever a user's task raises."""
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio raises it in the loop, too
                log.error("a task raised %r; requests go on", error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _start(self, calls: Sequence[tuple[Call, Exception | None]]) -> None:
        for call, error in calls:
            if error is None:
                self._open[call] = self.loop.create_task(self._answer(call))
            else:
                call.fail(error)

    async def _answer(self, call: Call) -> None:
        """Handle a call and end it. Only a handler that returns has succeeded.

        Whatever a handler raises ends the call with an error: a normal end would look like a
        complete answer. That includes each ``BaseException``, such as PyO3's ``PanicException``.
        """
        try:
            await self._handle(call)
        except asyncio.CancelledError as error:
            if call.is_abandoned:
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
        if call in self._open and not call.is_abandoned:
            call.is_abandoned = True
            call.cancel_cause = CancelCause.CALLER_LEFT
            self._open[call].cancel(call.cancel_cause.value)

    @property
    def loop_thread(self) -> threading.Thread:
        """The thread that runs ``loop``."""
        return self._threads[0]

    def request_of(self, task: asyncio.Task[Any]) -> str | None:
        """Return the id of the request that a task answers. Any thread may call it."""
        for call, answer_task in self._open.copy().items():
            if answer_task is task:
                return call.id
        return None

    async def run_in_thread(self, function: Callable[[], _Result]) -> _Result:
        """Run a function in a thread of its own, on any core, and return its result.

        Nobody waits for the thread of a cancelled caller. The threads of asyncio's executor would
        keep the process from ending.
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
            except StopIteration as error:  # a future accepts any exception but this one
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
        await asyncio.sleep(0)  # a task that is cancelled before its first step sends no answer
        tasks = list(self._open.values())
        for call, task in self._open.items():
            if not call.is_abandoned:
                call.cancel_cause = CancelCause.SHUTDOWN
                task.cancel(call.cancel_cause.value)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        remaining: list[Call] = []  # in this round through all calls
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
            if not remaining:
                # copy() is atomic under the GIL; ``gone`` is False for a call that ended meanwhile.
                remaining = list(self._open.copy())
            for call in remaining[:WATCHED_AT_ONCE]:
                if call.gone():
                    self.loop.call_soon_threadsafe(self._abandon, call)
            remaining = remaining[WATCHED_AT_ONCE:]


class Sending(Enum):
    """The state of a call's ``Outbox``."""

    IDLE = "idle"  # the next response can be handed to a sender thread
    UNDER_WAY = "under way"  # a sender thread has a response
    DELAYED = "delayed"  # the next response waits for a timer


class Send(NamedTuple):
    """Hand ``response`` to a sender thread."""

    response: _Response
    final: bool  # the call's last response
    is_first: bool  # the call's first response


class Delay(NamedTuple):
    """Call ``due`` after ``seconds``. None: once an error may leave as gRPC status."""

    seconds: float | None


@dataclass(slots=True)
class Outbox:
    """A call's responses and the order in which they leave. It decides without I/O.

    Its methods return the next action. ``sequences``: the number of sequences whose last response
    has not been put yet; 0: the call has ended. ``error_as_status``: an error has to wait before it
    is sent.

    | state | event | next state | returns |
    | --- | --- | --- | --- |
    | idle | put | under way | Send |
    | under way or delayed | put | the same | nothing: the response is pending |
    | under way | sent, others are pending | under way | Send |
    | under way | sent, none is pending | idle | nothing |
    | under way | not sent | delayed | Delay, twice as long each time |
    | delayed | due | under way | Send |

    If the next response is an error that has to wait, the next state is ``delayed`` instead, once,
    and the method returns ``Delay``.
    """

    error_as_status: bool = False
    sequences: int = 1
    pending: collections.deque[_Response] = field(default_factory=collections.deque)
    state: Sending = Sending.IDLE
    has_begun: bool = False  # a response has been handed over
    retry_seconds: float = _RETRY_SECONDS.shortest

    def put(self, response: _Response, ends: int) -> Send | Delay | None:
        """Add the last response of ``ends`` sequences, or of none. The call must not have ended."""
        self.sequences -= ends
        self.pending.append(response)
        if self.state is Sending.IDLE:
            return self.due()
        return None

    def sent(self, ended_well: bool) -> Send | Delay | None:
        """Note that a sender thread is done. ``ended_well`` is False if Triton accepted no end."""
        if not ended_well:
            self.sequences = 0
            self.pending.clear()
            self.pending.append(_UNSENDABLE)
            self.state = Sending.DELAYED
            delay = Delay(self.retry_seconds)
            self.retry_seconds = _RETRY_SECONDS.after(self.retry_seconds)
            return delay
        if self.pending:
            return self.due()
        self.state = Sending.IDLE
        return None

    def due(self) -> Send | Delay:
        """Hand over the next response, or delay it if it is an error that has to wait."""
        if self.error_as_status and isinstance(self.pending[0], Exception):
            self.error_as_status = False
            self.state = Sending.DELAYED
            return Delay(None)
        self.state = Sending.UNDER_WAY
        response = self.pending.popleft()
        is_first = not self.has_begun
        self.has_begun = True
        return Send(response, not self.sequences and not self.pending, is_first)


class Call:
    """A Triton request and its answer. ``arrays``: the inputs, once they have been read.

    ``output_names``: the requested outputs, which are all if the caller named none.
    ``decoupled``: any number of responses may be sent; otherwise exactly one. ``send``, ``fail``,
    ``finish`` and ``ready`` are called on the event loop. The first three never wait.
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
        self._sender: Any = request.get_response_sender()
        self._senders = senders
        self.decoupled = decoupled
        self.output_names: frozenset[str] = frozenset(request.requested_output_names())
        self.client_id: str = request.request_id()
        # Clients may choose equal ids. This one is unique in the process, for the log.
        name = printable(self.client_id, MAX_ID) if self.client_id else "request"
        self.id = f"{name}-{next(self._numbers)}"
        self.arrays: Arrays = MappingProxyType({})
        self.parameters = "{}"  # the request's parameters, as JSON
        self.context = NO_CONTEXT  # if a pipeline's request makes the call
        self.sequence_id: int | str = 0  # Triton's id of a sequence of requests; 0: none
        # The event loop owns these:
        self.outbox = Outbox()
        self.cancel_cause: CancelCause | None = None  # why the server has cancelled the task
        self.is_abandoned = False  # the task was cancelled because nobody takes the answer
        self.may_be_stopped = False  # another request with its id may stop it
        self.is_stopped = False
        self.waiters: list[asyncio.Future[None]] = []  # tasks in ``ready`` during a send
        # The lock guards these:
        self._lock = threading.Lock()
        self._closed = False  # FINAL has been sent
        self._gone = False  # the caller has left, or cannot be sent to
        self._ask_after_send = False  # the watcher looked during a send

    def read(self, request: Any, model: str = "") -> None:
        """Copy the inputs of a request to ``model``. Called in Triton's thread."""
        self.parameters = request.parameters()
        self.sequence_id = request.correlation_id()
        if CONTEXT_PARAMETER in self.parameters:  # most requests have none
            self.context = context_of(model, json.loads(self.parameters))
        self.outbox.error_as_status = STATUS_PARAMETER in self.parameters
        self.arrays = MappingProxyType(
            {tensor.name(): _owned(tensor.as_numpy()) for tensor in request.inputs()}
        )

    def send(self, arrays: Arrays, final: bool = False) -> None:
        """Send one response. ``final`` marks the last one of a sequence.

        The call ends with its last sequence. Afterwards nothing is sent.
        """
        self._put(arrays, int(final))

    def fail(self, error: Exception) -> None:
        """End the call with an error, unless it has ended."""
        if self.outbox.sequences:
            self.arrays = MappingProxyType({})  # free the inputs: the error may have to wait
            self._put(error, self.outbox.sequences)

    def finish(self) -> None:
        """End the call, unless it has ended, without another response if the model is decoupled."""
        # A model that is not decoupled must send one response.
        self._put(None if self.decoupled else {}, self.outbox.sequences)

    def check_one_response(self, *, sequences: int, **request_fields: int) -> None:
        """Raise ``Unsupported`` if this call of a model that is not decoupled would need several
        responses.

        ``request_fields`` are two, under the names that the caller sent: first the flag for
        streaming, then the prompt with its number of rows.
        """
        (flag, streams), (prompt, rows) = request_fields.items()
        once = "this deployment is not decoupled and answers once per request"
        if streams:
            raise Unsupported(flag, f"true: {once}; send false, or deploy it decoupled")
        if rows > 1:
            raise Unsupported(prompt, f"{rows} rows: {once}; send one row")
        if sequences > 1:
            raise Unsupported("num_return_sequences", f"above 1: {once}; send several requests")

    def stop_namesakes(self, *, newest_only: bool = False) -> None:
        """Cancel the calls with this one's id that ``may_be_stopped``.

        Raises ``InvalidRequest`` if this call has no id.
        """
        if not self.client_id:
            raise InvalidRequest("stop", "needs the request id of the request that is to stop")
        namesakes = []
        for call in self._open_calls:
            if call.may_be_stopped and call.client_id == self.client_id:
                namesakes.append(call)
        if newest_only:
            namesakes = namesakes[-1:]
        for call in namesakes:
            call.may_be_stopped = False
            call.is_stopped = True
            if not call.is_abandoned:
                call.cancel_cause = CancelCause.CALLER_LEFT
                self._open_calls[call].cancel(call.cancel_cause.value)

    async def ready(self) -> None:
        """Return once everything has been sent and the next response would leave soon.

        A call's first response never waits for other calls. A later one waits for its turn, and the
        tokens that arrive meanwhile become part of it. Does not suspend if there is no wait.
        """
        has_room = self._senders.take_reports()
        is_idle = self.outbox.state is Sending.IDLE
        if is_idle and (not self.outbox.has_begun or has_room):
            return
        waiter = asyncio.get_running_loop().create_future()
        if is_idle:
            self._senders.turns.append(waiter)
        else:
            self.waiters.append(waiter)
        self._senders.take_reports()
        await waiter

    def _put(self, response: _Response, ends: int) -> None:
        if self.outbox.sequences:
            action = self.outbox.put(response, ends)
            self._senders.take_reports()
            self._senders.act(self, action)

    # --- in the watcher's thread ----------------------------------------------------------------

    def gone(self) -> bool:
        """Return True if nobody takes the answer: the caller has left, or cannot be sent to.

        During a send, the sender thread asks Triton instead, right after the response has left.
        Otherwise Triton would never be asked for a call that sends without a pause.
        """
        if not self._lock.acquire(blocking=False):
            self._ask_after_send = True
            return self._gone
        try:
            return self._gone or self._ask()
        finally:
            self._lock.release()

    def _ask(self) -> bool:
        """Ask Triton whether the caller has left. The lock must be held."""
        try:
            return not self._closed and bool(self._sender.is_cancelled())
        except Exception as error:  # the watcher goes on, whatever Triton raises
            log.warning("%s: cannot ask for its caller: %s", self.id, error)
            return False

    # --- in a sender thread ---------------------------------------------------------------------

    def deliver(self, response: _Response, final: bool) -> bool:
        """Send one response, or an end in its place if Triton does not accept it.

        Returns False if Triton accepted no end either. The call is still open then.
        """
        with self._lock:
            if self._closed:  # an error took the place of an earlier response
                return True
            if not self._try_send(response, final):
                self._gone = True  # the watcher cancels the work, and retries are not logged
                bare_end: _Response = None if self.decoupled else {}
                return self._try_send(_UNSENDABLE, True) or self._try_send(bare_end, True)
            if self._ask_after_send:
                self._ask_after_send = False
                self._gone = self._gone or self._ask()
            return True

    def _try_send(self, response: _Response, final: bool) -> bool:
        """Send a response. Returns False if Triton does not accept it."""
        flags = _FINAL_FLAG if final else 0
        pb = self._pb
        try:
            if response is None:
                self._sender.send(flags=flags)
            elif isinstance(response, Exception):
                error = as_triton_error(pb, response, self.id)
                self._sender.send(pb.InferenceResponse([], error=error), flags=flags)
            else:
                outputs = []
                for name, array in response.items():
                    if name in self.output_names:  # Triton 24.10 crashes on any other output
                        outputs.append(pb.Tensor(name, array))
                self._sender.send(pb.InferenceResponse(outputs), flags=flags)
        except Exception as raised:  # Triton raises types of its own
            if not self._gone:
                log.error("%s: a response could not be sent: %s", self.id, raised)
            return False
        if final:
            self._closed = True
            # The traceback of an error may hold this call for ever. A process that frees a sender
            # after ``finalize`` crashes, since its memory shared with the server is gone by then.
            self._sender = None
        return True


class SenderThreads:
    """Threads that send responses, and the turns in which calls make their responses.

    ``threads``: their number. All methods but ``_run`` are called on ``loop``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int,
        before_error_status: BeforeErrorStatus | None = None,
    ) -> None:
        self._loop = loop
        self._before_error_status = before_error_status
        self._delayed: dict[Call, asyncio.Task[None]] = {}  # the timer of each delayed call
        self._closing = False
        self._max_under_way = MAX_QUEUED + threads
        self._under_way = 0
        # The waiters for a time with fewer responses under way, in order.
        self.turns: collections.deque[asyncio.Future[None]] = collections.deque()
        self.responses = 0  # handed over so far, without errors; any thread may read it
        # The responses to send. A call's first response leaves before any later ones. ``_work`` has
        # one ``True`` for each item of both, and one ``False`` to end each thread.
        self._first_sends: collections.deque[tuple[Call, Send]] = collections.deque()
        self._later_sends: collections.deque[tuple[Call, Send]] = collections.deque()
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # The outcomes of sends, and True while the loop has a wake-up to take them.
        self._reports: collections.deque[tuple[Call, bool]] = collections.deque()
        self._waking = False
        self.threads = []
        for number in range(threads):
            thread = threading.Thread(target=self._run, name=f"sender-{number}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def act(self, call: Call, action: Send | Delay | None) -> None:
        """Execute the action that a call's ``Outbox`` returned."""
        if isinstance(action, Send):
            self._under_way += 1
            self.responses += isinstance(action.response, Mapping)
            if action.is_first:
                self._first_sends.append((call, action))
            else:
                self._later_sends.append((call, action))
            self._work.put(True)
        elif action is not None:
            self.delay(call, action.seconds)

    def delay(self, call: Call, seconds: float | None) -> None:
        """Start the timer of a ``Delay``. ``close`` sends delayed responses at once."""
        if not self._closing:
            self._delayed[call] = self._loop.create_task(self._delay(call, seconds))
        elif seconds is None:
            self.act(call, call.outbox.due())

    async def _delay(self, call: Call, seconds: float | None) -> None:
        if seconds is None:
            seconds = ERROR_AS_STATUS_SECONDS
            try:
                if self._before_error_status is not None:
                    await self._before_error_status()
                    seconds = 0
            except Exception as error:  # the error must leave in any case
                log.info("%s: its error is held for a while: %s", call.id, error)
        await asyncio.sleep(seconds)
        del self._delayed[call]
        self.act(call, call.outbox.due())

    def take_reports(self) -> bool:
        """Note the outcomes of sends, and give turns to waiting calls.

        Returns True if a response would leave soon, and no other call waits for its turn.
        """
        # Cleared before the reports are read: a thread that saw it set has added its report.
        self._waking = False
        while self._reports:
            call, ended_well = self._reports.popleft()
            self._under_way -= 1
            self.act(call, call.outbox.sent(ended_well))
            if call.waiters and call.outbox.state is Sending.IDLE:
                self.turns.extend(call.waiters)
                call.waiters.clear()
        if self.turns:
            self._give_turns()
        return not self.turns and self._under_way < self._max_under_way

    def _give_turns(self) -> None:
        room = self._max_under_way - self._under_way
        while self.turns and room > 0:
            waiter = self.turns.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1
        if self.turns and self._under_way < self._max_under_way:
            # A task that has its turn may have been cancelled, or have nothing to send. No send
            # would then give its turn to the next one, so look again once those tasks have run.
            self._loop.call_soon(self._give_turns)

    async def close(self) -> None:
        """Send all pending responses, try delayed ones once, and end the threads.

        No call may get another response meanwhile.
        """
        await self._wait_for_sends()
        self._closing = True
        delayed = self._delayed
        for call, task in delayed.items():
            task.cancel()
            self.act(call, call.outbox.due())
        await asyncio.gather(*delayed.values(), return_exceptions=True)
        await self._wait_for_sends()
        for _ in self.threads:
            self._work.put(False)
        for thread in self.threads:
            thread.join()

    async def _wait_for_sends(self) -> None:
        while self._under_way:
            waiter = self._loop.create_future()
            self.turns.append(waiter)
            self.take_reports()
            await waiter

    def _run(self) -> None:
        while self._work.get():
            try:
                call, action = self._first_sends.popleft()
            except IndexError:
                call, action = self._later_sends.popleft()
            ended_well = call.deliver(action.response, action.final)
            # An error refers to its request, and the next ``get`` may wait for long.
            del action
            self._reports.append((call, ended_well))
            outbox = call.outbox
            has_waiter = call.waiters or outbox.pending or not outbox.sequences or self.turns
            if (has_waiter or not ended_well) and not self._waking:
                self._waking = True  # the loop takes all reports at once when it wakes
                self._loop.call_soon_threadsafe(self.take_reports)


def _owned(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that owns its memory. Triton may free the memory of an input at any time.

    An array that owns its memory already is not copied: numpy releases the GIL for every copy,
    however small, and the thread then waits to get it back.
    """
    owner = array if array.base is None else array.base
    if isinstance(owner, np.ndarray) and owner.flags.owndata:
        return array
    return np.array(array)


def as_triton_error(pb_utils: Any, error: Exception, call_id: str) -> Any:
    """Return the error that the caller gets. An error that is not this package's gets a new text.

    The text of an unexpected error may contain paths, so only the log has it.
    """
    if not isinstance(error, TrtllmBlsError):
        error = unexpected(error, call_id)
    return pb_utils.TritonError(to_wire(error), getattr(pb_utils.TritonError, error.status))
