"""The embedded engine: one thread that runs steps, and the streams of its callers.

Owns the thread, the queue limit and delivery (one wake-up per step and event loop, however many
tokens the step made); what a step computes is the batcher's business.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial

import numpy as np
import torch

from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.engines.embedded.batcher import Batcher, Event, Sequence, Submission
from trtllm_bls.engines.embedded.guides import GUIDE, GUIDE_TYPE, Guides
from trtllm_bls.engines.embedded.model import load
from trtllm_bls.engines.request_checks import check_request
from trtllm_bls.errors import EngineUnavailable, Overloaded, Unsupported
from trtllm_bls.parameters import EngineParameters
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest

_QUEUE_SIZE = 1024  # where the parameter leaves it to the engine

_log = logging.getLogger(__name__)


class EmbeddedEngine:
    """Runs a Hugging Face decoder-only checkpoint, many requests at once.

    Loading takes seconds and raises ``CheckpointError`` or ``SettingsError``. Implements
    ``trtllm_bls.engines.base.Engine``; as a context manager it closes itself.
    """

    def __init__(
        self, parameters: EngineParameters, name: str = "embedded", device: str | None = None
    ) -> None:
        self.name = name
        self._queue_size = parameters.max_queue_size or _QUEUE_SIZE
        self._most = parameters.max_batch + self._queue_size
        self._runner = load(parameters, device)
        self._capacity = EngineCapacity(
            vocab_size=self._runner.vocab_size,
            max_sequence_tokens=self._runner.slots.length,
            max_draft_tokens=parameters.max_draft_len,
        )
        self._guides = Guides(
            parameters.model_dir, self._runner.vocab_size, parameters.guide_compile_seconds
        )
        self._batcher = Batcher(self._runner, parameters.max_tokens_per_step)
        self._closing = False
        self._changed = threading.Condition()  # of closing, or of what the batcher has to do
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    async def capacity(self) -> EngineCapacity:
        """Known since the load."""
        return self._capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``. May be called on several event loops."""
        return TaskChunks(partial(self._answer, request))

    async def _answer(self, request: EngineRequest, chunks: QueuedChunks) -> None:
        """Fill ``chunks``; cancelling it cancels the request."""
        check_request(request, self._capacity)
        for name, array in request.extras.items():
            if np.size(array) and name not in (GUIDE, GUIDE_TYPE):
                raise Unsupported(name, "this engine cannot honour it")
        wanted, length = len(request.input_ids) + request.max_tokens, self._runner.slots.length
        if wanted > length:
            note = "%s: prompt and completion of %d tokens are cut to %d"
            _log.warning(note, request.request_id, wanted, length)
        guide = None
        if request.extras:
            guide = await self._guides.of(request)
        submission = Submission(request.num_return_sequences, chunks, asyncio.get_running_loop())
        sequences = [
            Sequence(request, index, self._capacity, submission, guide and guide.copy())
            for index in range(request.num_return_sequences)
        ]
        self._add(sequences)
        try:
            await submission.ended.wait()
        finally:
            submission.cancelled = True

    def _add(self, sequences: list[Sequence]) -> None:
        with self._changed:
            if self._closing:
                raise EngineUnavailable("the engine is closed")
            if self._batcher.num_present + len(sequences) > self._most:
                raise Overloaded(
                    f"Maximum queue size of {self._queue_size} is reached; try again later"
                )
            self._batcher.add(sequences)
            self._changed.notify()

    async def close(self) -> None:
        """``shutdown`` without blocking the loop."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End what runs with an ``EngineError`` and free the model. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._guides.close()

    def __enter__(self) -> EmbeddedEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        """The engine's thread: a step after the other while there is work."""
        torch.set_num_threads(self._runner.threads)  # torch keeps it per thread
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._batcher.num_present)
                if self._closing:
                    break
            try:
                self._batcher.step()
            except Exception:  # a mistake of ours; the engine lives on
                _log.exception("a step failed outside the model")
                self._batcher.fail_all("the engine's scheduler failed")
            self._deliver()
        self._batcher.fail_all("the engine was closed")
        self._deliver()
        self._runner.close()

    def _deliver(self) -> None:
        """Hand the step's events over, one wake-up per event loop."""
        events, self._batcher.events = self._batcher.events, []
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Submission, Event]]] = {}
        for owner, event in events:
            loops.setdefault(owner.loop, []).append((owner, event))
        for loop, batch in loops.items():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # the loop is closed: nobody will read
                for owner, _ in batch:
                    owner.cancelled = True


def _put(batch: list[tuple[Submission, Event]]) -> None:
    """Hand events to their readers, on their loop."""
    for owner, event in batch:
        if isinstance(event, EngineChunk):
            owner.chunks.put([event])
            owner.unfinished -= event.final
        else:
            owner.chunks.fail(event)
            owner.unfinished = 0
        if not owner.unfinished:
            owner.ended.set()
