"""What every decoupled ``model.py`` does with Triton's requests: answer each exactly once.

One event loop in a thread of its own runs one task per request; one watcher thread asks Triton
which callers have gone and cancels their tasks. The rules a sender must obey (docs/architecture.md
names the defects behind them) are kept here and nowhere else:

- every request ends in exactly one FINAL, on every path;
- an error is the last thing sent and carries FINAL in the same send;
- only outputs the caller asked for are sent;
- nobody asks ``is_cancelled`` of a sender that has been closed: both are done under one lock.

``pb_utils`` comes in as an argument, so the door opens on a fake in tests. Knows nothing of text,
tokens or engines.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from trtllm_bls.errors import EngineUnavailable, TrtllmBlsError, to_wire
from trtllm_bls.messages import Array

WATCH_SECONDS = 0.05  # how often callers are asked whether they are still there
_FINAL = 1  # pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

log = logging.getLogger(__name__)


class Call:
    """One Triton request and its answer; ``arrays`` are its inputs, once they have been read.

    ``wanted``: the outputs asked for, which are all if the caller named none.
    """

    _numbers = itertools.count(1)

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()
        self.wanted: frozenset[str] = frozenset(request.requested_output_names())
        self._lock = threading.Lock()
        self._closed = False
        self.client_id: str = request.request_id()
        # Unique in this process, whatever ids clients choose; it names the call in log lines.
        self.id = f"{self.client_id or 'request'}-{next(self._numbers)}"
        self.arrays: Mapping[str, Array] = MappingProxyType({})

    def read(self, request: Any) -> None:
        """Copy the inputs: Triton may free its own any time."""
        self.arrays = MappingProxyType(
            {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
        )

    def send(self, arrays: Mapping[str, Array], final: bool = False) -> None:
        """Send one response; with ``final`` it is the last. Ignored once the call has ended."""
        tensors = [
            self._pb.Tensor(name, array) for name, array in arrays.items() if name in self.wanted
        ]
        self._send(self._pb.InferenceResponse(tensors), final)

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        failure = as_triton_error(self._pb, error, self.id)
        self._send(self._pb.InferenceResponse([], error=failure), final=True)

    def finish(self) -> None:
        """End the call without another response; does nothing if it has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sender.send(flags=_FINAL)

    def gone(self) -> bool:
        """Whether the caller no longer waits. The only place that may ask Triton."""
        with self._lock:
            if self._closed:
                return False
            try:
                return bool(self._sender.is_cancelled())
            except Exception as error:  # whatever Triton raises, the watch goes on
                log.warning("%s: cannot ask for its caller: %s", self.id, error)
                return False

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if not self._closed:
                self._closed = final
                self._sender.send(response, flags=_FINAL if final else 0)


class Door:
    """Runs ``handle(call)`` for every request, all at once, until closed."""

    def __init__(self, pb_utils: Any, handle: Callable[[Call], Awaitable[None]]) -> None:
        self._pb = pb_utils
        self._handle = handle
        self._open: dict[asyncio.Task[None], Call] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="door-loop", daemon=True),
            threading.Thread(target=self._watch, name="door-watch", daemon=True),
        ]
        # What loading made stays for good: a full collection would look through all of it and hold
        # every stream for tens of milliseconds.
        gc.collect()
        gc.freeze()
        for thread in self._threads:
            thread.start()

    def accept(self, requests: Iterable[Any]) -> None:
        """Take requests from Triton's ``execute``; returns at once."""
        for request in requests:
            call = Call(self._pb, request)
            try:
                call.read(request)
            except Exception as error:  # raised to Triton, it would answer the whole batch twice
                call.fail(error)
            else:
                self._loop.call_soon_threadsafe(self._start, call)

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End every call still open with an error, run ``finish``, then end the threads."""
        self._closing.set()
        self._run(self._cancel_all())
        self._run(finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start(self, call: Call) -> None:
        task = self._loop.create_task(self._answer(call))
        self._open[task] = call
        task.add_done_callback(self._open.pop)

    async def _answer(self, call: Call) -> None:
        try:
            await self._handle(call)
        except asyncio.CancelledError:
            if call.gone():
                log.info("%s: cancelled by its caller", call.id)
            else:  # a silent end would look like a whole answer
                call.fail(EngineUnavailable("the server is shutting down"))
        except Exception as error:
            if isinstance(error, TrtllmBlsError):
                log.info("%s: refused or failed: %s", call.id, to_wire(error))
            call.fail(error)
        finally:
            call.finish()

    async def _cancel_all(self) -> None:
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            # copy() is atomic under the GIL; a call that ends meanwhile says "not gone".
            for task, call in self._open.copy().items():
                if call.gone():
                    self._loop.call_soon_threadsafe(task.cancel)


def answer_each(
    pb_utils: Any,
    requests: Iterable[Any],
    answer: Callable[[Mapping[str, Array]], Mapping[str, Array]],
) -> list[Any]:
    """One response per request of a model that is not decoupled; a failure is its own answer."""
    return [_answered(pb_utils, request, answer) for request in requests]


def _answered(
    pb_utils: Any, request: Any, answer: Callable[[Mapping[str, Array]], Mapping[str, Array]]
) -> Any:
    try:
        arrays = answer({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
    except Exception as error:
        failure = as_triton_error(pb_utils, error, request.request_id() or "request")
        return pb_utils.InferenceResponse([], error=failure)
    wanted = request.requested_output_names()
    tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in wanted]
    return pb_utils.InferenceResponse(tensors)


def as_triton_error(pb_utils: Any, error: Exception, call_id: str) -> Any:
    """What a caller is told of a failure: our own errors as they are, of others only the kind."""
    if not isinstance(error, TrtllmBlsError):
        log.error("%s: unexpected error", call_id, exc_info=error)
        kind = type(error).__name__
        error = TrtllmBlsError(f"unexpected {kind}; the server's log tells more under {call_id}")
    return pb_utils.TritonError(to_wire(error), getattr(pb_utils.TritonError, error.status))


class TritonLogHandler(logging.Handler):
    """Sends the package's log records to Triton's log, level kept."""

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        super().__init__()
        self._logger = pb_utils.Logger
        self._model_name = model_name

    def emit(self, record: logging.LogRecord) -> None:
        text = f"[{self._model_name}] {self.format(record)}"
        if record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)


def log_to_triton(pb_utils: Any, model_name: str) -> None:
    """Route this package's logging to Triton; called by each model's ``initialize``."""
    logger = logging.getLogger("trtllm_bls")
    logger.handlers = [TritonLogHandler(pb_utils, model_name)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
