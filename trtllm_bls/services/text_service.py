"""The ``tensorrt_llm_bls`` model: the orchestrator, served with the text tensors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from trtllm_bls.admission import RequestLimits
from trtllm_bls.errors import InvalidRequest, Stopped
from trtllm_bls.orchestrator import Orchestrator
from trtllm_bls.python_backend.request_server import Call
from trtllm_bls.services.batch import check_one_response, run_rows
from trtllm_bls.types import FinishReason, TextChunk, TextRequest
from trtllm_bls.wire.server import (
    as_llmapi_outputs,
    as_text_inputs,
    is_stop,
    text_arrays,
    text_requests,
    with_callers_name,
)

# A chunk that ends its sequence in one of these ways is followed by an error, or by no response.
_FOLLOWED = (FinishReason.CANCELLED, FinishReason.ERROR)


class TextService:
    """Answers calls with ``orchestrator``; the rows of a batch run side by side.

    ``decoupled``: the model may send any number of responses to one request. ``limits``: sizes of
    inputs; ``None`` = any. ``exclude_input``: leave the prompt out of an answer that is not
    streamed, where the request does not say. ``llmapi``: callers send and get the tensors of
    upstream's model of that name.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        decoupled: bool = True,
        limits: RequestLimits | None = None,
        exclude_input: bool = True,
        llmapi: bool = False,
    ) -> None:
        self._llmapi = llmapi
        self._orchestrator = orchestrator
        self._limits = limits
        self._exclude_input = exclude_input
        self._decoupled = decoupled
        self._read_ahead: dict[Call, list[TextRequest]] = {}

    def prepare_batch(self, calls: Sequence[Call]) -> None:
        """Read the inputs of calls that came in one batch, and tokenise their prompts as a batch.

        Called in the thread that brings them: the tokeniser takes long and releases the GIL, so the
        event loop runs meanwhile.
        """
        found = {}
        for call in calls:
            with suppress(InvalidRequest):  # which ``handle`` raises
                found[call] = self._requests(call)
        room = max(0, self._orchestrator.admission.room)  # the others will be refused
        requests = itertools.chain.from_iterable(found.values())
        self._orchestrator.prompts.encode_ahead(itertools.islice(requests, room))
        self._read_ahead |= found

    def _requests(self, call: Call) -> list[TextRequest]:
        arrays = as_text_inputs(call.arrays) if self._llmapi else call.arrays
        return text_requests(arrays, call.id, self._limits, call.parameters, self._exclude_input)

    async def handle(self, call: Call) -> None:
        """Answer one call; Triton's final flag is on the last chunk of the last sequence."""
        ahead = self._read_ahead.pop(call, None)
        if self._llmapi and is_stop(call.arrays):
            call.stop_namesakes()
            raise Stopped("the requests with this id are stopped")
        call.may_be_stopped = self._llmapi
        try:
            requests = ahead or self._requests(call)
            if not self._decoupled:
                check_one_response(
                    stream=any(request.stream for request in requests),
                    text_input=len(requests),
                    sequences=requests[0].num_return_sequences,
                )
        except InvalidRequest as error:
            self._orchestrator.refused(call.id, error)
            raise
        call.sequences = sum([request.num_return_sequences for request in requests])
        try:
            if len(requests) == 1:
                await self._row(call, requests[0], None)
            else:
                rows = [self._row(call, request, row) for row, request in enumerate(requests)]
                await run_rows([asyncio.create_task(row) for row in rows])
        except asyncio.CancelledError:
            if not call.stopped:
                raise
            raise Stopped("stopped by a request with this id") from None

    async def _row(self, call: Call, request: TextRequest, row: int | None) -> None:
        if row is not None:
            request = replace(request, request_id=f"{request.request_id}/{row}")
        try:
            sink = _RowSink(call, request, row, self._llmapi)
            await self._orchestrator.run(request, sink)
        except InvalidRequest as error:
            raise with_callers_name(error, request) from error


class _RowSink:
    """Text chunks of one row as responses of its call."""

    def __init__(self, call: Call, request: TextRequest, row: int | None, llmapi: bool) -> None:
        self._llmapi = llmapi
        self._request = request
        self._row = row
        self._call = call
        self.ready = call.ready

    def send(self, chunk: TextChunk) -> None:
        ended = chunk.ending is not None and chunk.ending.finish_reason not in _FOLLOWED
        arrays = text_arrays(chunk, self._request, self._row)
        if self._llmapi:
            arrays = as_llmapi_outputs(arrays, self._call.arrays)
        self._call.send(arrays, final=ended)
