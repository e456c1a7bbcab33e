"""An engine reached through Triton's BLS API (``pb_utils.InferenceRequest``), without a socket.

The decoupled BLS API of Triton 24.10 has defects that this module works around as far as can be
(docs/design.md lists them): iterators are kept for a while after their end, always drained,
and never trusted to deliver a mid-stream error, which is what the stall timer is for. A child is
cancelled by a ``stop`` request with its id. What remains cannot be mended from here, so ``auto``
prefers gRPC.

Iterators block, so each request has a thread that reads it into the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from trtllm_bls.engines.base import ChunkStream, GeneratedChunks
from trtllm_bls.errors import EngineError, EngineStalled, from_wire
from trtllm_bls.types import Array, EngineCapacity, EngineChunk, EngineRequest
from trtllm_bls.wire.engine_client import DeployedModel, ResponseReader, request_inputs, wire_id

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

_STOP_TRIES = 5
_STOP_WAIT_SECONDS = 0.5
# A reader that gets a response holds a lock of Triton's while it waits for the interpreter's; if
# the next response of that stream comes meanwhile, the process may stop for good. So nobody who has
# just read goes on holding the interpreter's lock.
_GIVE_WAY_SECONDS = 0.0001
_KEEP_SECONDS = 2.0  # how long a finished iterator must stay referenced (triton 24.10: segfault)

log = logging.getLogger(__name__)


class BlsEngine:
    """The ``tensorrt_llm`` model named ``name`` in this very server."""

    def __init__(
        self, pb_utils: Any, name: str, model: DeployedModel, vocab_size: int, threads: int
    ) -> None:
        self.name = name
        self.stall_seconds = 0.0
        self._pb = pb_utils
        self._model = model
        self._vocab = vocab_size
        # Two pools: a stop must not wait behind the very streams that it would end.
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix=f"bls-{name}")
        self._stoppers = ThreadPoolExecutor(threads, thread_name_prefix=f"bls-stop-{name}")
        self._ended: collections.deque[tuple[float, Any]] = collections.deque()
        self._ended_lock = threading.Lock()

    async def capacity(self) -> EngineCapacity:
        """What the model's parameters tell, where they are known."""
        return self._model.capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        return GeneratedChunks(self._chunks(request))

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        inputs = {
            name: array for name, _, array in request_inputs(request, self._model, self._vocab)
        }
        outputs, request_id = self._model.outputs_for(request), wire_id(request)
        responses = ResponseReader(request, self._model)
        items: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        trace = request.traceparent
        more: dict[str, Any] = {"parameters": {"traceparent": trace}} if trace else {}
        reading = self._readers.submit(self._read, request_id, inputs, outputs, put, more)
        over = begun = False
        try:
            # The API loses errors in the middle of a stream, so there silence must be taken for
            # one. A first response may take any time: the request may be queued, or be answered
            # whole.
            while (item := await _next(items, self.stall_seconds if begun else 0)) is not _END:
                if item is _SILENCE:
                    raise EngineStalled(f"{self.name} sent nothing for {self.stall_seconds:g} s")
                begun = request.streaming
                if isinstance(item, Exception):
                    over = True  # an error is the last thing a child sends
                    raise item
                for chunk in responses.chunks(item, last=self._is_last(request, item)):
                    yield chunk
            over = True
            for chunk in responses.rest():
                yield chunk
        finally:
            if not over and not reading.done() and not reading.cancel():
                self._stoppers.submit(self._stop, request_id, reading)

    async def close(self) -> None:
        """Let the threads end; the server is going down and ends every child itself."""
        for pool in (self._readers, self._stoppers):
            pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _is_last(request: EngineRequest, arrays: Mapping[str, Array]) -> bool:
        # The API does not pass Triton's final flag on; a whole non-streaming answer is the last.
        return not request.streaming and request.num_return_sequences == 1

    # --- in threads of the pool -------------------------------------------------------------

    def _read(
        self,
        request_id: str,
        inputs: Mapping[str, Array],
        outputs: list[str],
        put: Callable[[Any], None],
        more: Mapping[str, Any],
    ) -> None:
        count = 0
        try:
            for response in self._responses(request_id, inputs, outputs, **more):
                count += 1
                put(response)
                time.sleep(_GIVE_WAY_SECONDS)
            put(_END if count else EngineError(f"{self.name} ended without any response"))
        except Exception as error:  # Triton raises its own types here; the reader must see it
            put(EngineError(f"{self.name}: {error}"))

    def _stop(self, request_id: str, reading: Future[None]) -> None:
        """Ask the engine to end the child, again if the child had not begun yet, until it ends."""
        inputs: dict[str, Array] = {
            "input_ids": np.zeros((1, 1), dtype=np.int32),
            "input_lengths": np.zeros((1, 1), dtype=np.int32),
            "request_output_len": np.zeros((1, 1), dtype=np.int32),
            "stop": np.ones((1, 1), dtype=np.bool_),
        }
        for _ in range(_STOP_TRIES):
            try:
                collections.deque(self._responses(request_id, inputs, []), maxlen=0)
            except Exception:  # as in _read
                log.exception("stop of %s failed", request_id)
            if wait([reading], timeout=_STOP_WAIT_SECONDS).done:
                return
        log.warning("%s: %s did not end after %d stops", request_id, self.name, _STOP_TRIES)

    def _responses(
        self, request_id: str, inputs: Mapping[str, Array], outputs: list[str], **more: Any
    ) -> Iterator[Mapping[str, Array] | Exception]:
        """Every response of one request as arrays, or as the error it is."""
        tensors = [self._pb.Tensor(name, array) for name, array in inputs.items()]
        iterator = self._pb.InferenceRequest(
            model_name=self.name,
            request_id=request_id,
            requested_output_names=outputs,
            inputs=tensors,
            **more,
        ).exec(decoupled=True)
        try:
            for response in iterator:
                yield self._arrays(response)
        finally:
            self._keep(iterator)

    def _arrays(self, response: Any) -> Mapping[str, Array] | Exception:
        if response.has_error():
            return from_wire(response.error().message())
        return {t.name(): np.array(t.as_numpy()) for t in response.output_tensors()}

    def _keep(self, iterator: Any) -> None:
        now = time.monotonic()
        with self._ended_lock:
            self._ended.append((now, iterator))
            while self._ended[0][0] < now - _KEEP_SECONDS:
                self._ended.popleft()


_END = object()
_SILENCE = object()


async def _next(items: asyncio.Queue[Any], seconds: float) -> Any:
    """The next item, or ``_SILENCE`` if none comes within ``seconds`` (0 = however long)."""
    try:
        async with timeout(seconds or None):
            return await items.get()
    except asyncio.TimeoutError:
        return _SILENCE
