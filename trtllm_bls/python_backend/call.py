"""One Triton request and what is sent to it; the package says which rules of sending are kept."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtllm_bls.errors import EngineUnavailable, TrtllmBlsError, printable, to_wire
from trtllm_bls.python_backend.sender_threads import SenderThreads

MAX_ID = 128  # characters of a client's id in a log line
_FINAL = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# A client can ask for errors as gRPC status, with metadata that ``serve`` has Triton pass on as a
# parameter. Triton 24.10 then closes the stream where the error arrives, and ends with SIGSEGV if
# its thread that handed the request over has not gone back to reading the stream, which takes
# microseconds, or as long as other threads keep it from a core. Nobody tells when it has.
STATUS_ASKED, ERROR_AS_STATUS_SECONDS = '"triton_grpc_error"', 1.0  # after the request came
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 5.0  # where every send fails; doubled

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
# A response, whether it is the last, and when it may leave at the earliest (0: at once).
_Queued: TypeAlias = tuple[Callable[[], Any] | None, bool, float]

log = logging.getLogger(__name__)


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
        self._queue: collections.deque[_Queued] = collections.deque()
        self._sending = False
        self._begun = False  # its first response is queued
        self._ended = False  # the last response is queued
        self._asked = False  # whether the caller is gone, while a response was being sent
        self._found_gone = False
        self._error_at = 0.0
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._failure_told = False
        self._waiters: list[asyncio.Future[None]] = []
        self.on_broken: Callable[[Call], object] = bool  # called when a response cannot be sent
        self.sequences = 1  # that have not ended
        self.abandoned = False  # nobody takes its answer any more
        self.client_id: str = request.request_id()
        # Unique in this process, whatever ids clients choose; it names the call in log lines.
        self.id = f"{printable(self.client_id, MAX_ID) or 'request'}-{next(self._numbers)}"
        self.arrays: Arrays = MappingProxyType({})
        self.parameters = "{}"  # of the request, as JSON

    def read(self, request: Any) -> None:
        """Take the inputs."""
        self.parameters = request.parameters()
        if STATUS_ASKED in self.parameters:
            self._error_at = time.monotonic() + ERROR_AS_STATUS_SECONDS
        self.arrays = MappingProxyType(
            {tensor.name(): _owned(tensor.as_numpy()) for tensor in request.inputs()}
        )

    def send(self, arrays: Arrays, final: bool = False) -> None:
        """Send one response; with ``final`` it is the last of its sequence, and the call ends with
        the last of ``sequences``. Ignored once the call has ended."""
        self.sequences -= final
        self._put(lambda: self._response(arrays), self.sequences == 0)

    def fail(self, error: Exception) -> None:
        """End the call with an error; ignored once it has ended."""
        self.arrays = MappingProxyType({})  # the error may have to wait
        self._put(lambda: self._error(error), final=True, at=self._error_at)

    def finish(self) -> None:
        """End the call without another response if that is allowed; ignored once it has ended."""
        self._put(self._bare_end(), final=True)

    def is_ready(self) -> bool:
        """Whether ``ready`` would not suspend."""
        return not self._sending and (not self._begun or self._senders.has_room())

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

    def _response(self, arrays: Arrays) -> Any:
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

    def _put(self, response: Callable[[], Any] | None, final: bool, at: float = 0.0) -> None:
        if self._ended:
            return
        first, self._begun, self._ended = not self._begun, True, final
        with self._queue_lock:
            self._queue.append((response, final, at))
            if self._sending:
                return
            self._sending = True
        self._senders.work_on(self, urgent=first)

    # --- in a sender thread -------------------------------------------------------------------

    def send_queued(self) -> list[asyncio.Future[None]]:
        """Send all that is queued; who waits for that."""
        while True:
            with self._queue_lock:
                if not self._queue:
                    self._sending = False
                    waiters, self._waiters = self._waiters, []
                    return waiters
                response, final, at = self._queue.popleft()
            if at and (seconds := at - time.monotonic()) > 0:
                self._put_back(response, seconds)
                return []
            if not self._send(response, final):
                self._put_back(self._unsendable, self._retry_seconds)
                self._retry_seconds = min(2 * self._retry_seconds, _LONGEST_RETRY_SECONDS)
                return []

    def _put_back(self, response: Callable[[], Any] | None, seconds: float) -> None:
        """Send the end of the call later, or when the threads end."""
        with self._queue_lock:
            self._queue.appendleft((response, True, 0.0))
        self._senders.later(seconds, self)

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
        self.on_broken(self)
        return self._closed

    def _try(self, response: Callable[[], Any] | None, final: bool) -> bool:
        try:
            flags = _FINAL if final else 0
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response(), flags=flags)
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


def _owned(array: NDArray[Any]) -> NDArray[Any]:
    """The array, copied where its memory is Triton's, which may free it any time.

    numpy lets go of the interpreter's lock for every copy, however small.
    """
    owner = array if array.base is None else array.base
    owned = isinstance(owner, np.ndarray) and owner.flags.owndata
    return array if owned else np.array(array)


def as_triton_error(pb_utils: Any, error: Exception, call_id: str) -> Any:
    """A failure as its caller sees it: our own errors as they are, of others only the kind."""
    if not isinstance(error, TrtllmBlsError):
        log.error("%s: unexpected error", call_id, exc_info=error)
        kind = type(error).__name__
        error = TrtllmBlsError(f"unexpected {kind}; the server's log tells more under {call_id}")
    return pb_utils.TritonError(to_wire(error), getattr(pb_utils.TritonError, error.status))
