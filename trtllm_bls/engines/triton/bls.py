"""An engine reached through Triton's BLS API (``pb_utils.InferenceRequest``), without a socket.

It is for deployments whose server has no gRPC port: the decoupled BLS API of Triton 24.10 has
defects that can only be worked around in part (docs/design.md lists them). Response iterators
are kept for a while after their end, always drained, and never trusted to deliver an error in
mid-stream, which is what the stall timer is for. A child request is cancelled by a ``stop`` request
with its id.

Iterators block, so each request has a thread that reads its iterator into the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.errors import EngineError, EngineStalled, from_wire
from trtllm_bls.types import Array, EngineCapacity, EngineRequest
from trtllm_bls.wire.engine_client import DeployedModel, ResponseReader, request_inputs, wire_id

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

_STOP_TRIES = 5
_STOP_WAIT_SECONDS = 0.5
# A reader that gets a response holds a lock of Triton's while it waits for the interpreter's. If
# the next response of that stream comes meanwhile, the process may stop for good. So a thread gives
# the interpreter's lock up for this long after each read.
_GIVE_WAY_SECONDS = 0.0001
_KEEP_SECONDS = 2.0  # how long a finished iterator must stay referenced (triton 24.10: segfault)

log = logging.getLogger(__name__)


class BlsEngine:
    """The ``tensorrt_llm`` model named ``name`` in this very server.

    What the model declares is read in ``repository``, the model repository on disk, as the BLS API
    cannot tell. ``vocab_size`` is the length of a dense embedding bias; ``threads`` is the most
    requests at one time. A stream that has begun and is silent for ``stall_seconds`` (0 = never)
    fails.
    """

    def __init__(
        self,
        pb_utils: Any,
        name: str,
        repository: Path | None,
        vocab_size: int,
        threads: int,
        stall_seconds: float = 0,
    ) -> None:
        self.name = name
        self._pb = pb_utils
        self._repository = repository
        self._vocab = vocab_size
        self._stall_seconds = stall_seconds
        # Two pools: a stop must not wait behind the very streams that it would end.
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix=f"bls-{name}")
        self._stoppers = ThreadPoolExecutor(threads, thread_name_prefix=f"bls-stop-{name}")
        self._ended: collections.deque[tuple[float, Any]] = collections.deque()
        self._ended_lock = threading.Lock()

    async def capacity(self) -> EngineCapacity:
        """What the parameters of the model's configuration tell. Raises ``EngineError``."""
        return self._model.capacity

    @cached_property
    def _model(self) -> DeployedModel:
        return _declared(self._repository, self.name)

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        if not self._model.decoupled:
            request = self._model.in_one_piece(request)
        return TaskChunks(partial(self._answer, request))

    async def _answer(self, request: EngineRequest, chunks: QueuedChunks) -> None:
        """Fill ``chunks``; cancelling it ends the child."""
        inputs = {
            name: array for name, _, array in request_inputs(request, self._model, self._vocab)
        }
        outputs, request_id = self._model.outputs_for(request), wire_id(request)
        responses = ResponseReader(request, self._model)
        # The API does not pass Triton's final flag on; a whole non-streaming answer is the last.
        in_one_piece = not request.streaming and request.num_return_sequences == 1
        items: asyncio.Queue[Any] = asyncio.Queue()  # arrays, an error, or None at the end
        loop = asyncio.get_running_loop()

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        trace = request.traceparent
        more: dict[str, Any] = {"parameters": {"traceparent": trace}} if trace else {}
        reading = self._readers.submit(self._read, request_id, inputs, outputs, put, more)
        # The API loses errors in mid-stream, so silence there is taken for one. The first response
        # may take any time: the request may be queued, or be answered in one piece.
        longest_silence: float | None = None
        over = False
        try:
            while not over:
                async with timeout(longest_silence):
                    item = await items.get()
                over = item is None or isinstance(item, Exception)
                if isinstance(item, Exception):
                    raise item
                chunks.put(responses.rest() if over else responses.chunks(item, in_one_piece))
                if request.streaming:
                    longest_silence = self._stall_seconds or None
        except asyncio.TimeoutError:
            problem = f"{self.name} sent nothing for {self._stall_seconds:g} s"
            raise EngineStalled(problem) from None
        finally:
            if not over and not reading.done() and not reading.cancel():
                self._stoppers.submit(self._stop, request_id, reading)

    async def close(self) -> None:
        """Let the threads end; the server is going down and ends every child itself."""
        for pool in (self._readers, self._stoppers):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- in threads of the pools --------------------------------------------------------------

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
            put(None if count else EngineError(f"{self.name} ended without any response"))
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


def _declared(repository: Path | None, name: str) -> DeployedModel:
    """What the model's configuration file declares; TensorRT-LLM's last form if there is none."""
    path = repository / name / "config.pbtxt" if repository else None
    if path is None or not path.is_file():
        log.warning("%s: its config.pbtxt is not there; the last release's tensors assumed", name)
        return DeployedModel()
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise EngineError(f"{name}: its config.pbtxt cannot be read: {error}") from error
    return DeployedModel.of(config)
