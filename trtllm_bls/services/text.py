"""Behind the ``tensorrt_llm_bls`` door: the orchestrator served with the text tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.door import Call
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.messages import Array, FinishReason, TextChunk, TextRequest
from trtllm_bls.orchestrator import Defaults, Orchestrator
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.services.rows import end_all
from trtllm_bls.services.sources import Sources
from trtllm_bls.tokenizer import load_tokenizer
from trtllm_bls.wire.text import text_arrays, text_requests


class TextService:
    """Answers calls with ``orchestrator``; the rows of a batch run side by side."""

    def __init__(
        self, orchestrator: Orchestrator, close: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._orchestrator = orchestrator
        self.close = close

    @classmethod
    def assemble(cls, parameters: BlsParameters, pb_utils: Any) -> TextService:
        """The service one model instance runs. Raises ``SetupError``."""
        tokenizer = load_tokenizer(parameters.tokenizer_dir)
        sources = Sources(parameters, pb_utils, tokenizer)
        defaults = Defaults(
            add_special_tokens=parameters.add_special_tokens,
            skip_special_tokens=parameters.skip_special_tokens,
            accumulate=parameters.accumulate_tokens,
            timeout_s=parameters.timeout_seconds or None,
        )
        return cls(Orchestrator(tokenizer, sources.source_for, defaults), sources.close)

    async def handle(self, call: Call) -> None:
        """Answer one call; Triton's final flag is on the last chunk of the last sequence."""
        requests = text_requests(call.arrays, call.id)
        run = _Run(call, sum(request.num_return_sequences for request in requests))
        rows = [
            asyncio.create_task(self._row(run, request, row if len(requests) > 1 else None))
            for row, request in enumerate(requests)
        ]
        try:
            await asyncio.gather(*rows)
        finally:
            await end_all(rows)

    async def _row(self, run: _Run, request: TextRequest, row: int | None) -> None:
        if row is not None:
            request = replace(request, request_id=f"{request.request_id}/{row}")
        try:
            async with aclosing(self._orchestrator.run(request)) as chunks:
                async for chunk in chunks:
                    run.send(text_arrays(chunk, request, row), ended=_ends_call(chunk))
        except InvalidRequest as error:
            raise _in_callers_words(error, request) from error


def _ends_call(chunk: TextChunk) -> bool:
    """Whether its sequence has ended well; otherwise the door's error or bare end follows."""
    unwell = (FinishReason.CANCELLED, FinishReason.ERROR)
    return chunk.ending is not None and chunk.ending.finish_reason not in unwell


def _in_callers_words(error: InvalidRequest, request: TextRequest) -> InvalidRequest:
    """The engine's refusal under the name by which the caller sent the field."""
    if error.field == "input_ids":
        name = "text_input" if request.messages is None else "messages"
    else:
        tensor = ENGINE.input_named.get(error.field)
        names = [own.name for own in BLS.inputs if tensor is not None and own.key == tensor.key]
        name = error.field if error.field in names or not names else names[0]
    return type(error)(name, error.problem)


class _Run:
    """One call being answered, and how many of its sequences have not ended."""

    def __init__(self, call: Call, sequences: int) -> None:
        self._call = call
        self._left = sequences

    def send(self, arrays: Mapping[str, Array], ended: bool) -> None:
        self._left -= ended
        self._call.send(arrays, final=self._left == 0)
