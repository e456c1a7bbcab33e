"""Behind the ``tensorrt_llm`` door: any ``Engine`` served with TensorRT-LLM's own tensors.

Owns what belongs to the wire rather than to running tokens: batch rows, the prompt in front of
non-streaming output, stop requests by request id, and which response is the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace

from trtllm_bls.chunks import join_chunks
from trtllm_bls.door import Call
from trtllm_bls.engines.base import Engine
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.messages import Array, EngineChunk, EngineRequest
from trtllm_bls.services.rows import end_all
from trtllm_bls.wire.engine import ChunkWriter, EngineCall, engine_requests, is_stop


class EngineService:
    """Answers calls with ``engine``; ``exclude_input`` is the model's default for that option."""

    def __init__(self, engine: Engine, exclude_input: bool) -> None:
        self._engine = engine
        self._exclude_input = exclude_input
        # By the client's request id; of several with one id only the newest can be stopped.
        self._running: dict[str, _Run] = {}

    async def handle(self, call: Call) -> None:
        """Answer one call: a request, or a stop request for another."""
        if is_stop(call.arrays):
            self._stop(call)
            return
        for output in ("output_ids", "sequence_length"):
            if output not in call.wanted:  # upstream refuses too: padding could not be told
                raise InvalidRequest(output, "must be among the requested outputs")
        limits = await self._engine.limits()
        calls = engine_requests(call.arrays, call.id, limits.vocab_size)
        run = _Run(call, len(calls) * calls[0].request.num_return_sequences)
        for row, one in enumerate(calls):
            writer = ChunkWriter(
                one,
                self._exclude_input if one.exclude_input is None else one.exclude_input,
                row if len(calls) > 1 else None,
            )
            # Always streamed inside, so that a stopped request can answer with what there is.
            request = replace(one.request, request_id=f"{call.id}/{row}", streaming=True)
            sequences = run.add_row(writer, one)
            run.rows.append(asyncio.create_task(self._row(request, sequences)))
        await self._finish(call, run)

    async def _finish(self, call: Call, run: _Run) -> None:
        if call.client_id:
            self._running[call.client_id] = run
        try:
            await asyncio.gather(*run.rows)
        except asyncio.CancelledError:
            if not run.stopped:
                raise
        finally:
            if self._running.get(call.client_id) is run:
                del self._running[call.client_id]
            await end_all(run.rows)
        run.send_rest()

    def _stop(self, call: Call) -> None:
        if not call.client_id:
            raise InvalidRequest("stop", "needs the request id of the request that is to stop")
        run = self._running.get(call.client_id)
        if run is not None:
            run.stop()
        call.finish()

    async def _row(self, request: EngineRequest, sequences: list[_Sequence]) -> None:
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                sequences[chunk.sequence_index].add(chunk)


class _Run:
    """One call being answered: its sequences, and how many of them have not ended."""

    def __init__(self, call: Call, sequences: int) -> None:
        self.stopped = False
        self.rows: list[asyncio.Task[None]] = []
        self._call = call
        self._left = sequences
        self._sequences: list[_Sequence] = []

    def add_row(self, writer: ChunkWriter, one: EngineCall) -> list[_Sequence]:
        new = [
            _Sequence(self, writer, index, one.request.streaming)
            for index in range(one.request.num_return_sequences)
        ]
        self._sequences += new
        return new

    def stop(self) -> None:
        """End the work; every sequence still ends with its normal last response."""
        self.stopped = True
        for row in self.rows:
            row.cancel()

    def send(self, arrays: Mapping[str, Array], ended: bool) -> None:
        self._left -= ended
        self._call.send(arrays, final=self._left == 0)

    def send_rest(self) -> None:
        for sequence in self._sequences:
            sequence.end()


class _Sequence:
    """One sequence on its way out: chunk by chunk, or collected into a single response."""

    def __init__(self, run: _Run, writer: ChunkWriter, index: int, streaming: bool) -> None:
        self._run = run
        self._writer = writer
        self._index = index
        self._streaming = streaming
        self._collected: list[EngineChunk] = []
        self._ended = False

    def add(self, chunk: EngineChunk) -> None:
        self._ended = chunk.final
        if not self._streaming:
            self._collected.append(chunk)
            if not chunk.final:
                return
            chunk = join_chunks(self._collected)
        self._run.send(self._writer.arrays(chunk), ended=chunk.final)

    def end(self) -> None:
        if not self._ended:
            self.add(EngineChunk(token_ids=(), sequence_index=self._index, final=True))
