"""Inputs to text requests, and text chunks to outputs: the tensors of ``tensorrt_llm_bls``, and the
inputs of ``preprocessing`` and ``postprocessing``.

``read_rows`` and ``common_fields`` also read what is sent to ``tensorrt_llm``. Triton has checked
types, rank and required inputs before a model runs. Here the rest is checked against the contract
table: ranges, UTF-8, one value where one is meant, two names of one option that contradict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from trtllm_bls.admission import RequestLimits
from trtllm_bls.contract import BLS, ENGINE, POSTPROCESSING, PREPROCESSING, Model, Tensor
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import (
    Array,
    EngineMetrics,
    Sampling,
    SpeculationRequest,
    TextChunk,
    TextRequest,
    TokenIds,
    Wants,
)
from trtllm_bls.wire.scores import metrics_arrays, score_arrays

Fields = dict[str, Any]

MAX_STRINGS = 1024  # of one row; decoding many more would hold up every other stream
_MAX_WORD_BYTES = 1024  # of each of several; a word has at most 256 characters

_SAMPLING = tuple(field.name for field in fields(Sampling))
_WANTS = tuple(field.name for field in fields(Wants))
_SPECULATION = tuple(field.name for field in fields(SpeculationRequest))
_NO_SAMPLING, _NO_WANTS, _NO_SPECULATION = Sampling(), Wants(), SpeculationRequest()
# What this package's requests have fields for. Every other engine input is passed on as an extra.
_OPENED = {
    *(f"return_{name}" for name in _WANTS),
    *_SAMPLING,
    *("input_ids", "input_lengths", "max_tokens", "streaming", "num_return_sequences"),
    *("end_id", "pad_id", "stop_sequences", "bad_sequences", "embedding_bias"),
    *("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    *("exclude_input_in_output", "stop", "decoder_input_ids", "decoder_input_lengths"),
}
EXTRAS = tuple(tensor for tensor in ENGINE.inputs if tensor.key not in _OPENED)
_EXTRA_KEYS = frozenset(tensor.key for tensor in EXTRAS)
_WANT_KEYS = frozenset(f"return_{name}" for name in _WANTS)
# W3C Trace Context: version, trace id, parent id, flags. What is not of this form is no context.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


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
    rows = len(known[0][1]) if known[0][1].ndim else 0
    if not rows:
        raise InvalidRequest(known[0][0].name, "has no batch rows")
    for tensor, array in known:
        if array.ndim == 0 or array.shape[0] != rows:
            raise InvalidRequest(
                tensor.name, f"shape {list(array.shape)} does not have the batch size {rows}"
            )
    if limits is not None:
        _check_sizes(known, rows, limits)
    return [_read_row(known, row) for row in range(rows)]


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


def _read_row(known: list[tuple[Tensor, Array]], row: int) -> Fields:
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
    return values


def _read_value(tensor: Tensor, element: Any) -> Any:
    if not tensor.single:
        return _texts(tensor, element) if tensor.dtype == "STRING" else element
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


def _texts(tensor: Tensor, strings: Any) -> tuple[str, ...]:
    _check_strings(tensor.name, np.size(strings))
    return tuple(_decoded(tensor.name, item) for item in np.asarray(strings).reshape(-1))


def _decoded(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"not valid UTF-8 at byte {error.start}") from None


def common_fields(row: Fields) -> dict[str, Any]:
    """The fields of one row that every request has, to an engine or of text.

    A ``top_p`` of 0 or less counts as not set. Inputs that nothing here opens become ``extras``, as
    arrays without batch dimension.
    """
    sampling, wants = _NO_SAMPLING, _NO_WANTS
    given = {name: row[name] for name in _SAMPLING if name in row}
    if given.get("top_p", 1) <= 0:
        del given["top_p"]
    if given:
        sampling = Sampling(**given)
    if not _WANT_KEYS.isdisjoint(row):
        wants = Wants(**{name: row.get(f"return_{name}", False) for name in _WANTS})
    extras: dict[str, Array] = {}
    if not _EXTRA_KEYS.isdisjoint(row):
        found = [tensor for tensor in EXTRAS if tensor.key in row]
        extras = {tensor.name: _unopened(tensor, row[tensor.key]) for tensor in found}
    return {
        "sampling": sampling,
        "wants": wants,
        "num_return_sequences": row.get("num_return_sequences", 1),
        "end_id": row.get("end_id"),
        "pad_id": row.get("pad_id"),
        "extras": extras,
    }


def _unopened(tensor: Tensor, value: Any) -> Array:
    if tensor.single:
        value = [value.encode() if tensor.dtype == "STRING" else value]
    return np.asarray(value, dtype=tensor.numpy_type)


# --- text requests and chunks --------------------------------------------------------------


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
    rows = read_rows(BLS, arrays, limits)
    requests = [_text_request(row, request_id, exclude_input) for row in rows]
    if trace := traceparent_of(parameters):
        requests = [replace(request, traceparent=trace) for request in requests]
    return requests


def traceparent_of(parameters: str) -> str | None:
    """The trace context among a request's ``parameters``, which are JSON."""
    if '"traceparent"' not in parameters:  # as in most requests
        return None
    value = json.loads(parameters).get("traceparent")
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else None


def prompt_requests(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TextRequest]:
    """One request per batch row of ``preprocessing``, without an id."""
    return [_text_request(row, "") for row in read_rows(PREPROCESSING, arrays, limits)]


def _text_request(row: Fields, request_id: str, exclude_input: bool = True) -> TextRequest:
    if "max_tokens" not in row:
        raise InvalidRequest("max_tokens", "is missing")
    speculation = {name: row[name] for name in _SPECULATION if name in row}
    biased = "embedding_bias_words" in row or "embedding_bias_weights" in row
    return TextRequest(
        request_id=request_id,
        text=row.get("text_input"),
        messages=row.get("messages"),
        max_tokens=row["max_tokens"],
        stream=row.get("stream", False),
        # An empty string is the wire's way to say "none".
        stop_words=tuple(filter(None, row.get("stop_words", ()))),
        include_stop=row.get("include_stop", False),
        bad_words=tuple(filter(None, row.get("bad_words", ()))),
        embedding_bias=_bias(row) if biased else (),
        exclude_input_in_output=row.get("exclude_input_in_output", exclude_input),
        add_special_tokens=row.get("add_special_tokens"),
        skip_special_tokens=row.get("skip_special_tokens"),
        speculation=SpeculationRequest(**speculation) if speculation else _NO_SPECULATION,
        prediction=row.get("prediction"),
        stream_interval=row.get("stream_interval", 1),
        timeout_s=row["timeout_ms"] / 1000 if "timeout_ms" in row else None,
        prompt_table_extra_id=row.get("prompt_table_extra_id"),
        **common_fields(row),
    )


def _bias(row: Fields) -> tuple[tuple[str, float], ...]:
    """Words and the weight of each, paired."""
    words = row.get("embedding_bias_words", ())
    weights = row.get("embedding_bias_weights", np.zeros(0))
    if len(words) != len(weights):
        raise InvalidRequest(
            "embedding_bias_weights",
            f"{len(weights)} weights for {len(words)} embedding_bias_words; one each is needed",
        )
    if not np.isfinite(weights).all():
        raise InvalidRequest("embedding_bias_weights", "holds a value that is not finite")
    return tuple((word, float(weight)) for word, weight in zip(words, weights, strict=True) if word)


def with_callers_name(error: InvalidRequest, request: TextRequest) -> InvalidRequest:
    """The engine's refusal under the name by which the caller sent the field."""
    if error.field == "input_ids":
        name = "text_input" if request.messages is None else "messages"
    else:
        tensor = ENGINE.input_named.get(error.field)
        names = [own.name for own in BLS.inputs if tensor is not None and own.key == tensor.key]
        name = error.field if error.field in names or not names else names[0]
    return type(error)(name, error.problem)


def sequence_ids(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TokenIds]:
    """The ids of each sequence given to ``postprocessing``, beam by beam, cut to its length.

    Raises ``InvalidRequest`` naming the tensor.
    """
    return [ids for row in read_rows(POSTPROCESSING, arrays, limits) for ids in _beams(row)]


def _beams(row: Fields) -> Iterator[TokenIds]:
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
        yield ids


def text_arrays(chunk: TextChunk, request: TextRequest, row: int | None) -> dict[str, Array]:
    """Every output this chunk can fill; all but the texts have a batch dimension of 1.

    ``row`` is the batch row, ``None`` when the request had only one.
    """
    arrays: dict[str, Array] = {"text_output": _text(chunk.text)}
    if row is not None:
        arrays["batch_index"] = np.array([[row]], dtype=np.int32)
    if request.num_return_sequences > 1:
        arrays["sequence_index"] = np.array([[chunk.sequence_index]], dtype=np.int32)
    if chunk.log_probs or chunk.generation_logits or chunk.context_logits is not None:
        arrays |= score_arrays(
            chunk.log_probs,
            chunk.cum_log_prob,
            chunk.context_logits,
            chunk.generation_logits,
            streaming=request.stream,
        )
    if chunk.metrics is not None or request.wants.perf_metrics:
        arrays |= metrics_arrays(chunk.metrics, filled=request.wants.perf_metrics)
    if chunk.ending is not None:
        arrays |= _ending_arrays(chunk, request)
    return arrays


def _ending_arrays(chunk: TextChunk, request: TextRequest) -> dict[str, Array]:
    ending = chunk.ending
    assert ending is not None
    arrays = {"finish_reason": _text(ending.finish_reason.value)}
    if ending.stop_reason is not None:
        arrays["stop_reason"] = _text(ending.stop_reason)
    if ending.seed is not None:
        arrays["seed"] = np.array([[ending.seed]], dtype=np.uint64)
    if request.wants.num_input_tokens:
        arrays["num_input_tokens"] = np.array([[ending.prompt_tokens]], dtype=np.int32)
    if request.wants.num_output_tokens:
        arrays["num_output_tokens"] = np.array([[ending.completion_tokens]], dtype=np.int32)
    if ending.speculation is not None:  # over all rounds, not the last one's as the engine sees it
        done = ending.speculation
        arrays["num_draft_rounds"] = np.array([[done.rounds]], dtype=np.int32)
        arrays |= metrics_arrays(
            EngineMetrics(
                total_draft_tokens=done.drafted, total_accepted_draft_tokens=done.accepted
            ),
            filled=False,
        )
    return arrays


def _text(text: str) -> Array:
    """``[1]``: as TensorRT-LLM's own models send text, without a batch dimension."""
    return np.array([text.encode("utf-8")], dtype=np.object_)
