"""The tensors of our models, as the models themselves see them: inputs read, answers written.

In this order: the rows of any model, requests to ``tensorrt_llm``, requests of text, answers, and
the tensors of upstream's ``llmapi`` model. Triton has checked types, rank and required inputs
before a model runs. Here the rest is checked against the contract table: ranges, UTF-8, one value
where one is meant, two names of one option that contradict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
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

MAX_STRINGS = 1024  # of one row; decoding many more would hold up every other stream
_MAX_WORD_BYTES = 1024  # of each of several; a word has at most 256 characters

_SAMPLING_FIELD_NAMES = tuple(field.name for field in fields(Sampling))
_WANTS_FIELD_NAMES = tuple(field.name for field in fields(Wants))
_SPECULATION = tuple(field.name for field in fields(SpeculationRequest))
# Inputs of a request's own fields, of which code below makes the value.
_CONVERTED = {
    *("input_ids", "max_tokens", "streaming", "exclude_input_in_output", "embedding_bias"),
    *("stop_words", "bad_words", "stop_sequences", "bad_sequences", "messages"),
    *TYPED_INPUTS,
}


def _copied(kind: type[TextRequest] | type[EngineRequest], model: Model) -> tuple[str, ...]:
    """The fields of a request that have an input of their name and are copied from it."""
    inputs = {tensor.key for tensor in model.inputs} - _CONVERTED
    return tuple(field.name for field in fields(kind) if field.name in inputs)


_TEXT_REQUEST, _ENGINE_REQUEST = _copied(TextRequest, BLS), _copied(EngineRequest, ENGINE)
_WANT_KEYS = frozenset(f"return_{name}" for name in _WANTS_FIELD_NAMES)
# What this package's requests have fields for. Every other engine input is passed on as an extra.
_OPENED = {
    *_WANT_KEYS,
    *_SAMPLING_FIELD_NAMES,
    *("input_ids", "input_lengths", "max_tokens", "streaming", "num_return_sequences"),
    *("end_id", "pad_id", "stop_sequences", "bad_sequences", "embedding_bias"),
    *("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    *("exclude_input_in_output", "stop", "decoder_input_ids", "decoder_input_lengths"),
    *TYPED_INPUTS,
}
_EXTRAS = {tensor.key: tensor for tensor in ENGINE.inputs if tensor.key not in _OPENED}

# --- rows of inputs to values ---------------------------------------------------------------


def read_rows(
    model: Model, arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[Fields]:
    """The values of every batch row by field name; what was not sent is not in the dict.

    One-element tensors become ``int``, ``float``, ``bool`` or ``str``, lists of STRING tuples of
    ``str``; everything else stays an array without its batch dimension. Sizes are checked against
    ``limits`` before anything is decoded. Raises ``InvalidRequest`` naming the tensor.
    """
    known = [(tensor, arrays[tensor.name]) for tensor in model.inputs if tensor.name in arrays]
    if not known:
        raise InvalidRequest("inputs", f"none of {model.name}'s inputs was sent")
    number = len(known[0][1]) if known[0][1].ndim else 0
    if not number:
        raise InvalidRequest(known[0][0].name, "has no batch rows")
    for tensor, array in known:
        if array.ndim == 0 or array.shape[0] != number:
            problem = f"shape {list(array.shape)} does not have the batch size {number}"
            raise InvalidRequest(tensor.name, problem)
    if limits is not None:
        _check_sizes(known, number, limits)
    rows = []
    for row in range(number):
        values: Fields = {}
        spelt: dict[str, str] = {}
        for tensor, array in known:
            value = _read_value(tensor, array[row])
            if tensor.key in spelt and values[tensor.key] != value:
                raise InvalidRequest(
                    tensor.name,
                    f"{value} contradicts {spelt[tensor.key]} = {values[tensor.key]}; "
                    "they are two names of one option, send one of them",
                )
            values[tensor.key] = value
            spelt[tensor.key] = tensor.name
        rows.append(values)
    return rows


def _check_sizes(known: list[tuple[Tensor, Array]], rows: int, limits: RequestLimits) -> None:
    total = 0
    for tensor, array in known:
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
        return tuple(_decoded(tensor.name, item) for item in np.asarray(element).reshape(-1))
    value = element
    if isinstance(element, (np.ndarray, np.generic)):
        if element.size != 1:
            problem = f"expected one value per prompt, got {element.size}"
            raise InvalidRequest(tensor.name, problem)
        value = element.item()
    # An element of a one-dimensional array of objects is the object itself, not a numpy value.
    if tensor.dtype == "STRING":
        return _decoded(tensor.name, value)
    if (bounds := tensor.bounds) is not None and not bounds.low < value < bounds.high:
        tensor.check(value)  # at a bound or beyond it
    return bool(value) if tensor.dtype == "BOOL" else value


def _decoded(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"not valid UTF-8 at byte {error.start}") from None


def _given_fields(row: Fields, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a request that have an input each, as far as the row has it: ``names``, and
    what requests to an engine and of text have alike.

    A ``top_p`` of 0 or less counts as not set. Inputs that nothing here opens become ``extras``, as
    arrays without batch dimension.
    """
    values = {name: row[name] for name in names if name in row}
    sampling = {name: row[name] for name in _SAMPLING_FIELD_NAMES if name in row}
    if sampling.get("top_p", 1) <= 0:
        del sampling["top_p"]
    if sampling:
        values["sampling"] = Sampling(**sampling)
    if not _WANT_KEYS.isdisjoint(row):
        values["wants"] = Wants(
            **{name: row.get(f"return_{name}", False) for name in _WANTS_FIELD_NAMES}
        )
    if not TYPED_INPUTS.isdisjoint(row):
        values |= typed_fields(row)
    if not _EXTRAS.keys().isdisjoint(row):
        extras = values["extras"] = {}
        for tensor in [tensor for key, tensor in _EXTRAS.items() if key in row]:
            value = row[tensor.key]
            if tensor.single:
                value = [value.encode() if tensor.dtype == "STRING" else value]
            extras[tensor.name] = np.asarray(value, dtype=tensor.numpy_type)
    return values


# --- requests to tensorrt_llm ---------------------------------------------------------------


def is_stop(arrays: Mapping[str, Array]) -> bool:
    """Whether this is a stop request for the request with the same id."""
    stop = arrays.get("stop")
    return stop is not None and bool(np.asarray(stop).reshape(-1)[:1].any())


def engine_requests(
    arrays: Mapping[str, Array],
    request_id: str,
    vocab_size: int | None,
    limits: RequestLimits | None = None,
    exclude_input: bool = True,
) -> list[tuple[EngineRequest, bool]]:
    """One request per batch row, and whether its answer leaves the prompt out, for which
    ``exclude_input`` holds where the row does not say. Raises ``InvalidRequest`` naming the tensor.

    ``vocab_size``: the length an embedding bias must have; ``None`` where the engine is silent.
    """
    rows = read_rows(ENGINE, arrays, limits)
    # TensorRT-LLM applies the first row's flag to all rows.
    streaming = bool(rows[0].get("streaming", False))
    requests = []
    for row in rows:
        for required in ("input_ids", "max_tokens"):
            if required not in row:
                name = next(tensor.name for tensor in ENGINE.inputs if tensor.key == required)
                raise InvalidRequest(name, "is missing")
        ids = row["input_ids"]
        length = row.get("input_lengths", len(ids))
        if not 0 < length <= len(ids):
            problem = f"{length} is not allowed; input_ids holds {len(ids)} ids"
            raise InvalidRequest("input_lengths", problem)
        if len(row.get("decoder_input_ids", ())) > 1:
            problem = "the model has no encoder; send the text as input_ids"
            raise InvalidRequest("decoder_input_ids", problem)
        values = _given_fields(row, _ENGINE_REQUEST)
        for key, name in (
            ("stop_sequences", "stop_words_list"),
            ("bad_sequences", "bad_words_list"),
        ):
            if key in row:
                values[key] = unpack_words(name, row[key])
        if (bias := row.get("embedding_bias")) is not None and bias.size:
            if vocab_size is not None and len(bias) != vocab_size:
                problem = f"holds {len(bias)} values; the vocabulary has {vocab_size} tokens"
                raise InvalidRequest("embedding_bias", problem)
            if not np.isfinite(bias).all():
                raise InvalidRequest("embedding_bias", "holds a value that is not finite")
            (where,) = np.nonzero(bias)
            values["embedding_bias"] = tuple((int(token), float(bias[token])) for token in where)
        if len(drafted := row.get("draft_input_ids", ())):
            values["draft"] = Draft(
                token_ids=tuple(drafted.tolist()),
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


# --- requests of text, of prompts alone, and of token ids ------------------------------------


def text_requests(
    arrays: Mapping[str, Array],
    request_id: str,
    limits: RequestLimits | None = None,
    parameters: str = "{}",
    exclude_input: bool = True,
) -> list[TextRequest]:
    """One request per batch row. ``parameters`` are Triton's of the request, as JSON.

    ``exclude_input`` holds for a request that does not say. Raises ``InvalidRequest`` naming the
    tensor.
    """
    trace = None
    if '"traceparent"' in parameters:  # most requests have none
        trace = traceparent_of(parameters)
    rows = read_rows(BLS, arrays, limits)
    return [_text_request(row, request_id, exclude_input, trace) for row in rows]


def traceparent_of(parameters: str) -> str | None:
    """The trace context among a request's ``parameters``, which are JSON."""
    if not parameters:
        return None
    value = json.loads(parameters).get("traceparent")
    return valid_traceparent(value) if isinstance(value, str) else None


def prompt_requests(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TextRequest]:
    """One request per batch row of ``preprocessing``, without an id."""
    return [_text_request(row, "") for row in read_rows(PREPROCESSING, arrays, limits)]


def _text_request(
    row: Fields, request_id: str, exclude_input: bool = True, traceparent: str | None = None
) -> TextRequest:
    if "max_tokens" not in row:
        raise InvalidRequest("max_tokens", "is missing")
    values = _given_fields(row, _TEXT_REQUEST)
    if speculation := {name: row[name] for name in _SPECULATION if name in row}:
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
        pairs = zip(words, weights, strict=True)
        values["embedding_bias"] = tuple((word, float(weight)) for word, weight in pairs if word)
    if "messages" in row:
        values["messages"] = _conversation(row["messages"])
    if "timeout_ms" in row:
        values["timeout_s"] = row["timeout_ms"] / 1000
    return TextRequest(
        request_id=request_id,
        text=row.get("text_input"),
        max_tokens=row["max_tokens"],
        # An empty string is the wire's way to say "none".
        stop_words=tuple(filter(None, row.get("stop_words", ()))),
        bad_words=tuple(filter(None, row.get("bad_words", ()))),
        exclude_input_in_output=row.get("exclude_input_in_output", exclude_input),
        traceparent=traceparent,
        **values,
    )


def _conversation(text: str) -> list[dict[str, Any]]:
    """Read a conversation, whose form is the chat template's business."""
    try:
        messages: list[dict[str, Any]] = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f'not JSON ({error}); send [{{"role": "user", "content": "..."}}]'
        raise InvalidRequest("messages", problem) from None
    return messages


def with_callers_name(error: InvalidRequest, request: TextRequest) -> InvalidRequest:
    """The engine's refusal under the name by which the caller sent the field."""
    if error.field == "input_ids":
        name = "text_input" if request.messages is None else "messages"
    else:
        tensor = ENGINE.input_named.get(error.field)
        names = [own.name for own in BLS.inputs if tensor is not None and own.key == tensor.key]
        name = error.field if error.field in names or not names else names[0]
    if isinstance(error, PromptTooLong):
        return error.of_field(name)
    return type(error)(name, error.problem)


def sequence_ids(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TokenIds]:
    """The ids of each sequence given to ``postprocessing``, beam by beam, cut to its length.

    Raises ``InvalidRequest`` naming the tensor.
    """
    sequences = []
    for row in read_rows(POSTPROCESSING, arrays, limits):
        batch, lengths = row["TOKENS_BATCH"], row["SEQUENCE_LENGTH"]
        if len(lengths) != len(batch) or not all(0 <= n <= batch.shape[1] for n in lengths):
            first = ", ".join(map(str, lengths[:8].tolist()))
            raise InvalidRequest(
                "SEQUENCE_LENGTH",
                f"[{first}{', ...' if len(lengths) > 8 else ''}] does not fit TOKENS_BATCH "
                f"of shape {list(batch.shape)}",
            )
        for beam, length in zip(batch, lengths, strict=True):
            ids = tuple(beam[:length].tolist())
            if (low := min(ids, default=0)) < 0:
                raise InvalidRequest("TOKENS_BATCH", f"{low} is not a token id")
            sequences.append(ids)
    return sequences


# --- answers --------------------------------------------------------------------------------

# Shapes are as TensorRT-LLM's own models send them, batch dimension 1 included; top_log_prob_ids
# and top_log_probs, which are ours, are [1, T, alternatives].


class ChunkWriter:
    """Chunks of one request to ``tensorrt_llm`` as arrays; keeps what later responses repeat."""

    def __init__(self, request: EngineRequest, exclude_input: bool, row: int | None) -> None:
        self._request = request
        self._prompt = () if exclude_input or request.streaming else request.input_ids
        self._row = row  # None: the request had one row, so no batch_index is sent
        self._log_probs: dict[int, Array] = {}  # by sequence, all so far
        self._context_logits: Array | None = None  # on every response from the first that has them

    def arrays(self, chunk: EngineChunk) -> dict[str, Array]:
        """Every output this chunk can fill, batch dimension 1 included."""
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
            known = self._log_probs.get(chunk.sequence_index, ())
            self._log_probs[chunk.sequence_index] = np.append(known, chunk.log_probs)
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
        elif (done := chunk.speculation) is not None:  # of an engine that speculates by itself
            numbers["total_draft_tokens"] = done.drafted
            numbers["total_accepted_draft_tokens"] = done.accepted
        if chunk.cached_tokens is not None:
            numbers["cached_tokens"] = chunk.cached_tokens
        return arrays | _number_arrays(ENGINE, numbers) if numbers else arrays


def text_arrays(
    chunk: TextChunk, request: TextRequest, row: int | None, fill: bool = True
) -> dict[str, Array]:
    """Every output this chunk can fill; all but the texts have a batch dimension of 1.

    ``row`` is the batch row, ``None`` when the request had only one. ``fill``: performance outputs
    that were asked for and are not known are 0, not absent.
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
    if (ending := chunk.ending) is not None:
        arrays["finish_reason"] = _text(ending.finish_reason.value)
        if ending.stop_reason is not None:
            arrays["stop_reason"] = _text(ending.stop_reason)
        if ending.seed is not None:
            numbers["seed"] = ending.seed
        if request.wants.num_input_tokens:
            numbers["num_input_tokens"] = ending.prompt_tokens
        if request.wants.num_output_tokens:
            numbers["num_output_tokens"] = ending.completion_tokens
        if (done := ending.speculation) is not None:
            # Over all rounds; the engine's own figures are those of the last one.
            numbers["num_draft_rounds"] = done.rounds
            drafts = EngineMetrics(
                total_draft_tokens=done.drafted, total_accepted_draft_tokens=done.accepted
            )
            numbers |= _metrics(drafts, filled=False)
    return arrays | _number_arrays(BLS, numbers) if numbers else arrays


def _text(text: str) -> Array:
    """``[1]``: as TensorRT-LLM's own models send text, without a batch dimension."""
    return np.array([text.encode("utf-8")], dtype=np.object_)


def _number_arrays(model: Model, numbers: Mapping[str, int | float]) -> dict[str, Array]:
    """Each number as ``[1, 1]``, in the type of its output.

    Compiled code turns whatever is typed ``float`` into one, and a seed has more digits.
    """
    return {
        name: np.array([[value]], dtype=model.output_named[name].numpy_type)
        for name, value in numbers.items()
    }


def _score_arrays(
    chunk: EngineChunk | TextChunk,
    log_probs: Sequence[float] | Array | None,
    context_logits: Array | None,
    streaming: bool,
) -> dict[str, Array]:
    """Those of the outputs that are given: ``output_log_probs`` ``[1, 1, T]``, ``cum_log_probs``
    ``[1, 1]``, ``context_logits`` ``[1, prompt, vocab]``, and ``generation_logits``.

    The last are ``[1, 1, steps, vocab]``, or ``[1, steps, 1, vocab]`` of a stream. TensorRT-LLM
    pads them to the token limit. Here they are not padded, because a caller could fill this
    process's memory with rows that mean nothing.
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
    """The performance outputs that are known; where ``filled``, 0 for the others.

    TensorRT-LLM's own models send all of them on each response, and its client reads all.
    """
    found = {name: getattr(metrics, name, None) for name in ENGINE_METRICS}
    drafted, accepted = found["total_draft_tokens"], found["total_accepted_draft_tokens"]
    values = {name: value or 0 for name, value in found.items() if filled or value is not None}
    if filled or (drafted is not None and accepted is not None):
        values["acceptance_rate"] = (accepted or 0) / drafted if drafted else 0.0
    return values


# --- upstream's llmapi model ----------------------------------------------------------------

# Its tensors have no batch dimension. Outputs have the types that upstream's configuration
# declares, which its model does not keep.
_MAX_TOKENS = 32  # the LLM API's own default
_ASKED = {
    "finish_reason": "return_finish_reason",
    "stop_reason": "return_stop_reason",
    "cumulative_logprob": "return_cumulative_logprob",
}


def as_text_inputs(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """One row of its inputs as those of ``tensorrt_llm_bls``. Raises ``InvalidRequest``."""
    if "text_input" not in arrays or arrays["text_input"].ndim != 1:
        raise InvalidRequest("text_input", "is missing or not one text: its shape must be [1]")
    best_of = arrays.get("sampling_param_best_of")
    if best_of is not None and (best_of != 1).any():
        problem = f"{best_of.reshape(-1)[0]}; one text is sent for a prompt, send 1"
        raise Unsupported("sampling_param_best_of", problem)
    named = {tensor.name: tensor.key for tensor in LLMAPI.inputs}
    inputs = {named[name]: array[None] for name, array in arrays.items() if name in named}
    inputs["text_input"] = arrays["text_input"][None, :1]
    inputs.setdefault("max_tokens", np.array([[_MAX_TOKENS]], np.int32))
    if inputs.keys().isdisjoint(("top_k", "top_p")) and (inputs.get("temperature", 0) != 0):
        inputs["top_p"] = np.array([[1.0]], np.float32)  # a temperature alone samples there
    return {name: array for name, array in inputs.items() if name in BLS.input_named}


def as_llmapi_outputs(
    outputs: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """What upstream's model sends to a request with the inputs ``asked``."""
    flags = {None, *[name for name, array in inputs.items() if array.any()]}
    reasons = {name: _text("None") for name in ("finish_reason", "stop_reason")}  # of each response
    known = {name: array.reshape(-1) for name, array in {**reasons, **outputs}.items()}
    if known["finish_reason"][0] == b"end_id":
        known["finish_reason"] = _text("stop")  # there is one word for both
    return {
        tensor.name: known[tensor.key]
        for tensor in LLMAPI.outputs
        if tensor.key in known and _ASKED.get(tensor.name) in flags
    }
