"""An engine of TensorRT-LLM's LLM API in this process: ``tensorrt_llm.LLM``.

Written from the public sources of releases 1.0 to 1.4.0rc1 and tested against objects with the
surface of three of them; not run on a TensorRT-LLM so far.

``LLM`` sends requests over a socket that belongs to one thread, and in some releases waits there
for its worker. So one thread of ours submits and aborts all requests.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

from trtllm_bls.engines import trtllm_fields as trtllm
from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    PromptTooLong,
    SetupError,
    TrtllmBlsError,
    Unsupported,
    printable,
    says_too_long,
)
from trtllm_bls.settings.model_yaml import ModelYaml, gpus_of
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import (
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    Adapter,
    Array,
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    Guide,
    SpeculationStats,
    TopLogProbs,
    Wants,
)
from trtllm_bls.wire.contract import ENGINE
from trtllm_bls.wire.words import dense_bias

log = logging.getLogger(__name__)

_NOT_PASSED_ON = "this package does not pass it on to the LLM API"
_SPECULATES = "it speculates by speculative_config in its model.yaml"
_RETENTION = [tensor.name for tensor in ENGINE.inputs if tensor.name.startswith("retention_")]
_DECODE_PRIORITY = 35  # KvCacheRetentionConfig's own default
_ADAPTER = ("lora_name", "lora_path", "lora_task_id")
_LLM_INPUTS = {
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    "logits_post_processor_name",
    "lora_task_id",
    "lora_name",
    "lora_path",
    "lora_ckpt_source",
    "cache_salt",
    "priority",
    *_RETENTION,
    "embedding_bias",
    "return_perf_metrics",
}
_LLM_REFUSALS = {
    "draft_input_ids": f"the LLM API takes no drafts; {_SPECULATES}",
    "bad_words_list": "the LLM API takes bad words of one token only",
    "lora_weights": "the LLM API loads adapters by name and directory: send lora_name",
}
_UNGUIDED = "the server's model.yaml sets no guided_decoding_backend; set it to xgrammar"
_EDITED = "with drafts, the LLM API lets a processor edit the rows of other requests"
# The errors that the LLM API raises about a request, beside its own RequestError.
_REFUSALS = (TypeError, ValueError, NotImplementedError)
IGNORED_MEND = (
    "set sampler_type: TRTLLMSampler in model.yaml (1.0: enable_trtllm_sampler: true), or take "
    "1.3.0rc29 or later"
)
_LLM_GUIDES = {"json_schema": "json", "ebnf_grammar": "grammar"}  # others have one name
# Environment variables of Triton's own MPI job, if there is one. The workers that the LLM API
# starts do not belong to it.
_MPI_JOB = (
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_FIRST_RANKS",
    "OMPI_APP_CTX_NUM_PROCS",
    "OMPI_MCA_orte_",
    "ORTE_",
    "PMIX_",
    "PMI_",
)


# --- loading -------------------------------------------------------------------------------------


def open_llm(
    name: str, parameters: EngineParameters, vocab_size: Callable[[], int]
) -> LlmApiEngine:
    """Load the model that ``parameters`` name. Raises ``SetupError``."""
    config = ModelYaml()
    if parameters.model_yaml:
        config = ModelYaml.read(parameters.model_yaml)
    gpus = gpus_of(parameters.gpu_device_ids, parameters.instance, parameters.instances)
    # The import opens the GPUs' files, and the workers inherit them and the environment. So the
    # environment has to be set before.
    for key in list(os.environ):
        if key.startswith(_MPI_JOB) and not key.startswith("PMIX_MCA_"):
            del os.environ[key]
    if gpus:
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpus, "TRTLLM_VISIBLE_DEVICES": gpus}
    # NVIDIA gets statistics of the use only where the model.yaml configures it.
    if "telemetry_config" not in config.arguments:
        os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")
    try:
        api = importlib.import_module("tensorrt_llm")
        merge = importlib.import_module("tensorrt_llm.llmapi.llm_utils")
    except ImportError as error:
        raise SetupError(f"engine llm_api needs TensorRT-LLM in this Python: {error}") from error
    defaults: dict[str, Any] = {"model": str(parameters.model_dir)}
    if parameters.max_batch:
        defaults["max_batch_size"] = parameters.max_batch
    if parameters.max_sequence_tokens:
        defaults["max_seq_len"] = parameters.max_sequence_tokens
    if parameters.model_yaml is None:
        # The LLM API refuses a backend together with some arguments that a model.yaml may have.
        defaults["guided_decoding_backend"] = "xgrammar"
    if gpus:
        defaults["gpus_per_node"] = len(gpus.split(","))
    processors = config.load_processors()
    try:
        arguments = merge.update_llm_args_with_extra_dict(defaults, dict(config.arguments))
        llm = api.LLM(**arguments)
    except (TypeError, ValueError) as error:  # pydantic's is a ValueError
        raise SetupError(f"engine llm_api: {printable(str(error))}") from error
    warning = ignored_fields(getattr(api, "__version__", ""), arguments)
    if warning:
        log.warning("%s: %s; %s", name, warning, IGNORED_MEND)
    capacity = EngineCapacity(
        vocab_size=vocab_size(),  # not before: a tokenizer that is loaded first hides torch
        max_sequence_tokens=arguments.get("max_seq_len"),
        max_draft_tokens=0,
        tells_top_log_probs=True,
        speculates=_SPECULATES if arguments.get("speculative_config") else "",
    )
    refusals = {}
    if not arguments.get("guided_decoding_backend"):
        refusals[GUIDE_KIND_INPUT] = _UNGUIDED
    if capacity.speculates:
        refusals["logits_post_processor_name"] = _EDITED
    return LlmApiEngine(name, api, llm, capacity, config.adapters, processors, refusals)


def ignored_fields(release: str, arguments: Mapping[str, Any]) -> str:
    """Return a warning of fields that a release's LLM API may ignore with these arguments.

    Empty if it ignores none.
    """
    # The sampler in C++, which releases before 1.3.0rc26 have beside the default one, honours all.
    has_cpp_sampler = str(arguments.get("sampler_type")) == "TRTLLMSampler"
    if has_cpp_sampler or arguments.get("enable_trtllm_sampler"):  # the option's name in 1.0
        return ""
    return trtllm.ignored_fields(release)


# --- the engine ----------------------------------------------------------------------------------


class LlmApiEngine:
    """``llm``, made by module ``api``. Implements ``trtllm_bls.engines.base.Engine``.

    ``adapters``: directories of LoRA adapters, by name. ``processors`` of logits, by name.
    ``refusals``: the reason why this deployment refuses a field, by wire name.
    """

    def __init__(
        self,
        name: str,
        api: Any,
        llm: Any,
        capacity: EngineCapacity,
        adapters: Mapping[str, str] = {},
        processors: Mapping[str, Any] = {},
        refusals: Mapping[str, str] = {},
    ) -> None:
        self.name = name
        self._api = api
        self._llm = llm
        self._capacity = capacity
        self._adapters: dict[str, tuple[int, str]] = {}
        for number, (adapter, path) in enumerate(adapters.items(), 1):
            self._adapters[adapter] = number, path
        self._processors = processors
        self._refusals = {**_LLM_REFUSALS, **refusals}
        self._options_taken = inspect.signature(llm.generate_async).parameters.keys()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llm-api")
        self._closed = False

    async def capacity(self) -> EngineCapacity:
        """Return the capacity that the parameters state."""
        if self._closed:
            raise EngineUnavailable(f"{self.name}: the engine is closed")
        return self._capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """Generate as ``Engine.generate`` does."""
        trtllm.check(request, self._capacity, _LLM_INPUTS, self._refusals, _NOT_PASSED_ON)
        try:
            submit = partial(
                self._llm.generate_async,
                {"prompt_token_ids": list(request.input_ids)},
                sampling_params=self._sampling_params(request),
                streaming=True,
                **self._options(request),
            )
        except _REFUSALS as error:
            raise _refusal(printable(str(error))) from error
        return TaskChunks(partial(self._run, request, submit))

    async def close(self) -> None:
        """Shut the LLM down."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._thread.shutdown)
            await asyncio.to_thread(self._llm.shutdown)

    def _sampling_params(self, request: EngineRequest) -> Any:
        single, _ = trtllm.stop_ids(request)
        fields: dict[str, Any] = trtllm.sampling_fields(request.sampling)
        if request.sampling.min_tokens:
            fields["min_tokens"] = request.sampling.min_tokens
        if single:
            fields |= {"stop_token_ids": single, "include_stop_str_in_output": True}
        if request.bad_sequences:
            fields["bad_token_ids"] = [words[0] for words in request.bad_sequences]
        if request.embedding_bias:
            bias = dense_bias(request.embedding_bias, self._capacity.vocab_size or 0)
            torch = importlib.import_module("torch")  # it is there where TensorRT-LLM is
            fields["embedding_bias"] = torch.from_numpy(bias)
        if request.wants.log_probs:
            fields["logprobs"] = max(1, request.wants.top_log_probs)
        if request.wants.perf_metrics or self._capacity.speculates:
            fields["return_perf_metrics"] = True
        if request.guide:
            fields["guided_decoding"] = self._guide(request.guide)
        processor = trtllm.text_of(request.extras, "logits_post_processor_name")
        if processor:
            field = "logits_post_processor_name"
            fields["logits_processor"] = _configured(field, processor, self._processors)
        api_fields = getattr(self._api.SamplingParams, "__dataclass_fields__", fields)
        for name in fields.keys() - api_fields.keys():
            raise Unsupported(name, "the LLM API of this TensorRT-LLM has no such parameter")
        end_id = request.end_id
        if end_id is None:
            end_id = -1
        pad_id = request.pad_id
        if pad_id is None:
            pad_id = end_id
        return self._api.SamplingParams(
            max_tokens=request.max_tokens,
            n=len(trtllm.sequence_ends(request)),
            end_id=end_id,
            pad_id=pad_id,
            detokenize=False,
            **fields,
        )

    def _guide(self, guide: Guide) -> Any:
        make = self._class("GuidedDecodingParams")
        text = trtllm.guide_text(guide)  # also checks the guide of a kind without text
        if guide.kind == "json":
            return make(json_object=True)
        return make(**{_LLM_GUIDES.get(guide.kind, guide.kind): text})

    def _class(self, name: str) -> Any:
        return getattr(importlib.import_module("tensorrt_llm.llmapi"), name)

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        """Return the arguments of ``generate_async`` beside ids and sampling."""
        extras = request.extras
        options: dict[str, Any] = {}
        adapter = self._adapter(request.adapter)
        if adapter is not None:
            options["lora_request"] = adapter
        retention = self._retention(extras)
        if retention is not None:
            options["kv_cache_retention_config"] = retention
        salt = request.cache_salt
        if salt is not None and (salt.required or "cache_salt" in self._options_taken):
            options["cache_salt"] = str(salt)
        if "priority" in extras:
            options["priority"] = float(extras["priority"].reshape(-1)[0])
        if request.traceparent and "trace_headers" in self._options_taken:
            options["trace_headers"] = {"traceparent": request.traceparent}
        for name in options.keys() - self._options_taken:
            raise Unsupported(name, "the LLM API of this TensorRT-LLM does not take it")
        return options

    def _adapter(self, adapter: Adapter | None) -> Any:
        if adapter is None:
            return None
        name = adapter.name
        path = adapter.path
        number = adapter.task_id
        if name and path is None and number is None:
            number, path = _configured("lora_name", name, self._adapters)
        if name is None or path is None or number is None:
            problem = "send it alone, for an adapter of the server's model.yaml, or all of"
            raise InvalidRequest("lora_name", f"{problem} {', '.join(_ADAPTER)}")
        fields = {"lora_name": name, "lora_int_id": number, "lora_path": path}
        if adapter.checkpoint_source:
            fields["lora_ckpt_source"] = adapter.checkpoint_source
        make = importlib.import_module("tensorrt_llm.executor.request").LoRARequest
        return make(**fields)

    def _retention(self, extras: Mapping[str, Array]) -> Any:
        if extras.keys().isdisjoint(_RETENTION):
            return None
        columns: list[list[Any]] = []
        for name in _RETENTION:
            column: list[Any] = []
            if name in extras:
                column = extras[name].reshape(-1).tolist()
            columns.append(column)
        starts, ends, priorities, durations, decode_priority, decode_duration = columns
        durations = durations or [-1] * len(starts)
        if not len(starts) == len(ends) == len(priorities) == len(durations):
            raise InvalidRequest("retention_token_range_ends", "each range needs all its values")
        make = self._class("KvCacheRetentionConfig")
        ranges = []
        for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True):
            range_end = None if end < 0 else end
            ranges.append(make.TokenRangeRetentionConfig(start, range_end, priority, _ms(duration)))
        decode_priority = decode_priority or [_DECODE_PRIORITY]
        return make(ranges, *decode_priority, *map(_ms, decode_duration))

    async def _run(
        self, request: EngineRequest, submit: Callable[[], Any], chunks: QueuedChunks
    ) -> None:
        sequences = trtllm.sequence_ends(request)
        has_begun = False
        result = None
        submission = self._thread.submit(_on_loop, asyncio.get_running_loop(), submit)
        try:
            result = await asyncio.wrap_future(submission)
            async for step in result:
                has_begun = True
                for output in step.outputs:
                    sequence = sequences[output.index]
                    if not sequence.received:
                        sequence.cached_tokens = getattr(step, "cached_tokens", None)
                    chunks.put(_read(output, sequence, request.wants, step.finished))
                if all(sequence.done for sequence in sequences):
                    return
            raise EngineError(f"{self.name} ended its stream before its last token")
        except TrtllmBlsError:
            raise
        except Exception as error:  # the API is not ours: it may raise anything
            problem = printable(str(error)) or type(error).__name__
            is_refusal = isinstance(error, _REFUSALS)
            if not is_refusal and not isinstance(error, self._class("RequestError")):
                # The engine itself failed: its worker is dead, or it shuts down.
                log.error("%s: %s: %s", self.name, type(error).__name__, problem)
                raise EngineUnavailable(f"{self.name}: {problem}") from error
            if has_begun:
                raise EngineError(problem) from error
            raise _refusal(problem) from error
        finally:
            # A closed engine takes no more work, and its LLM ends running requests by itself.
            if not self._closed and (result is None or not result.finished):
                self._thread.submit(_abort, submission)


def _refusal(text: str) -> InvalidRequest:
    """Return the LLM API's refusal of a request, in its own words, as an error."""
    if says_too_long(text):
        return PromptTooLong("input_ids", problem=text)
    return InvalidRequest("request", text)


def _on_loop(loop: asyncio.AbstractEventLoop, submit: Callable[[], Any]) -> Any:
    """Submit on the submitting thread, as if ``loop`` ran there.

    ``LLM`` binds the answer to the running loop.
    """
    asyncio._set_running_loop(loop)
    try:
        return submit()
    finally:
        asyncio._set_running_loop(None)


def _abort(submission: Future[Any]) -> None:
    """Abort a submitted request, on the submitting thread; one that has ended must stay alone."""
    if submission.cancelled() or submission.exception() is not None:
        return
    result = submission.result()
    if not result.finished:
        result.abort()


def _configured(field: str, name: str, choices: Mapping[str, Any]) -> Any:
    if name not in choices:
        names = ", ".join(choices) or "none"
        raise InvalidRequest(field, f"{name!r} is not in the server's model.yaml: {names}")
    return choices[name]


def _ms(value: int) -> timedelta | None:
    return None if value < 0 else timedelta(milliseconds=value)


# --- answers -------------------------------------------------------------------------------------


def _read(
    output: Any, sequence: trtllm.SequenceEnds, wants: Wants, finished: bool
) -> list[EngineChunk]:
    """Return the chunks of the new tokens in an output, which the LLM API repeats as it grows.

    ``finished``: all sequences have ended. The LLM API may give a reason for the last one alone.
    """
    if sequence.done:
        return []
    num_read = sequence.received
    ids = tuple(output.token_ids[num_read:])
    log_probs = None
    top_log_probs = None
    if wants.log_probs:
        entries = output.logprobs[num_read:]
        log_probs, top_log_probs = _scores(ids, entries, wants.top_log_probs)
    reason = trtllm.REASONS.get(output.finish_reason)
    has_ended = output.finish_reason is not None or finished
    if reason is FinishReason.END_ID and output.stop_reason in sequence.stop_ids:
        reason = FinishReason.STOP
    chunks = sequence.feed(ids, log_probs, top_log_probs, ended=has_ended, reason=reason)
    figures = getattr(output, "request_perf_metrics", None)
    if sequence.done and figures is not None:
        metrics = _metrics(figures)
        num_drafted = metrics.total_draft_tokens
        num_accepted = metrics.total_accepted_draft_tokens or 0
        for chunk in chunks:
            if wants.perf_metrics:
                chunk.metrics = metrics
            if num_drafted:
                chunk.speculation = SpeculationStats(drafted=num_drafted, accepted=num_accepted)
    return chunks


def _metrics(figures: Any) -> EngineMetrics:
    """Read ``RequestPerfMetrics``. The clock is the worker's, which runs on this machine."""
    times = figures.timing_metrics
    blocks = figures.kv_cache_metrics
    drafts = figures.speculative_decoding
    return EngineMetrics(
        kv_cache_alloc_new_blocks=blocks.num_new_allocated_blocks,
        kv_cache_reused_blocks=blocks.num_reused_blocks,
        kv_cache_alloc_total_blocks=blocks.num_total_allocated_blocks,
        total_accepted_draft_tokens=drafts.total_accepted_draft_tokens,
        total_draft_tokens=drafts.total_draft_tokens,
        arrival_time_ns=_nanoseconds(times.arrival_time),
        first_scheduled_time_ns=_nanoseconds(times.first_scheduled_time),
        first_token_time_ns=_nanoseconds(times.first_token_time),
        last_token_time_ns=_nanoseconds(times.last_token_time),
    )


def _nanoseconds(time: timedelta) -> int:
    return round(time / timedelta(microseconds=1) * 1000)


def _scores(
    ids: tuple[int, ...], entries: Iterable[Any], top: int
) -> tuple[list[float], list[TopLogProbs] | None]:
    """Return the log-probabilities of ids, and those of the ``top`` likeliest ids of each place.

    An entry is the chosen id's number, or those of several ids by id.
    """
    log_probs: list[float] = []
    top_log_probs: list[TopLogProbs] = []
    for token, entry in zip(ids, entries, strict=False):
        values: Mapping[int, Any] = {token: entry}
        if isinstance(entry, Mapping):
            values = entry
        numbers = {}
        for token_id, value in values.items():
            numbers[token_id] = float(getattr(value, "logprob", value))
        if len(numbers) < top:
            problem = f"{top}; this TensorRT-LLM reports {len(numbers)} at each place"
            raise Unsupported("return_top_log_probs", problem)
        log_probs.append(numbers[token])
        top_log_probs.append(trtllm.likeliest(numbers.items(), top))
    if len(log_probs) != len(ids):
        raise EngineError("the engine's log-probabilities are not those of its tokens")
    return log_probs, top_log_probs if top else None
