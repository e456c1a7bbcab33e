"""The public surface of TensorRT-LLM's LLM API as far as it is used, over one of our engines.

Recorded from the published sources of three releases, which ``use`` and the variable
``LLM_API_RELEASE`` choose among: names, defaults, what is refused, which lists grow, what belongs
to one thread. What makes the tokens is ``ENGINE``, or the embedded engine with the directory that
``LLM`` is given.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, make_dataclass
from dataclasses import fields as dataclass_fields
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np

from tensorrt_llm.llmapi import GuidedDecodingParams as GuidedDecodingParams
from tensorrt_llm.llmapi import RequestError
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from trtllm_bls.engines.base import Engine
from trtllm_bls.errors import EngineStalled, TrtllmBlsError
from trtllm_bls.types import EngineRequest, FinishReason, Guide, Sampling, Wants

ENGINE: Engine | None = None  # a test's own
RELEASES = ("1.0.0", "1.2.1", "1.4.0rc1")
SUBMIT_SECONDS = 0.002  # 1.0 waits for its worker's answer
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
_DRAFTERS = ("DraftTarget", "NGram", "User_Provided")  # speculation with a drafter of its own
_GUIDES = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf_grammar",
    "structural_tag": "structural_tag",
}


@dataclass(kw_only=True)
class _SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
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
    prompt_logprobs: int | None = None
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    exclude_input_from_output: bool = True

    def __post_init__(self) -> None:
        if self.n > 1 and _is_greedy(self):
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns.")
        if self.stop is not None or self.bad is not None:
            raise NotImplementedError("strings need a tokenizer")


def _is_greedy(params: Any) -> bool:
    """By the LLM API's own rule: a temperature alone samples."""
    nothing = params.top_k is None and params.top_p is None and params.temperature is None
    return nothing or params.top_k == 1 or 0 in (params.top_p, params.temperature)


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
    request_perf_metrics: Any = None


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class RequestOutput:
    """One request: an async iterator that gives itself, its ``outputs`` grown, for each step."""

    def __init__(self, llm: _Llm, request: EngineRequest, params: Any) -> None:
        repeated = () if params.exclude_input_from_output else request.input_ids
        self.outputs = [CompletionOutput(index, [*repeated]) for index in range(params.n)]
        self.aborted = self._done = False
        self.cached_tokens = 0
        self._ended = self._accepted = 0
        self._params = params
        self._llm = llm
        self._loop = asyncio.get_running_loop() if _has_event_loop() else None
        self._steps: asyncio.Queue[Exception | bool] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start, llm.engine, request)

    @property
    def finished(self) -> bool:
        return self._done

    def _start(self, engine: Engine, request: EngineRequest) -> None:
        self._task = asyncio.ensure_future(self._run(engine, request))
        if self.aborted:
            self._task.cancel()

    async def _run(self, engine: Engine, request: EngineRequest) -> None:
        try:
            await engine.capacity()
            async with aclosing(engine.generate(request)) as stream:
                async for chunk in stream:
                    self._take(chunk)
                    self._steps.put_nowait(True)
            self._steps.put_nowait(False)
        except EngineStalled as error:  # plays a dead worker
            self._steps.put_nowait(RuntimeError(str(error)))
        except TrtllmBlsError as error:
            self._steps.put_nowait(RequestError(str(error)))

    def _take(self, chunk: Any) -> None:
        output, ids = self.outputs[chunk.sequence_index], list(chunk.token_ids)
        self.cached_tokens = self.cached_tokens or chunk.cached_tokens or 0
        scores = list(chunk.log_probs or ())
        if chunk.finish_reason is FinishReason.END_ID:
            ids.append(self._params.end_id)
            scores.append(0.0)
        output.token_ids += ids
        if self._params.logprobs is not None:
            pairs = zip(ids, scores, strict=True)
            best = [*self._likeliest(chunk.generation_logits), {}]
            output.logprobs += [
                more | {token: Logprob(value)}
                for more, (token, value) in zip(best, pairs, strict=False)
            ]
        self._ended += chunk.final
        self._done = self._ended == len(self.outputs)
        if self._done:  # a sequence that ends before is never told why
            reasons = {FinishReason.LENGTH: "length"}
            output.finish_reason = reasons.get(chunk.finish_reason, "stop")
            if chunk.finish_reason is FinishReason.STOP:
                output.stop_reason = output.token_ids[-1]
                if not self._params.include_stop_str_in_output:
                    del output.token_ids[-1:]
        if chunk.final and self._params.return_perf_metrics:
            output.request_perf_metrics = _figures(self._llm, len(output.token_ids))

    def _likeliest(self, rows: Any) -> list[dict[int, Logprob]]:
        """1.0 tells the chosen id alone; later releases the likeliest ones, and it."""
        if self._llm.release == "1.0.0":
            return [{} for _ in rows]
        found = []
        for row in np.asarray(rows, np.float64):
            scores = row - np.log(np.exp(row - row.max()).sum()) - row.max()
            best = np.argsort(-scores, kind="stable")[: self._params.logprobs].tolist()
            found.append({t: Logprob(float(scores[t]), i) for i, t in enumerate(best, 1)})
        return found

    def abort(self) -> None:
        self._llm._check_thread()
        assert not self.finished, "the worker logs a warning"
        self.aborted = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def __aiter__(self) -> RequestOutput:
        assert self._loop is asyncio.get_running_loop(), "no event loop during initialization"
        return self

    async def __anext__(self) -> RequestOutput:
        step = await self._steps.get()
        if isinstance(step, Exception):
            raise step
        if not step:
            raise StopAsyncIteration
        return self


def _figures(llm: _Llm, tokens: int) -> Any:
    now, speculates = timedelta(seconds=time.monotonic()), bool(llm.args.get("speculative_config"))
    drafted = tokens if speculates else 0
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    return SimpleNamespace(
        timing_metrics=SimpleNamespace(**dict.fromkeys(names, now)),
        kv_cache_metrics=SimpleNamespace(
            num_total_allocated_blocks=3, num_new_allocated_blocks=2, num_reused_blocks=1
        ),
        speculative_decoding=SimpleNamespace(
            total_draft_tokens=drafted, total_accepted_draft_tokens=drafted // 2
        ),
    )


class _Llm:
    """What the releases share. Requests and aborts go over one socket, so from one thread."""

    release = ""

    def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
        self.args = {"model": model} | kwargs
        if unknown := self.args.keys() - TorchLlmArgs.model_fields.keys():
            raise ValueError(f"1 validation error for TorchLlmArgs\n{unknown}\n  Extra inputs")
        self._guides = kwargs.get("guided_decoding_backend") is not None
        speculation = (kwargs.get("speculative_config") or {}).get("decoding_type")
        if self._guides and speculation not in (None, *_DRAFTERS):
            raise ValueError(f"Guided decoding is not supported for speculative mode {speculation}")
        self.requests: list[RequestOutput] = []
        self.options: list[dict[str, Any]] = []
        self.threads: set[int] = set()
        self.is_shut_down = False
        self.engine = ENGINE or _embedded(model, kwargs.get("max_batch_size", 32))

    def _check_thread(self) -> None:
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, "a socket was used by two threads"

    def _generate(
        self, inputs: Any, sampling_params: Any, streaming: bool, **options: Any
    ) -> RequestOutput:
        if self.is_shut_down:
            raise RuntimeError("LLM is shutting down")
        self._check_thread()
        params = sampling_params or SamplingParams()
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        assert streaming
        if params.guided_decoding is not None and not self._guides:
            raise ValueError("Guided decoding is not enabled")
        prompt = tuple(inputs["prompt_token_ids"])
        if len(prompt) > self.args.get("max_num_tokens", 8192):
            raise RequestError(
                f"The prompt length ({len(prompt)}) should not exceed max_num_tokens"
            )
        given = {name: getattr(params, name) for name in _SAMPLING}
        if _is_greedy(params):
            given |= {"top_k": 1, "top_p": None}
        elif params.top_k is None and params.top_p is None:
            given["top_p"] = 1.0
        bias = () if params.embedding_bias is None else enumerate(params.embedding_bias.tolist())
        request = EngineRequest(
            request_id=str(len(self.requests)),
            input_ids=prompt,
            max_tokens=params.max_tokens,
            sampling=Sampling(**given),
            num_return_sequences=params.n,
            end_id=params.end_id,
            stop_sequences=tuple((token,) for token in params.stop_token_ids or ()),
            bad_sequences=tuple((token,) for token in params.bad_token_ids or ()),
            embedding_bias=tuple((token, weight) for token, weight in bias if weight),
            wants=Wants(
                log_probs=params.logprobs is not None,
                generation_logits=params.logprobs is not None,
            ),
            guide=_guide(params.guided_decoding),
        )
        self.options.append({name: value for name, value in options.items() if value is not None})
        self.requests.append(RequestOutput(self, request, params))
        return self.requests[-1]

    def shutdown(self) -> None:
        self.is_shut_down = True


class _Llm10(_Llm):
    release = "1.0.0"

    def generate_async(
        self,
        inputs: Any,
        *,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        _postproc_params: Any = None,
    ) -> RequestOutput:
        time.sleep(SUBMIT_SECONDS)  # which must not hold up an event loop
        assert asyncio.get_running_loop()._thread_id != threading.get_ident()  # type: ignore
        more = {"lora_request": lora_request, "retention": kv_cache_retention_config}
        return self._generate(inputs, sampling_params, streaming, **more)


class _Llm12(_Llm):
    release = "1.2.1"

    def generate_async(
        self,
        inputs: Any,
        *,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        more = {"lora_request": lora_request, "retention": kv_cache_retention_config}
        more |= {"trace_headers": trace_headers, "cache_salt": cache_salt}
        return self._generate(inputs, sampling_params, streaming, **more)


class _Llm14(_Llm):
    release = "1.4.0rc1"

    def generate_async(
        self,
        inputs: Any,
        *,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        more = {"lora_request": lora_request, "retention": kv_cache_retention_config}
        more |= {"trace_headers": trace_headers, "cache_salt": cache_salt, "priority": priority}
        return self._generate(inputs, sampling_params, streaming, **more)


def _guide(params: GuidedDecodingParams | None) -> Guide | None:
    if params is None:
        return None
    found = [(_GUIDES[name], getattr(params, name)) for name in _GUIDES if getattr(params, name)]
    kind, text = found[0] if found else ("json", "")
    return Guide(kind, text or None)


def _embedded(model: str, max_batch: int) -> Engine:
    from trtllm_bls.engines.embedded import EmbeddedEngine
    from trtllm_bls.settings.parameters import EngineParameters

    return EmbeddedEngine(EngineParameters(model_dir=model, max_batch=max_batch, threads=1))


def use(release: str) -> None:
    """Be this release."""
    global LLM, SamplingParams, __version__
    __version__ = release
    LLM = {each.release: each for each in (_Llm10, _Llm12, _Llm14)}[release]
    SamplingParams = _SamplingParams
    if release == "1.0.0":  # without what came later
        kept = [
            each for each in dataclass_fields(_SamplingParams) if each.name != "prompt_logprobs"
        ]
        pairs = [(each.name, each.type, field(default=each.default)) for each in kept]
        more = {"__post_init__": _SamplingParams.__post_init__}
        SamplingParams = make_dataclass("SamplingParams", pairs, namespace=more, kw_only=True)
    TorchLlmArgs.use(release)


LLM: Any
SamplingParams: Any
__version__: str
use(os.environ.get("LLM_API_RELEASE", "1.2.1"))
