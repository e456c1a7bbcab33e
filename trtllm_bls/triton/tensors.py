"""Tensors to requests and answers to tensors, for our models.

In this order: the rows of any model, requests to ``tensorrt_llm``, requests of text, answers, and
the tensors of upstream's ``llmapi`` model. Triton checks types, rank and required inputs before a
model runs. This module checks the rest against the contract: ranges, UTF-8, one value for a scalar,
and contradictions between two names of one option.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trtllm_bls.errors import InvalidRequest, PromptTooLong, Unsupported
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.types import (
    ENGINE_METRICS,
    Array,
    Draft,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    TextChunk,
    TextRequest,
    TokenIds,
    Wants,
    field_names,
)
from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    LLMAPI,
    POSTPROCESSING,
    PREPROCESSING,
    Model,
    Tensor,
)
from trtllm_bls.wire.request_fields import TYPED_INPUTS, typed_fields
from trtllm_bls.wire.traceparent import valid_traceparent
from trtllm_bls.wire.words import unpack_words

Fields = dict[str, Any]

MAX_STRINGS = 1024  # in one row; decoding many more would hold up every other stream
_MAX_WORD_BYTES = 1024  # limit of an item of a list; a word has at most 256 characters

_SAMPLING_FIELD_NAMES = field_names(Sampling)
_WANTS_FIELD_NAMES = field_names(Wants)
_SPECULATION_FIELD_NAMES = field_names(SpeculationRequest)
# The inputs of fields whose value is not the input's own. Code below makes it.
_CONVERTED = {
    *("input_ids", "max_tokens", "streaming", "exclude_input_in_output", "embedding_bias"),
    *("stop_words", "bad_words", "stop_sequences", "bad_sequences", "messages"),
    *TYPED_INPUTS,
}


def _copied_fields(kind: type[TextRequest] | type[EngineRequest], model: Model) -> tuple[str, ...]:
    """Return the fields of a request that are copied from the input of the same name."""
    inputs = {tensor.key for tensor in model.inputs} - _CONVERTED
    return tuple([name for name in field_names(kind) if name in inputs])


_TEXT_REQUEST_FIELDS = _copied_fields(TextRequest, BLS)
_ENGINE_REQUEST_FIELDS = _copied_fields(EngineRequest, ENGINE)
_WANT_KEYS = frozenset(f"return_{name}" for name in _WANTS_FIELD_NAMES)
# The inputs that have a field in this package's requests. Every other engine input is an extra.
_FIELD_KEYS = {
    *_WANT_KEYS,
    *_SAMPLING_FIELD_NAMES,
    *("input_ids", "input_lengths", "max_tokens", "streaming", "num_return_sequences"),
    *("end_id", "pad_id", "stop_sequences", "bad_sequences", "embedding_bias"),
    *("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    *("exclude_input_in_output", "stop", "decoder_input_ids", "decoder_input_lengths"),
    *TYPED_INPUTS,
}
_EXTRAS = {tensor.key: tensor for tensor in ENGINE.inputs if tensor.key not in _FIELD_KEYS}

# --- rows of inputs to values ---------------------------------------------------------------


def read_rows(
    model: Model, arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[Fields]:
    """Return the values of every batch row by field name, without the inputs that were not sent.

    One-element tensors become ``int``, ``float``, ``bool`` or ``str``, and STRING tensors of lists
    become tuples of ``str``. All others stay arrays, without the batch dimension. Sizes are checked
    against ``limits`` before anything is decoded. Raises ``InvalidRequest`` with the tensor's name.
    """
    inputs: list[tuple[Tensor, Array]] = []
    for tensor in model.inputs:
        if tensor.name in arrays:
            inputs.append((tensor, arrays[tensor.name]))
    if not inputs:
        raise InvalidRequest("inputs", f"none of {model.name}'s inputs was sent")
    first_tensor, first_array = inputs[0]
    batch_size = len(first_array) if first_array.ndim else 0
    if not batch_size:
        raise InvalidRequest(first_tensor.name, "has no batch rows")
    for tensor, array in inputs:
        if array.ndim == 0 or array.shape[0] != batch_size:
            problem = f"shape {list(array.shape)} does not have the batch size {batch_size}"
            raise InvalidRequest(tensor.name, problem)
    if limits is not None:
        _check_sizes(inputs, batch_size, limits)
    rows = []
    for row in range(batch_size):
        values: Fields = {}
        names: dict[str, str] = {}  # the tensor that each value came from
        for tensor, array in inputs:
            value = _read_value(tensor, array[row])
            if tensor.key in names and values[tensor.key] != value:
                raise InvalidRequest(
                    tensor.name,
                    f"{value} contradicts {names[tensor.key]} = {values[tensor.key]}; "
                    "they are two names of one option, send one of them",
                )
            values[tensor.key] = value
            names[tensor.key] = tensor.name
        rows.append(values)
    return rows


def _check_sizes(inputs: list[tuple[Tensor, Array]], rows: int, limits: RequestLimits) -> None:
    total = 0
    for tensor, array in inputs:
        if tensor.dtype != "STRING":
            total += array.nbytes
            continue
        _check_strings(tensor.name, array.size // rows)
        for item in array.flat:
            size = len(item)
            total += size
            if tensor.single:
                limits.check("max_prompt_bytes", tensor.name, size, "bytes")
            elif size > _MAX_WORD_BYTES:
                problem = f"one of {size} bytes; at most {_MAX_WORD_BYTES} are allowed"
                raise InvalidRequest(tensor.name, problem)
    limits.check("max_request_bytes", "inputs", total, "bytes")


def _check_strings(name: str, number: int) -> None:
    if number > MAX_STRINGS:
        raise InvalidRequest(name, f"{number} strings; at most {MAX_STRINGS} are allowed")


def _read_value(tensor: Tensor, element: Any) -> Any:
    if not tensor.single:
        if tensor.dtype != "STRING":
            return element
        _check_strings(tensor.name, np.size(element))
        return tuple([_decoded(tensor.name, item) for item in np.asarray(element).reshape(-1)])
    value = element
    if isinstance(element, (np.ndarray, np.generic)):
        if element.size != 1:
            problem = f"expected one value per prompt, got {element.size}"
            raise InvalidRequest(tensor.name, problem)
        value = element.item()
    # An element of a one-dimensional array of objects is the object itself, not a numpy value.
    if tensor.dtype == "STRING":
        return _decoded(tensor.name, value)
    bounds = tensor.bounds
    if bounds is not None and not bounds.low < value < bounds.high:
        tensor.check(value)  # only a value at or beyond a bound needs the full check
    return bool(value) if tensor.dtype == "BOOL" else value


def _decoded(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"not valid UTF-8 at byte {error.start}") from None


def _request_fields(row: Fields, names: Iterable[str]) -> dict[str, Any]:
    """Return a request's fields for the inputs in a row.

    They are the copied fields ``names``, and the fields that engine and text requests have in
    common. A ``top_p`` of 0 or less counts as not set. Inputs without a field become ``extras``:
    arrays without a batch dimension.
    """
    values: dict[str, Any] = {}
    for name in names:
        if name in row:
            values[name] = row[name]
    sampling: dict[str, Any] = {}
    for name in _SAMPLING_FIELD_NAMES:
        if name in row:
            sampling[name] = row[name]
    if sampling.get("top_p", 1) <= 0:
        del sampling["top_p"]
    if sampling:
        values["sampling"] = Sampling(**sampling)
    if not _WANT_KEYS.isdisjoint(row):
        wants: dict[str, Any] = {}
        for name in _WANTS_FIELD_NAMES:
            wants[name] = row.get(f"return_{name}", False)
        values["wants"] = Wants(**wants)
    if not TYPED_INPUTS.isdisjoint(row):
        values |= typed_fields(row)
    if not _EXTRAS.keys().isdisjoint(row):
        extras: dict[str, Array] = {}
        for key, tensor in _EXTRAS.items():
            if key in row:
                value = row[key]
                if tensor.single:
                    value = [value.encode() if tensor.dtype == "STRING" else value]
                extras[tensor.name] = np.asarray(value, dtype=tensor.numpy_type)
        values["extras"] = extras
    return values


# --- requests to tensorrt_llm ---------------------------------------------------------------


def is_stop(arrays: Mapping[str, Array]) -> bool:
    """Return True for a request that stops the request with the same id."""
    stop = arrays.get("stop")
    return stop is not None and bool(np.asarray(stop).reshape(-1)[:1].any())


def engine_requests(
    arrays: Mapping[str, Array],
    request_id: str,
    vocab_size: int | None,
    limits: RequestLimits | None = None,
    exclude_input: bool = True,
) -> list[tuple[EngineRequest, bool]]:
    """Return a request for each batch row, and True if its answer is without the prompt.

    ``vocab_size``: the length of an embedding bias; None if the engine does not tell it.
    ``exclude_input``: the default of a row's flag. Raises ``InvalidRequest`` with the name of the
    tensor.
    """
    rows = read_rows(ENGINE, arrays, limits)
    # TensorRT-LLM applies the first row's flag to all rows.
    streaming = bool(rows[0].get("streaming", False))
    requests = []
    for row in rows:
        for required in ("input_ids", "max_tokens"):
            if required not in row:
                raise InvalidRequest(ENGINE.input_names(required)[0], "is missing")
        ids = row["input_ids"]
        length = row.get("input_lengths", len(ids))
        if not 0 < length <= len(ids):
            problem = f"{length} is not allowed; input_ids holds {len(ids)} ids"
            raise InvalidRequest("input_lengths", problem)
        if len(row.get("decoder_input_ids", ())) > 1:
            problem = "the model has no encoder; send the text as input_ids"
            raise InvalidRequest("decoder_input_ids", problem)
        values = _request_fields(row, _ENGINE_REQUEST_FIELDS)
        if "stop_sequences" in row:
            values["stop_sequences"] = unpack_words("stop_words_list", row["stop_sequences"])
        if "bad_sequences" in row:
            values["bad_sequences"] = unpack_words("bad_words_list", row["bad_sequences"])
        bias = row.get("embedding_bias")
        if bias is not None and bias.size:
            values["embedding_bias"] = _token_bias(bias, vocab_size)
        draft_ids = row.get("draft_input_ids", ())
        if len(draft_ids):
            values["draft"] = Draft(
                token_ids=tuple(draft_ids.tolist()),
                logits=row.get("draft_logits"),
                acceptance_threshold=row.get("draft_acceptance_threshold"),
            )
        elif "draft_logits" in row and row["draft_logits"].size:
            raise InvalidRequest("draft_logits", "is only allowed together with draft_input_ids")
        request = EngineRequest(
            request_id=request_id,
            input_ids=tuple(ids[:length].tolist()),
            max_tokens=row["max_tokens"],
            streaming=streaming,
            **values,
        )
        requests.append((request, row.get("exclude_input_in_output", exclude_input)))
    return requests


def _token_bias(bias: Array, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """Return the token ids whose bias is not 0, with it. Raises ``InvalidRequest``."""
    if vocab_size is not None and len(bias) != vocab_size:
        problem = f"holds {len(bias)} values; the vocabulary has {vocab_size} tokens"
        raise InvalidRequest("embedding_bias", problem)
    if not np.isfinite(bias).all():
        raise InvalidRequest("embedding_bias", "holds a value that is not finite")
    (token_ids,) = np.nonzero(bias)
    return tuple([(int(token_id), float(bias[token_id])) for token_id in token_ids])


# --- requests of text, of prompts alone, and of token ids ------------------------------------


def text_requests(
    arrays: Mapping[str, Array],
    request_id: str,
    limits: RequestLimits | None = None,
    parameters: str = "{}",
    exclude_input: bool = True,
) -> list[TextRequest]:
    """Return a request for each batch row. ``parameters``: Triton's request parameters, as JSON.

    ``exclude_input``: the default of a row's flag. Raises ``InvalidRequest`` with the name of the
    tensor.
    """
    traceparent = None
    if '"traceparent"' in parameters:  # most requests have none
        traceparent = traceparent_of(parameters)
    rows = read_rows(BLS, arrays, limits)
    return [_text_request(row, request_id, exclude_input, traceparent) for row in rows]


def traceparent_of(parameters: str) -> str | None:
    """Return the trace context in a request's ``parameters``, which are JSON."""
    if not parameters:
        return None
    value = json.loads(parameters).get("traceparent")
    if isinstance(value, str):
        return valid_traceparent(value)
    return None


def prompt_requests(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TextRequest]:
    """Return a request without an id for each batch row of ``preprocessing``."""
    return [_text_request(row, "") for row in read_rows(PREPROCESSING, arrays, limits)]


def _text_request(
    row: Fields, request_id: str, exclude_input: bool = True, traceparent: str | None = None
) -> TextRequest:
    if "max_tokens" not in row:
        raise InvalidRequest("max_tokens", "is missing")
    values = _request_fields(row, _TEXT_REQUEST_FIELDS)
    speculation: dict[str, Any] = {}
    for name in _SPECULATION_FIELD_NAMES:
        if name in row:
            speculation[name] = row[name]
    if speculation:
        values["speculation"] = SpeculationRequest(**speculation)
    if "embedding_bias_words" in row or "embedding_bias_weights" in row:
        words = row.get("embedding_bias_words", ())
        weights = row.get("embedding_bias_weights", np.zeros(0))
        if len(words) != len(weights):
            raise InvalidRequest(
                "embedding_bias_weights",
                f"{len(weights)} weights for {len(words)} embedding_bias_words; one each is needed",
            )
        if not np.isfinite(weights).all():
            raise InvalidRequest("embedding_bias_weights", "holds a value that is not finite")
        biases = []
        for word, weight in zip(words, weights, strict=True):
            if word:
                biases.append((word, float(weight)))
        values["embedding_bias"] = tuple(biases)
    if "messages" in row:
        values["messages"] = _conversation(row["messages"])
    if "timeout_ms" in row:
        values["timeout_s"] = row["timeout_ms"] / 1000
    return TextRequest(
        request_id=request_id,
        text=row.get("text_input"),
        max_tokens=row["max_tokens"],
        # On the wire, an empty string means "none".
        stop_words=tuple(filter(None, row.get("stop_words", ()))),
        bad_words=tuple(filter(None, row.get("bad_words", ()))),
        exclude_input_in_output=row.get("exclude_input_in_output", exclude_input),
        traceparent=traceparent,
        **values,
    )


def _conversation(text: str) -> list[dict[str, Any]]:
    """Read a conversation. The chat template checks its form."""
    try:
        messages: list[dict[str, Any]] = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f'not JSON ({error}); send [{{"role": "user", "content": "..."}}]'
        raise InvalidRequest("messages", problem) from None
    return messages


def with_callers_name(error: InvalidRequest, request: TextRequest) -> InvalidRequest:
    """Return the engine's refusal with the field's name in ``tensorrt_llm_bls``."""
    name = error.field
    if name == "input_ids":
        name = "text_input" if request.messages is None else "messages"
    elif name in ENGINE.input_named:
        key = ENGINE.input_named[name].key
        names = BLS.input_names(key)
        if names and name not in names:
            name = names[0]
    if isinstance(error, PromptTooLong):
        return error.of_field(name)
    return type(error)(name, error.problem)


def sequence_ids(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TokenIds]:
    """Return the ids of each sequence in a request to ``postprocessing``, beam by beam.

    Raises ``InvalidRequest`` with the tensor's name.
    """
    sequences = []
    for row in read_rows(POSTPROCESSING, arrays, limits):
        beams = row["TOKENS_BATCH"]
        lengths = row["SEQUENCE_LENGTH"].tolist()
        is_fitting = len(lengths) == len(beams)
        for length in lengths:
            is_fitting = is_fitting and 0 <= length <= beams.shape[1]
        if not is_fitting:
            beginning = ", ".join(map(str, lengths[:8]))
            if len(lengths) > 8:
                beginning += ", ..."
            problem = f"[{beginning}] does not fit TOKENS_BATCH of shape {list(beams.shape)}"
            raise InvalidRequest("SEQUENCE_LENGTH", problem)
        for beam, length in zip(beams, lengths, strict=True):
            ids = tuple(beam[:length].tolist())
            lowest = min(ids, default=0)
            if lowest < 0:
                raise InvalidRequest("TOKENS_BATCH", f"{lowest} is not a token id")
            sequences.append(ids)
    return sequences


# --- answers --------------------------------------------------------------------------------

# Shapes are those of TensorRT-LLM's own models, with the batch dimension 1. top_log_prob_ids and
# top_log_probs, which are ours, are [1, T, alternatives].


class ChunkWriter:
    """Converts the chunks of one request to ``tensorrt_llm`` to arrays.

    It keeps the values that later responses repeat.
    """

    def __init__(self, request: EngineRequest, exclude_input: bool, row: int | None) -> None:
        self._request = request
        self._prompt = () if exclude_input or request.streaming else request.input_ids
        self._row = row  # None: the request has one row, and responses no batch_index
        self._log_probs: dict[int, Array] = {}  # by sequence, all so far
        self._context_logits: Array | None = None  # every response after the first has them, too

    def arrays(self, chunk: EngineChunk) -> dict[str, Array]:
        """Return all outputs that this chunk has, with the batch dimension 1."""
        request = self._request
        ids = [*self._prompt, *chunk.token_ids]
        arrays = {
            "output_ids": np.array([[ids]], dtype=np.int32),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
        }
        numbers: dict[str, float] = {}
        if self._row is not None:
            numbers["batch_index"] = self._row
        if request.num_return_sequences > 1:
            numbers["sequence_index"] = chunk.sequence_index
        if chunk.log_probs is not None:
            earlier_log_probs = self._log_probs.get(chunk.sequence_index, ())
            self._log_probs[chunk.sequence_index] = np.append(earlier_log_probs, chunk.log_probs)
        if chunk.context_logits is not None:
            self._context_logits = chunk.context_logits
        log_probs = self._log_probs.get(chunk.sequence_index)
        arrays |= _score_arrays(chunk, log_probs, self._context_logits, request.streaming)
        if chunk.top_log_probs:
            pairs = np.array(chunk.top_log_probs)[None]
            arrays["top_log_prob_ids"] = pairs[..., 0].astype(np.int32)
            arrays["top_log_probs"] = pairs[..., 1].astype(np.float32)
        if request.wants.num_input_tokens:
            numbers["num_input_tokens"] = len(request.input_ids)
        if request.wants.num_output_tokens:
            numbers["num_output_tokens"] = len(ids)
        if request.wants.perf_metrics:
            numbers |= _metrics(chunk.metrics, filled=True)
        elif chunk.speculation is not None:  # the engine speculates by itself
            numbers["total_draft_tokens"] = chunk.speculation.drafted
            numbers["total_accepted_draft_tokens"] = chunk.speculation.accepted
        if chunk.cached_tokens is not None:
            numbers["cached_tokens"] = chunk.cached_tokens
        if numbers:
            arrays |= _number_arrays(ENGINE, numbers)
        return arrays


def text_arrays(
    chunk: TextChunk, request: TextRequest, row: int | None, fill: bool = True
) -> dict[str, Array]:
    """Return all outputs that this chunk has. All but the texts have a batch dimension of 1.

    ``row``: the batch row; None if the request has only one. ``fill``: performance outputs that the
    request asks for and that are not known are 0, not absent.
    """
    arrays = {"text_output": _text(chunk.text)}
    numbers: dict[str, float] = {}
    if row is not None:
        numbers["batch_index"] = row
    if request.num_return_sequences > 1:
        numbers["sequence_index"] = chunk.sequence_index
    if chunk.log_probs or chunk.generation_logits or chunk.context_logits is not None:
        arrays |= _score_arrays(chunk, chunk.log_probs, chunk.context_logits, request.stream)
    if chunk.metrics is not None or request.wants.perf_metrics:
        numbers |= _metrics(chunk.metrics, filled=fill and request.wants.perf_metrics)
    ending = chunk.ending
    if ending is not None:
        arrays["finish_reason"] = _text(ending.finish_reason.value)
        if ending.stop_reason is not None:
            arrays["stop_reason"] = _text(ending.stop_reason)
        if ending.seed is not None:
            numbers["seed"] = ending.seed
        if request.wants.num_input_tokens:
            numbers["num_input_tokens"] = ending.prompt_tokens
        if request.wants.num_output_tokens:
            numbers["num_output_tokens"] = ending.completion_tokens
        speculation = ending.speculation
        if speculation is not None:
            # The sums over all rounds. The engine's own figures are those of the last round.
            numbers["num_draft_rounds"] = speculation.rounds
            drafts = EngineMetrics(
                total_draft_tokens=speculation.drafted,
                total_accepted_draft_tokens=speculation.accepted,
            )
            numbers |= _metrics(drafts, filled=False)
    if numbers:
        arrays |= _number_arrays(BLS, numbers)
    return arrays


def _text(text: str) -> Array:
    """Return a text as ``[1]``: TensorRT-LLM's own models send it without a batch dimension."""
    return np.array([text.encode("utf-8")], dtype=np.object_)


def _number_arrays(model: Model, numbers: Mapping[str, float]) -> dict[str, Array]:
    """Return each number as ``[1, 1]``, in the type of its output."""
    arrays: dict[str, Array] = {}
    for name, value in numbers.items():
        arrays[name] = np.array([[value]], dtype=model.output_named[name].numpy_type)
    return arrays


def _score_arrays(
    chunk: EngineChunk | TextChunk,
    log_probs: Sequence[float] | Array | None,
    context_logits: Array | None,
    streaming: bool,
) -> dict[str, Array]:
    """Return the scores that a chunk has.

    ``output_log_probs`` is ``[1, 1, T]``, ``cum_log_probs`` ``[1, 1]`` and ``context_logits``
    ``[1, prompt, vocab]``. ``generation_logits`` is ``[1, 1, steps, vocab]``, in a stream
    ``[1, steps, 1, vocab]``. TensorRT-LLM pads it to the token limit. This function does not,
    because a caller could fill this process's memory with padding.
    """
    arrays: dict[str, Array] = {}
    if log_probs is not None:
        arrays["output_log_probs"] = np.array(log_probs, dtype=np.float32)[None, None]
    if chunk.cum_log_prob is not None:
        arrays["cum_log_probs"] = np.array([[chunk.cum_log_prob]], dtype=np.float32)
    if context_logits is not None:
        arrays["context_logits"] = np.asarray(context_logits, dtype=np.float32)[None]
    if chunk.generation_logits is not None:
        rows = np.asarray(chunk.generation_logits, dtype=np.float32)
        arrays["generation_logits"] = rows[None, :, None] if streaming else rows[None, None]
    return arrays


def _metrics(metrics: EngineMetrics | None, filled: bool) -> dict[str, float]:
    """Return the performance outputs that are known. With ``filled`` the others are 0.

    TensorRT-LLM's own models send all of them on each response, and its client reads all.
    """
    values: dict[str, float] = {}
    for name in ENGINE_METRICS:
        value = getattr(metrics, name, None)
        if value is not None:
            values[name] = value
        elif filled:
            values[name] = 0
    if "total_draft_tokens" in values and "total_accepted_draft_tokens" in values:
        draft_tokens = values["total_draft_tokens"]
        values["acceptance_rate"] = 0.0
        if draft_tokens:
            values["acceptance_rate"] = values["total_accepted_draft_tokens"] / draft_tokens
    return values


# --- upstream's llmapi model ----------------------------------------------------------------

# Its tensors have no batch dimension. Our outputs have the types that upstream's configuration
# declares. Upstream's model sends others.
_MAX_TOKENS = 32  # the LLM API's own default
_OUTPUT_FLAGS = {  # the input that asks for an output
    "finish_reason": "return_finish_reason",
    "stop_reason": "return_stop_reason",
    "cumulative_logprob": "return_cumulative_logprob",
}


def as_text_inputs(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Convert its inputs to one row of those of ``tensorrt_llm_bls``. Raises ``InvalidRequest``."""
    if "text_input" not in arrays or arrays["text_input"].ndim != 1:
        raise InvalidRequest("text_input", "is missing or not one text: its shape must be [1]")
    best_of = arrays.get("sampling_param_best_of")
    if best_of is not None and (best_of != 1).any():
        problem = f"{best_of.reshape(-1)[0]}; one text is sent for a prompt, send 1"
        raise Unsupported("sampling_param_best_of", problem)
    inputs = {}
    for tensor in LLMAPI.inputs:
        if tensor.name in arrays:
            inputs[tensor.key] = arrays[tensor.name][None]
    inputs["text_input"] = arrays["text_input"][None, :1]
    inputs.setdefault("max_tokens", np.array([[_MAX_TOKENS]], np.int32))
    if inputs.keys().isdisjoint(("top_k", "top_p")) and (inputs.get("temperature", 0) != 0):
        # In the LLM API a temperature alone samples; here it needs top_p or top_k.
        inputs["top_p"] = np.array([[1.0]], np.float32)
    return {name: array for name, array in inputs.items() if name in BLS.input_named}


def as_llmapi_outputs(
    outputs: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """Convert outputs to those that upstream's model sends to a request with these inputs."""
    # Every response has both reasons.
    values = {"finish_reason": _text("None"), "stop_reason": _text("None")}
    for name, array in outputs.items():
        values[name] = array.reshape(-1)
    if values["finish_reason"][0] == b"end_id":
        values["finish_reason"] = _text("stop")  # upstream has one word for both
    llmapi_outputs = {}
    for tensor in LLMAPI.outputs:
        flag = _OUTPUT_FLAGS.get(tensor.name)
        is_requested = flag is None or (flag in inputs and inputs[flag].any())
        if is_requested and tensor.key in values:
            llmapi_outputs[tensor.name] = values[tensor.key]
    return llmapi_outputs
