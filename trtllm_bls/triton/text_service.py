"""The models with text. ``tensorrt_llm_bls`` serves the orchestrator with tensors;
``preprocessing`` and ``postprocessing`` are functions of arrays.

All use the same prompt maker and detokeniser, so an ensemble cannot disagree with
``tensorrt_llm_bls`` about the ids of a prompt or the text of ids.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from trtllm_bls.errors import InvalidRequest, Stopped
from trtllm_bls.orchestrator.orchestrator import Orchestrator, run_rows
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.text.prompts import PromptMaker
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.triton.request_server import Call
from trtllm_bls.triton.tensors import (
    as_llmapi_outputs,
    as_text_inputs,
    is_stop,
    prompt_requests,
    sequence_ids,
    text_arrays,
    text_requests,
    with_callers_name,
)
from trtllm_bls.types import Array, CacheSalt, FinishReason, TextChunk, TextRequest, TokenIds
from trtllm_bls.wire.call_context import NO_CONTEXT, CallContext
from trtllm_bls.wire.words import dense_bias, pack_words

# After a chunk that ends its sequence in one of these ways, an error ends the call.
_ERROR_REASONS = (FinishReason.CANCELLED, FinishReason.ERROR)


@dataclass(eq=False)
class TextService:
    """Answers calls with ``orchestrator``. The rows of a batch run concurrently.

    ``limits``: the sizes that inputs may have; None: any. ``exclude_input``: the default of the
    flag that leaves the prompt out of an answer that is not streamed. ``llmapi``: callers send and
    get the tensors of upstream's model of that name.
    """

    orchestrator: Orchestrator
    limits: RequestLimits | None = None
    exclude_input: bool = True
    llmapi: bool = False
    _read_ahead: dict[Call, list[TextRequest]] = field(default_factory=dict, init=False)

    def prepare_batch(self, calls: Sequence[Call]) -> None:
        """Read the inputs of calls that came in one batch, and tokenise their prompts as a batch.

        Triton's thread calls it. The tokeniser takes long and releases the GIL, so the event loop
        runs meanwhile.
        """
        requests_by_call = {}
        for call in calls:
            with suppress(InvalidRequest):  # ``handle`` raises it again
                requests_by_call[call] = self._requests(call)
        room = max(0, self.orchestrator.admission.room)  # requests beyond it will be refused
        requests = itertools.chain.from_iterable(requests_by_call.values())
        self.orchestrator.prompts.encode_ahead(itertools.islice(requests, room))
        self._read_ahead |= requests_by_call

    def _requests(self, call: Call) -> list[TextRequest]:
        arrays: Mapping[str, Array] = call.arrays
        if self.llmapi:
            arrays = as_text_inputs(arrays)
        requests = text_requests(arrays, call.id, self.limits, call.parameters, self.exclude_input)
        if call.context is not NO_CONTEXT:
            for request in requests:
                self._add_context(request, call.context)
        return requests

    def _add_context(self, request: TextRequest, context: CallContext) -> None:
        """Give a pipeline's request the key, cache salt and time limit of the pipeline's client."""
        request.tenant = context.key
        if request.cache_salt is None and context.cache_salt is not None:
            request.cache_salt = CacheSalt.parsed(context.cache_salt)
        if context.seconds is not None:
            timeout_s = request.timeout_s
            if timeout_s is None:
                timeout_s = self.orchestrator.timeout_s
            if timeout_s is None or context.seconds < timeout_s:
                timeout_s = context.seconds
            request.timeout_s = timeout_s

    async def handle(self, call: Call) -> None:
        """Answer one call. Triton's final flag is on the last chunk of the last sequence."""
        prepared_requests = self._read_ahead.pop(call, None)
        if self.llmapi and is_stop(call.arrays):
            call.stop_namesakes()
            raise Stopped("the requests with this id are stopped")
        call.may_be_stopped = self.llmapi
        try:
            requests = prepared_requests or self._requests(call)
            if not call.decoupled:
                call.check_one_response(
                    stream=any([request.stream for request in requests]),
                    text_input=len(requests),
                    sequences=requests[0].num_return_sequences,
                )
        except InvalidRequest as error:
            self.orchestrator.refused(call.id, error)
            raise
        call.outbox.sequences = sum([request.num_return_sequences for request in requests])
        try:
            if len(requests) == 1:
                await self._row(call, requests[0], None)
            else:
                tasks = []
                for row, request in enumerate(requests):
                    tasks.append(asyncio.create_task(self._row(call, request, row)))
                await run_rows(tasks)
        except asyncio.CancelledError:
            if not call.is_stopped:
                raise
            raise Stopped("stopped by a request with this id") from None

    async def _row(self, call: Call, request: TextRequest, row: int | None) -> None:
        if row is not None:
            request = replace(request, request_id=f"{request.request_id}/{row}")
        try:
            sink = _RowSink(call, request, row, self.llmapi)
            await self.orchestrator.run(request, sink)
        except InvalidRequest as error:
            raise with_callers_name(error, request) from error


class _RowSink:
    """The sink of one row. It sends text chunks as responses of the row's call."""

    def __init__(self, call: Call, request: TextRequest, row: int | None, llmapi: bool) -> None:
        self._llmapi = llmapi
        self._request = request
        self._row = row
        self._call = call
        self.ready = call.ready

    def send(self, chunk: TextChunk) -> None:
        ending = chunk.ending
        is_final = ending is not None and ending.finish_reason not in _ERROR_REASONS
        arrays = text_arrays(chunk, self._request, self._row, fill=not self._llmapi)
        if self._llmapi:
            arrays = as_llmapi_outputs(arrays, self._call.arrays)
        self._call.send(arrays, final=is_final)


@dataclass(frozen=True)
class Preprocessor:
    """The function of ``preprocessing``: text to token ids."""

    tokenizer: Tokenizer
    add_special_tokens: bool
    limits: RequestLimits | None = None

    def arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs for all batch rows. Shorter rows are padded on the right."""
        maker = PromptMaker(self.tokenizer, self.add_special_tokens)
        prompts = []
        for request in prompt_requests(inputs, self.limits):
            prompts.append(maker.make(request).engine_request)
        lengths = [len(prompt.input_ids) for prompt in prompts]
        bias_size = 0
        if any(prompt.embedding_bias for prompt in prompts):
            bias_size = self.tokenizer.model_vocab_size
        ids = np.full((len(prompts), max(lengths)), self.tokenizer.pad_id or 0, dtype=np.int32)
        biases: list[Array] = []
        max_tokens: list[int] = []
        end_ids: list[int] = []
        pad_ids: list[int] = []
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = prompt.input_ids
            biases.append(dense_bias(prompt.embedding_bias, bias_size))
            max_tokens.append(prompt.max_tokens)
            end_ids.append(-1 if prompt.end_id is None else prompt.end_id)
            pad_ids.append(prompt.pad_id or 0)
        pads = _column(pad_ids)
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": _column(lengths),
            "BAD_WORDS_IDS": _word_lists([prompt.bad_sequences for prompt in prompts]),
            "STOP_WORDS_IDS": _word_lists([prompt.stop_sequences for prompt in prompts]),
            "EMBEDDING_BIAS": np.stack(biases),
            "REQUEST_OUTPUT_LEN": _column(max_tokens),
            "OUT_END_ID": _column(end_ids),
            "OUT_PAD_ID": pads,
            # Upstream's values for a request without a text for the decoder.
            "DECODER_INPUT_ID": pads,
            "REQUEST_DECODER_INPUT_LEN": np.ones_like(pads),
        }


@dataclass(frozen=True)
class Postprocessor:
    """The function of ``postprocessing``: the ids of sequences to text.

    Every id counts, whether it belongs to the prompt, the completion or a stop.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool
    limits: RequestLimits | None = None

    def arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``OUTPUT`` as ``[B * beams]``, like TensorRT-LLM's own model."""
        texts = []
        for ids in sequence_ids(inputs, self.limits):
            detokenizer = self.tokenizer.detokenizer(self.skip_special_tokens)
            texts.append((detokenizer.feed(ids) + detokenizer.flush()).encode("utf-8"))
        return {"OUTPUT": np.array(texts, dtype=np.object_)}


def _column(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32).reshape(-1, 1)


def _word_lists(rows: Sequence[tuple[TokenIds, ...]]) -> Array:
    columns = max(sum(map(len, words)) for words in rows)
    return np.stack([pack_words(words, columns) for words in rows])
