"""The ``tensorrt_llm`` model: any ``Engine`` served with TensorRT-LLM's own tensors.

Owns what belongs to the wire rather than to running tokens: batch rows, the prompt in front of
non-streaming output, stop requests by request id, and which response is the last. The engine's
steps and requests are on Triton's ``/metrics`` as the C++ backend's are, its longest sequence is in
the status directory.
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

EVERY_SECONDS = 1.0  # each report of figures is a round trip to the server

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineService:
    """Answers calls with ``engine``; ``exclude_input`` is the model's default for that option.

    ``limits``: the sizes that a request may have. ``expose_kv_cache_metrics``: report how much of a
    prompt was in the KV cache already.
    """

    engine: Engine
    exclude_input: bool
    limits: RequestLimits = field(default_factory=RequestLimits)
    expose_kv_cache_metrics: bool = False
    _chunks: int = field(default=0, init=False)
    _rows: int = field(default=0, init=False)  # that run
    _begun: int = field(default=0, init=False)  # of these, with a token

    def figures(self) -> dict[str, int]:
        """Steps, requests with a token, and those without one, as TensorRT-LLM names them. Any
        thread may ask."""
        rows, begun = self._rows, self._begun
        return {STEPS_LABEL[1]: self._chunks, "scheduled": begun, "waiting": max(rows - begun, 0)}

    async def handle(self, call: Call) -> None:
        """Answer one call: a request, or a stop request for another."""
        if is_stop(call.arrays):
            call.stop_namesakes(newest_only=True)  # as upstream's does
            return
        sequences: list[_SequenceResponses] = []
        call.may_be_stopped = True
        try:
            await self._answer(call, sequences)
        except asyncio.CancelledError:
            if not call.stopped:
                raise
        for sequence in sequences:  # of a stopped call; each still ends with its normal response
            if not sequence.ended:
                sequence.add(EngineChunk((), sequence.index, final=True))

    async def _answer(self, call: Call, sequences: list[_SequenceResponses]) -> None:
        """Run all rows; ``sequences`` gets the responses of each of their sequences."""
        for output in ("output_ids", "sequence_length"):
            if output not in call.wanted:  # upstream refuses too: padding could not be recognised
                raise InvalidRequest(output, "must be among the requested outputs")
        capacity = await self.engine.capacity()
        rows = engine_requests(
            call.arrays, call.id, capacity.vocab_size, self.limits, self.exclude_input
        )
        first = rows[0][0]
        sequences_each = first.num_return_sequences
        if not call.decoupled:
            call.check_one_response(
                streaming=first.streaming, input_ids=len(rows), sequences=sequences_each
            )
        for asked, _ in rows:
            self.limits.check("max_output_tokens", "request_output_len", asked.max_tokens, "tokens")
            self.limits.check_guide(asked.guide)
        logit_rows = sum(asked.logit_rows(capacity) for asked, _ in rows)
        self.limits.check_logits(logit_rows, capacity.vocab_size)
        call.outbox.sequences = len(rows) * sequences_each
        tasks = []
        for number, (asked, excludes) in enumerate(rows):
            writer = ChunkWriter(asked, excludes, number if len(rows) > 1 else None)
            # Always streamed inside, so that a stopped request can answer with what there is.
            request = replace(
                asked,
                request_id=f"{call.id}/{number}",
                streaming=True,
                traceparent=traceparent_of(call.parameters),
            )
            own = [
                _SequenceResponses(call, writer, index, asked.streaming)
                for index in range(asked.num_return_sequences)
            ]
            sequences += own
            tasks.append(asyncio.create_task(self._row(call, request, own)))
        await run_rows(tasks)

    def _told(self, chunk: EngineChunk) -> EngineChunk:
        """Leave out the reuse of the KV cache where the deployment does not expose it."""
        if not self.expose_kv_cache_metrics:
            chunk.cached_tokens = None
            chunk.metrics = chunk.metrics and chunk.metrics.without_reuse()
        return chunk

    async def _row(
        self, call: Call, request: EngineRequest, sequences: list[_SequenceResponses]
    ) -> None:
        self._rows, begun = self._rows + 1, False
        try:
            async with aclosing(self.engine.generate(request)) as stream:
                await stream.wait()
                # Wait until the last response has been taken, then send all that has arrived. In
                # Triton 24.10, a caller that uses the BLS API can hang if two responses of one
                # stream arrive together.
                await call.ready()
                while chunks := stream.take():
                    self._chunks += len(chunks)
                    self._begun, begun = self._begun + (not begun), True
                    for sequence in sequences:
                        own = [chunk for chunk in chunks if chunk.sequence_index == sequence.index]
                        if own:
                            await call.ready()
                            sequence.add(self._told(join_chunks(own)))
                    await stream.wait()
                    await call.ready()
        finally:
            self._rows, self._begun = self._rows - 1, self._begun - begun


@dataclass(eq=False)
class _SequenceResponses:
    """The responses of one sequence: chunk by chunk, or collected into a single response."""

    _call: Call
    _writer: ChunkWriter
    index: int
    _streaming: bool
    _collected: list[EngineChunk] = field(default_factory=list)
    ended: bool = False

    def add(self, chunk: EngineChunk) -> None:
        self.ended = chunk.final
        if not self._streaming:
            self._collected.append(chunk)
            if not chunk.final:
                return
            chunk = join_chunks(self._collected)
        self._call.send(self._writer.arrays(chunk), final=chunk.final)


async def tell_longest(engine: Engine, model: str) -> None:
    """Write the engine's longest sequence, in tokens, for the other processes of ``serve``."""
    try:
        directory = os.environ.get(STATUS_DIR)
        longest = (await engine.capacity()).max_sequence_tokens
        if directory and longest:
            StatusDirectory(directory).tell_longest(model, longest)
    except (EngineError, OSError) as error:
        log.warning("%s: /v1/models does not tell its longest sequence: %s", model, error)


class EngineSteps:
    """Reports ``figures()`` every second until closed, on a thread: steps and requests, by the
    values of their labels. ``args``: of the model's ``initialize``."""

    def __init__(
        self, pb_utils: Any, args: Mapping[str, str], figures: Callable[[], Mapping[str, int]]
    ) -> None:
        self._version, self._figures = args["model_version"], figures
        self._told = dict.fromkeys(figures(), 0)
        self._rows = {}
        for value in self._told:
            name, label = ENGINE_REQUESTS, REQUESTS_LABEL
            if value == STEPS_LABEL[1]:
                name, label = ENGINE_STEPS, STEPS_LABEL[0]
            self._rows[value] = Metric(
                name,
                "Of the engine, as TensorRT-LLM names and labels them",
                kind="gauge",
                labels=("version", label),
                known=((self._version, value),),
            )
        self._metrics = TritonMetrics(pb_utils, args["model_name"], self._rows.values())
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
                for value, now in self._figures().items():
                    new, self._told[value] = now - self._told[value], now
                    self._metrics.record(self._rows[value], (self._version, value), new)
                self._metrics.publish()
            except Exception:  # whatever Triton raises, requests go on
                log.exception("the engine's figures could not be told")
