"""The ``tensorrt_llm`` model: any ``Engine`` served with TensorRT-LLM's own tensors.

The engine generates tokens. This module does the rest: batch rows, the prompt in front of
non-streaming output, stop requests by request id, and the flag of the last response. It publishes
the engine's steps and requests on Triton's ``/metrics``, under the C++ backend's names, and the
engine's longest sequence in the status directory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from trtllm_bls.engines.base import Engine, join_chunks
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.orchestrator.orchestrator import run_rows
from trtllm_bls.orchestrator.reports import Metric, TritonMetrics
from trtllm_bls.orchestrator.status import (
    ENGINE_REQUESTS,
    ENGINE_STEPS,
    REQUESTS_LABEL,
    STEPS_LABEL,
    StatusDirectory,
)
from trtllm_bls.settings.parameters import STATUS_DIR
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.triton.request_server import Call
from trtllm_bls.triton.tensors import ChunkWriter, engine_requests, is_stop, traceparent_of
from trtllm_bls.types import EngineChunk, EngineRequest

EVERY_SECONDS = 1.0  # between two reports of figures; each is a round trip to the server

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineService:
    """Answers calls with ``engine``. ``exclude_input``: the model's default for that option.

    ``limits``: the sizes that a request may have. ``expose_kv_cache_metrics``: report the part of a
    prompt that was in the KV cache already.
    """

    engine: Engine
    exclude_input: bool
    limits: RequestLimits = field(default_factory=RequestLimits)
    expose_kv_cache_metrics: bool = False
    _chunks: int = field(default=0, init=False)
    _running_rows: int = field(default=0, init=False)
    _scheduled_rows: int = field(default=0, init=False)  # running rows that have a token

    def figures(self) -> dict[str, int]:
        """Return the numbers of steps, scheduled requests and waiting ones, as TensorRT-LLM names
        them. Any thread may call it."""
        scheduled = self._scheduled_rows
        waiting = max(self._running_rows - scheduled, 0)
        return {STEPS_LABEL[1]: self._chunks, "scheduled": scheduled, "waiting": waiting}

    async def handle(self, call: Call) -> None:
        """Answer one call: a request, or a stop request for another."""
        if is_stop(call.arrays):
            call.stop_namesakes(newest_only=True)  # like upstream's model
            return
        sequences: list[_SequenceResponses] = []
        call.may_be_stopped = True
        try:
            await self._answer(call, sequences)
        except asyncio.CancelledError:
            if not call.is_stopped:
                raise
        # The sequences of a stopped call still end with a normal response.
        for sequence in sequences:
            if not sequence.has_ended:
                sequence.add(EngineChunk((), sequence.index, final=True))

    async def _answer(self, call: Call, sequences: list[_SequenceResponses]) -> None:
        """Run all rows, and add the responses of each of their sequences to ``sequences``."""
        for output in ("output_ids", "sequence_length"):
            # Without them a caller could not tell padding from tokens. Upstream refuses, too.
            if output not in call.output_names:
                raise InvalidRequest(output, "must be among the requested outputs")
        capacity = await self.engine.capacity()
        rows = engine_requests(
            call.arrays, call.id, capacity.vocab_size, self.limits, self.exclude_input
        )
        first_request, _ = rows[0]
        sequences_per_row = first_request.num_return_sequences
        if not call.decoupled:
            call.check_one_response(
                streaming=first_request.streaming,
                input_ids=len(rows),
                sequences=sequences_per_row,
            )
        logit_rows = 0
        for request, _ in rows:
            self.limits.check(
                "max_output_tokens", "request_output_len", request.max_tokens, "tokens"
            )
            self.limits.check_guide(request.guide)
            logit_rows += request.logit_rows(capacity)
        self.limits.check_logits(logit_rows, capacity.vocab_size)
        call.outbox.sequences = len(rows) * sequences_per_row
        tasks = []
        for number, (request, exclude_input) in enumerate(rows):
            batch_index = number if len(rows) > 1 else None
            writer = ChunkWriter(request, exclude_input, batch_index)
            responses = []
            for index in range(request.num_return_sequences):
                responses.append(_SequenceResponses(call, writer, index, request.streaming))
            sequences += responses
            # The engine always streams, so that a stopped request is answered with the tokens that
            # it has.
            engine_request = replace(
                request,
                request_id=f"{call.id}/{number}",
                streaming=True,
                traceparent=traceparent_of(call.parameters),
            )
            tasks.append(asyncio.create_task(self._row(call, engine_request, responses)))
        await run_rows(tasks)

    def _without_hidden_metrics(self, chunk: EngineChunk) -> EngineChunk:
        """Remove the reuse of the KV cache from a chunk, unless the deployment exposes it."""
        if not self.expose_kv_cache_metrics:
            chunk.cached_tokens = None
            chunk.metrics = chunk.metrics and chunk.metrics.without_reuse()
        return chunk

    async def _row(
        self, call: Call, request: EngineRequest, sequences: list[_SequenceResponses]
    ) -> None:
        self._running_rows += 1
        is_scheduled = False
        try:
            async with aclosing(self.engine.generate(request)) as stream:
                await stream.wait()
                # Wait until the last response has been taken, then send all that has arrived. In
                # Triton 24.10, a caller that uses the BLS API can hang if two responses of one
                # stream arrive together.
                await call.ready()
                while chunks := stream.take():
                    self._chunks += len(chunks)
                    if not is_scheduled:
                        is_scheduled = True
                        self._scheduled_rows += 1
                    for sequence in sequences:
                        new = [chunk for chunk in chunks if chunk.sequence_index == sequence.index]
                        if new:
                            await call.ready()
                            sequence.add(self._without_hidden_metrics(join_chunks(new)))
                    await stream.wait()
                    await call.ready()
        finally:
            self._running_rows -= 1
            if is_scheduled:
                self._scheduled_rows -= 1


@dataclass(eq=False)
class _SequenceResponses:
    """The responses of one sequence: chunk by chunk, or joined into a single response."""

    _call: Call
    _writer: ChunkWriter
    index: int
    _streaming: bool
    _chunks: list[EngineChunk] = field(default_factory=list)
    has_ended: bool = False

    def add(self, chunk: EngineChunk) -> None:
        self.has_ended = chunk.final
        if not self._streaming:
            self._chunks.append(chunk)
            if not chunk.final:
                return
            chunk = join_chunks(self._chunks)
        self._call.send(self._writer.arrays(chunk), final=chunk.final)


async def publish_longest_sequence(engine: Engine, model: str) -> None:
    """Write the engine's longest sequence, in tokens, for the other processes of ``serve``."""
    try:
        directory = os.environ.get(STATUS_DIR)
        longest = (await engine.capacity()).max_sequence_tokens
        if directory and longest:
            StatusDirectory(directory).tell_longest(model, longest)
    except (EngineError, OSError) as error:
        log.warning("%s: /v1/models does not tell its longest sequence: %s", model, error)


class EngineSteps:
    """A thread that reports ``figures()`` to Triton's metrics every second until ``close``.

    ``figures``: the numbers of steps and requests by label. ``args``: those of ``initialize``.
    """

    def __init__(
        self, pb_utils: Any, args: Mapping[str, str], figures: Callable[[], Mapping[str, int]]
    ) -> None:
        self._version = args["model_version"]
        self._figures = figures
        self._reported = dict.fromkeys(figures(), 0)
        self._gauges = {}
        for value in self._reported:
            name = ENGINE_REQUESTS
            label = REQUESTS_LABEL
            if value == STEPS_LABEL[1]:
                name = ENGINE_STEPS
                label = STEPS_LABEL[0]
            self._gauges[value] = Metric(
                name,
                "Of the engine, as TensorRT-LLM names and labels them",
                kind="gauge",
                labels=("version", label),
                initial_labels=((self._version, value),),
            )
        self._metrics = TritonMetrics(pb_utils, args["model_name"], self._gauges.values())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(EVERY_SECONDS):
            try:
                for value, figure in self._figures().items():
                    change = figure - self._reported[value]
                    self._reported[value] = figure
                    self._metrics.record(self._gauges[value], (self._version, value), change)
                self._metrics.publish()
            except Exception:  # requests go on, whatever Triton raises here
                log.exception("the engine's figures could not be told")
