"""The tensors of the text models: ``tensorrt_llm_bls``, and what goes into ``preprocessing`` and
``postprocessing``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

import numpy as np

from trtllm_bls.admission import RequestLimits
from trtllm_bls.contract import BLS, ENGINE, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import (
    Array,
    EngineMetrics,
    SpeculationRequest,
    TextChunk,
    TextRequest,
    TokenIds,
)
from trtllm_bls.wire.fields import Fields, extras_of, read_rows, sampling_of, wants_of
from trtllm_bls.wire.scores import metrics_arrays, score_arrays

_SPECULATION = tuple(field.name for field in fields(SpeculationRequest))
_NO_SPECULATION = SpeculationRequest()
# W3C Trace Context: version, trace id, parent id, flags. What is not of this form is no context.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def text_requests(
    arrays: Mapping[str, Array],
    request_id: str,
    limits: RequestLimits | None = None,
    parameters: str = "{}",
) -> list[TextRequest]:
    """One request per batch row. ``parameters`` are Triton's of the request, as JSON.

    Raises ``InvalidRequest`` naming the tensor.
    """
    requests = [_text_request(row, request_id) for row in read_rows(BLS, arrays, limits)]
    if traceparent := _traceparent(parameters):
        requests = [replace(request, traceparent=traceparent) for request in requests]
    return requests


def _traceparent(parameters: str) -> str | None:
    if '"traceparent"' not in parameters:  # of nearly every request
        return None
    value = json.loads(parameters).get("traceparent")
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else None


def prompt_requests(
    arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[TextRequest]:
    """The same of the inputs of ``preprocessing``, without an id."""
    return [_text_request(row, "") for row in read_rows(PREPROCESSING, arrays, limits)]


def _text_request(row: Fields, request_id: str) -> TextRequest:
    if "max_tokens" not in row:
        raise InvalidRequest("max_tokens", "is missing")
    return TextRequest(
        request_id=request_id,
        text=row.get("text_input"),
        messages=row.get("messages"),
        max_tokens=row["max_tokens"],
        stream=row.get("stream", False),
        sampling=sampling_of(row),
        num_return_sequences=row.get("num_return_sequences", 1),
        stop_words=_words(row, "stop_words"),
        include_stop=row.get("include_stop", False),
        bad_words=_words(row, "bad_words"),
        embedding_bias=_bias(row),
        end_id=row.get("end_id"),
        pad_id=row.get("pad_id"),
        exclude_input_in_output=row.get("exclude_input_in_output", True),
        add_special_tokens=row.get("add_special_tokens"),
        skip_special_tokens=row.get("skip_special_tokens"),
        speculation=_speculation(row),
        prediction=row.get("prediction"),
        stream_interval=row.get("stream_interval", 1),
        timeout_s=row["timeout_ms"] / 1000 if "timeout_ms" in row else None,
        wants=wants_of(row),
        prompt_table_extra_id=row.get("prompt_table_extra_id"),
        extras=extras_of(row),
    )


def _speculation(row: Fields) -> SpeculationRequest:
    values = {name: row[name] for name in _SPECULATION if name in row}
    return SpeculationRequest(**values) if values else _NO_SPECULATION


def _words(row: Fields, key: str) -> tuple[str, ...]:
    """A list of words; empty strings are the wire's way to say "none"."""
    return tuple(word for word in row.get(key, ()) if word)


def _bias(row: Fields) -> tuple[tuple[str, float], ...]:
    """Words and the weight of each, paired."""
    if "embedding_bias_words" not in row and "embedding_bias_weights" not in row:
        return ()
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
    if chunk.metrics is not None:
        arrays |= metrics_arrays(chunk.metrics)
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
            )
        )
    return arrays


def _text(text: str) -> Array:
    """``[1]``: as TensorRT-LLM's own models send text, without a batch dimension."""
    return np.array([text.encode("utf-8")], dtype=np.object_)
