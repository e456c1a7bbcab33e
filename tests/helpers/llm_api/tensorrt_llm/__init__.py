"""The public surface of TensorRT-LLM's LLM API as far as it is used, over one of our engines.

Recorded from the published ``LLM``, ``SamplingParams``, ``RequestOutput`` and ``CompletionOutput``:
names, defaults, what is refused, which lists grow. What makes the tokens is ``ENGINE``, or the
embedded engine with the directory that ``LLM`` is given.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.llmapi import GuidedDecodingParams as GuidedDecodingParams
from trtllm_bls.engines.base import Engine
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.types import EngineRequest, FinishReason, Sampling, Wants

ENGINE: Engine | None = None  # a test's own
_SAMPLING = (
    "top_k",
    "top_p",
    "top_p_min",
    "top_p_decay",
    "temperature",
    "seed",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "min_p",
)


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    early_stopping: int | None = None
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        greedy = self.top_k in (None, 1) and self.top_p in (None, 0.0)
        if self.n > 1 and greedy:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns.")
        if self.stop is not None or self.bad is not None:
            raise NotImplementedError("strings need a tokenizer")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """One request: an async iterator that gives itself, its ``outputs`` grown, for each step."""

    def __init__(self, engine: Engine, request: EngineRequest, params: SamplingParams) -> None:
        self.outputs = [CompletionOutput(index) for index in range(params.n)]
        self.aborted = self.finished = False
        self._ended = 0
        self._params = params
        self._steps: asyncio.Queue[Exception | bool] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._run(engine, request))

    async def _run(self, engine: Engine, request: EngineRequest) -> None:
        try:
            await engine.capacity()
            async with aclosing(engine.generate(request)) as stream:
                async for chunk in stream:
                    self._take(chunk)
                    self._steps.put_nowait(True)
            self._steps.put_nowait(False)
        except TrtllmBlsError as error:
            self._steps.put_nowait(RuntimeError(str(error)))

    def _take(self, chunk: Any) -> None:
        output, ids = self.outputs[chunk.sequence_index], list(chunk.token_ids)
        scores = list(chunk.log_probs or ())
        if chunk.finish_reason is FinishReason.END_ID:
            ids.append(self._params.end_id)
            scores.append(0.0)
        output.token_ids += ids
        if self._params.logprobs:
            pairs = zip(ids, scores, strict=True)
            output.logprobs += [{token: Logprob(value, 1)} for token, value in pairs]
        self._ended += chunk.final
        self.finished = self._ended == len(self.outputs)
        if self.finished:  # a sequence that ends before is never told why
            reasons = {FinishReason.LENGTH: "length"}
            output.finish_reason = reasons.get(chunk.finish_reason, "stop")
            if chunk.finish_reason is FinishReason.STOP:
                output.stop_reason = output.token_ids[-1]

    def abort(self) -> None:
        assert not self.finished, "the worker logs a warning"
        self.aborted = True
        self._task.cancel()

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        step = await self._steps.get()
        if isinstance(step, Exception):
            raise step
        if not step:
            raise StopAsyncIteration
        return self


class LLM:
    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        *,
        max_batch_size: int = 32,
        max_seq_len: int | None = None,
        guided_decoding_backend: str | None = None,
    ) -> None:
        self._guides = guided_decoding_backend is not None
        self.requests: list[RequestOutput] = []
        self.engine = ENGINE or _embedded(model, max_batch_size)

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
    ) -> RequestOutput:
        params = sampling_params or SamplingParams()
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        assert streaming
        if params.guided_decoding is not None and not self._guides:
            raise ValueError("Guided decoding is not enabled")
        given = {name: getattr(params, name) for name in _SAMPLING}
        request = EngineRequest(
            request_id=str(len(self.requests)),
            input_ids=tuple(inputs["prompt_token_ids"]),
            max_tokens=params.max_tokens,
            sampling=Sampling(**given),
            num_return_sequences=params.n,
            end_id=params.end_id,
            stop_sequences=tuple((token,) for token in params.stop_token_ids or ()),
            bad_sequences=tuple((token,) for token in params.bad_token_ids or ()),
            wants=Wants(log_probs=bool(params.logprobs)),
        )
        self.requests.append(RequestOutput(self.engine, request, params))
        return self.requests[-1]

    def shutdown(self) -> None:
        pass


def _embedded(model: str, max_batch: int) -> Engine:
    from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings

    return EmbeddedEngine(model, EmbeddedSettings(max_batch=max_batch, threads=1))
