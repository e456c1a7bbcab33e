"""TensorRT-LLM's LLM API, in this process, as an engine: ``tensorrt_llm.LLM``.

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
    *(GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT, "logits_post_processor_name"),
    *("lora_task_id", "lora_name", "lora_path", "lora_ckpt_source", "cache_salt", "priority"),
    *_RETENTION,
    *("embedding_bias", "return_perf_metrics"),
}
_LLM_REFUSALS = {
    "draft_input_ids": f"the LLM API takes no drafts; {_SPECULATES}",
    "bad_words_list": "the LLM API takes bad words of one token only",
    "lora_weights": "the LLM API loads adapters by name and directory: send lora_name",
}
_UNGUIDED = "the server's model.yaml sets no guided_decoding_backend; set it to xgrammar"
_EDITED = "with drafts, the LLM API lets a processor edit the rows of other requests"
# What the LLM API raises about a request, beside its own RequestError.
_REFUSALS = (TypeError, ValueError, NotImplementedError)
IGNORED_MEND = (
    "set sampler_type: TRTLLMSampler in model.yaml (1.0: enable_trtllm_sampler: true), or take "
    "1.3.0rc29 or later"
)
_LLM_GUIDES = {"json_schema": "json", "ebnf_grammar": "grammar"}  # others have one name
# Triton's own MPI job, where there is one, is not that of the workers which the LLM API starts.
_MPI_JOB = (
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_FIRST_RANKS", "OMPI_APP_CTX_NUM_PROCS"),
    *("OMPI_MCA_orte_", "ORTE_", "PMIX_", "PMI_"),
)


# --- loading -------------------------------------------------------------------------------------


def open_llm(
    name: str, parameters: EngineParameters, vocab_size: Callable[[], int]
) -> LlmApiEngine:
    """Load the model that ``parameters`` name. Raises ``SetupError``."""
    config = ModelYaml.read(parameters.model_yaml) if parameters.model_yaml else ModelYaml()
    gpus = gpus_of(parameters.gpu_device_ids, parameters.instance, parameters.instances)
    # Before the import, which opens the GPUs' files: the workers inherit both.
    for key in list(os.environ):
        if key.startswith(_MPI_JOB) and not key.startswith("PMIX_MCA_"):
            del os.environ[key]
    if gpus:
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpus, "TRTLLM_VISIBLE_DEVICES": gpus}
    if "telemetry_config" not in config.arguments:  # NVIDIA is told of the use where it says so
        os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")
    try:
        api = importlib.import_module("tensorrt_llm")
        merge = importlib.import_module("tensorrt_llm.llmapi.llm_utils")
    except ImportError as error:
        raise SetupError(f"engine llm_api needs TensorRT-LLM in this Python: {error}") from error
    names = {"max_batch": "max_batch_size", "max_sequence_tokens": "max_seq_len"}
    given = {api: size for own, api in names.items() if (size := getattr(parameters, own))}
    given["model"] = str(parameters.model_dir)
    if parameters.model_yaml is None:  # beside some arguments the LLM API refuses it
        given["guided_decoding_backend"] = "xgrammar"
    given |= {"gpus_per_node": len(gpus.split(","))} if gpus else {}
    processors = config.load_processors()
    try:
        arguments = merge.update_llm_args_with_extra_dict(given, dict(config.arguments))
        llm = api.LLM(**arguments)
    except (TypeError, ValueError) as error:  # pydantic's is a ValueError
        raise SetupError(f"engine llm_api: {printable(str(error))}") from error
    if warning := ignored_fields(getattr(api, "__version__", ""), arguments):
        log.warning("%s: %s; %s", name, warning, IGNORED_MEND)
    capacity = EngineCapacity(
        vocab_size=vocab_size(),  # not before: a tokenizer that is loaded first hides torch
        max_sequence_tokens=arguments.get("max_seq_len"),
        max_draft_tokens=0,
        tells_top_log_probs=True,
        speculates=_SPECULATES if arguments.get("speculative_config") else "",
    )
    refused = {}
    if not arguments.get("guided_decoding_backend"):
        refused[GUIDE_KIND_INPUT] = _UNGUIDED
    if capacity.speculates:
        refused["logits_post_processor_name"] = _EDITED
    return LlmApiEngine(name, api, llm, capacity, config.adapters, processors, refused)


def ignored_fields(release: str, arguments: Mapping[str, Any]) -> str:
    """A warning of what a release's LLM API may ignore with these arguments; else empty."""
    # The sampler in C++, which releases before 1.3.0rc26 have beside the default one, honours all.
    is_chosen = str(arguments.get("sampler_type")) == "TRTLLMSampler"
    if is_chosen or arguments.get("enable_trtllm_sampler"):  # as 1.0 calls it
        return ""
    return trtllm.ignored_fields(release)


# --- the engine ----------------------------------------------------------------------------------


class LlmApiEngine:
    """``llm``, made by module ``api``. Implements ``trtllm_bls.engines.base.Engine``.

    ``adapters``: directories of LoRA adapters, by name. ``processors`` of logits, by name.
    ``refused``: why a field is refused in this deployment, by wire name.
    """

    def __init__(
        self,
        name: str,
        api: Any,
        llm: Any,
        capacity: EngineCapacity,
        adapters: Mapping[str, str] = {},
        processors: Mapping[str, Any] = {},
        refused: Mapping[str, str] = {},
    ) -> None:
        self.name = name
        self._api = api
        self._llm = llm
        self._capacity = capacity
        self._adapters = {
            adapter: (i, path) for i, (adapter, path) in enumerate(adapters.items(), 1)
        }
        self._processors = processors
        self._refused = {**_LLM_REFUSALS, **refused}
        self._takes = inspect.signature(llm.generate_async).parameters.keys()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llm-api")
        self._closed = False

    async def capacity(self) -> EngineCapacity:
        """What the parameters tell."""
        if self._closed:
            raise EngineUnavailable(f"{self.name}: the engine is closed")
        return self._capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        trtllm.check(request, self._capacity, _LLM_INPUTS, self._refused, _NOT_PASSED_ON)
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
        if least := request.sampling.min_tokens:
            fields["min_tokens"] = least
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
        if guide := request.guide:
            kind = guide.kind
            text = trtllm.guide_text(guide)
            how = {"json_object": True} if kind == "json" else {_LLM_GUIDES.get(kind, kind): text}
            fields["guided_decoding"] = self._class("GuidedDecodingParams")(**how)
        if name := trtllm.text_of(request.extras, "logits_post_processor_name"):
            field = "logits_post_processor_name"
            fields["logits_processor"] = _known(field, name, self._processors)
        end = -1 if request.end_id is None else request.end_id
        known = getattr(self._api.SamplingParams, "__dataclass_fields__", fields)
        for name in fields.keys() - known.keys():
            raise Unsupported(name, "the LLM API of this TensorRT-LLM has no such parameter")
        return self._api.SamplingParams(
            max_tokens=request.max_tokens,
            n=len(trtllm.sequence_ends(request)),
            end_id=end,
            pad_id=end if request.pad_id is None else request.pad_id,
            detokenize=False,
            **fields,
        )

    def _class(self, name: str) -> Any:
        return getattr(importlib.import_module("tensorrt_llm.llmapi"), name)

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        """What ``generate_async`` is given beside ids and sampling."""
        extras = request.extras
        options: dict[str, Any] = {"lora_request": self._adapter(request.adapter)}
        options["kv_cache_retention_config"] = self._retention(extras)
        salt = request.cache_salt
        if salt is not None and (salt.required or "cache_salt" in self._takes):
            options["cache_salt"] = str(salt)
        if "priority" in extras:
            options["priority"] = float(extras["priority"].reshape(-1)[0])
        if request.traceparent and "trace_headers" in self._takes:
            options["trace_headers"] = {"traceparent": request.traceparent}
        options = {name: value for name, value in options.items() if value is not None}
        for name in options.keys() - self._takes:
            raise Unsupported(name, "the LLM API of this TensorRT-LLM does not take it")
        return options

    def _adapter(self, adapter: Adapter | None) -> Any:
        if adapter is None:
            return None
        name, path, number = adapter.name, adapter.path, adapter.task_id
        if name and path is None and number is None:
            number, path = _known("lora_name", name, self._adapters)
        if name is None or path is None or number is None:
            problem = "send it alone, for an adapter of the server's model.yaml, or all of"
            raise InvalidRequest("lora_name", f"{problem} {', '.join(_ADAPTER)}")
        source = adapter.checkpoint_source
        make = importlib.import_module("tensorrt_llm.executor.request").LoRARequest
        more = {"lora_ckpt_source": source} if source else {}
        return make(lora_name=name, lora_int_id=number, lora_path=path, **more)

    def _retention(self, extras: Mapping[str, Array]) -> Any:
        values = {name: extras[name].reshape(-1).tolist() for name in _RETENTION if name in extras}
        if not values:
            return None
        *ranges, lasting, decode, decode_lasting = (values.get(name, []) for name in _RETENTION)
        lasting = lasting or [-1] * len(ranges[0])
        if len({len(column) for column in (*ranges, lasting)}) > 1:
            raise InvalidRequest("retention_token_range_ends", "each range needs all its values")
        make = self._class("KvCacheRetentionConfig")
        kept = [
            make.TokenRangeRetentionConfig(first, None if last < 0 else last, rank, _ms(lasts))
            for first, last, rank, lasts in zip(*ranges, lasting, strict=True)
        ]
        return make(kept, *(decode or [_DECODE_PRIORITY]), *map(_ms, decode_lasting))

    async def _run(
        self, request: EngineRequest, submit: Callable[[], Any], chunks: QueuedChunks
    ) -> None:
        sequences, begun, result = trtllm.sequence_ends(request), False, None
        submitted = self._thread.submit(_on_loop, asyncio.get_running_loop(), submit)
        try:
            result = await asyncio.wrap_future(submitted)
            async for step in result:
                begun = True
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
        except Exception as error:  # of an API that is not ours
            what = printable(str(error)) or type(error).__name__
            refused = isinstance(error, _REFUSALS)
            if not refused and not isinstance(error, self._class("RequestError")):
                # The engine's own: its worker is dead, or it shuts down.
                log.error("%s: %s: %s", self.name, type(error).__name__, what)
                raise EngineUnavailable(f"{self.name}: {what}") from error
            if begun:
                raise EngineError(what) from error
            raise _refusal(what) from error
        finally:
            # A closed engine takes no more work, and its LLM ends by itself what still runs.
            if not self._closed and (result is None or not result.finished):
                self._thread.submit(_abort, submitted)


def _refusal(text: str) -> InvalidRequest:
    """Return the LLM API's refusal of a request, in its own words, as an error."""
    if says_too_long(text):
        return PromptTooLong("input_ids", problem=text)
    return InvalidRequest("request", text)


def _on_loop(loop: asyncio.AbstractEventLoop, submit: Callable[[], Any]) -> Any:
    """In the submitting thread. ``LLM`` binds the answer to the loop that it finds running."""
    asyncio._set_running_loop(loop)
    try:
        return submit()
    finally:
        asyncio._set_running_loop(None)


def _abort(submitted: Future[Any]) -> None:
    """In the submitting thread, after the submission. What has ended must not be aborted."""
    if (
        not submitted.cancelled()
        and submitted.exception() is None
        and not submitted.result().finished
    ):
        submitted.result().abort()


def _known(field: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        names = ", ".join(known) or "none"
        raise InvalidRequest(field, f"{name!r} is not in the server's model.yaml: {names}")
    return known[name]


def _ms(value: int) -> timedelta | None:
    return None if value < 0 else timedelta(milliseconds=value)


# --- answers -------------------------------------------------------------------------------------


def _read(
    output: Any, sequence: trtllm.SequenceEnds, wants: Wants, finished: bool
) -> list[EngineChunk]:
    """The chunks of what is new in an output, which the LLM API repeats as it grows.

    ``finished``: all sequences have ended. The LLM API may tell only the last one why.
    """
    if sequence.done:
        return []
    num_read = sequence.received
    ids = tuple(output.token_ids[num_read:])
    values = best = None
    if wants.log_probs:
        values, best = _scores(ids, output.logprobs[num_read:], wants.top_log_probs)
    reason = trtllm.REASONS.get(output.finish_reason)
    ended = output.finish_reason is not None or finished
    if reason is FinishReason.END_ID and output.stop_reason in sequence.stop_ids:
        reason = FinishReason.STOP
    chunks = sequence.feed(ids, values, best, ended=ended, reason=reason)
    figures = getattr(output, "request_perf_metrics", None)
    if sequence.done and figures is not None:
        metrics = _metrics(figures)
        drafted, accepted = metrics.total_draft_tokens, metrics.total_accepted_draft_tokens or 0
        for chunk in chunks:
            chunk.metrics = metrics if wants.perf_metrics else None
            if drafted:
                chunk.speculation = SpeculationStats(drafted=drafted, accepted=accepted)
    return chunks


def _metrics(figures: Any) -> EngineMetrics:
    """Of ``RequestPerfMetrics``. The clock is the worker's, which is of this machine."""
    blocks, drafts = figures.kv_cache_metrics, figures.speculative_decoding
    at = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    times = {f"{name}_ns": getattr(figures.timing_metrics, name) for name in at}
    return EngineMetrics(
        kv_cache_alloc_new_blocks=blocks.num_new_allocated_blocks,
        kv_cache_reused_blocks=blocks.num_reused_blocks,
        kv_cache_alloc_total_blocks=blocks.num_total_allocated_blocks,
        total_accepted_draft_tokens=drafts.total_accepted_draft_tokens,
        total_draft_tokens=drafts.total_draft_tokens,
        **{name: round(time / timedelta(microseconds=1) * 1000) for name, time in times.items()},
    )


def _scores(
    ids: tuple[int, ...], entries: Iterable[Any], top: int
) -> tuple[list[float], list[TopLogProbs] | None]:
    """Log-probabilities, and those of the ``top`` likeliest ids of each place.

    An entry is the chosen id's number, or those of several ids by id.
    """
    values, best = [], []
    for token, entry in zip(ids, entries, strict=False):
        listed: Mapping[int, Any] = entry if isinstance(entry, Mapping) else {token: entry}
        found = {each: float(getattr(value, "logprob", value)) for each, value in listed.items()}
        if len(found) < top:
            problem = f"{top}; this TensorRT-LLM reports {len(found)} at each place"
            raise Unsupported("return_top_log_probs", problem)
        values.append(found[token])
        best.append(trtllm.likeliest(found.items(), top))
    if len(values) != len(ids):
        raise EngineError("the engine's log-probabilities are not those of its tokens")
    return values, best if top else None
