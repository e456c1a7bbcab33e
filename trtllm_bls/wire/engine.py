"""The ``tensorrt_llm`` tensors, from both sides.

The door of an engine uses ``engine_requests`` and ``chunk_arrays``; whoever calls an engine over
Triton uses ``request_arrays`` and ``ChunkReader``. Both sides meet in the same messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from trtllm_bls.contract import ENGINE, Tensor
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.messages import (
    Array,
    Draft,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    Sampling,
    TokenIds,
    Wants,
)
from trtllm_bls.wire.fields import Fields, read_rows
from trtllm_bls.wire.words import pack_words, unpack_words

_SAMPLING = tuple(field.name for field in fields(Sampling))
_WANTS = tuple(field.name for field in fields(Wants))
_SPELLINGS = {
    tensor.key: tuple(other for other in ENGINE.inputs if other.key == tensor.key)
    for tensor in ENGINE.inputs
}
_METRICS = tuple(field.name for field in fields(EngineMetrics))
# Opened by this package's messages; every other engine input is carried as an extra.
_OPENED = {
    *(f"return_{name}" for name in _WANTS),
    *_SAMPLING,
    *("input_ids", "input_lengths", "max_tokens", "streaming", "num_return_sequences"),
    *("end_id", "pad_id", "stop_sequences", "bad_sequences", "embedding_bias"),
    *("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    *("exclude_input_in_output", "stop"),
}
EXTRAS = tuple(tensor for tensor in ENGINE.inputs if tensor.key not in _OPENED)


@dataclass(frozen=True)
class EngineCall:
    """One row of a request to ``tensorrt_llm``, with what only the wire is concerned with."""

    request: EngineRequest
    exclude_input: bool | None  # None: the model's parameter decides


# --- the engine's side ----------------------------------------------------------------------


def is_stop(arrays: Mapping[str, Array]) -> bool:
    """Whether this is a stop request for the request whose id it carries."""
    stop = arrays.get("stop")
    return stop is not None and bool(np.asarray(stop).reshape(-1)[:1].any())


def engine_requests(
    arrays: Mapping[str, Array], request_id: str, vocab_size: int | None
) -> list[EngineCall]:
    """One call per batch row. Raises ``InvalidRequest`` naming the tensor.

    ``vocab_size``: the length an embedding bias must have; ``None`` where the engine is silent.
    """
    rows = read_rows(ENGINE, arrays)
    # The wire's rule: with several rows, the first row's flag applies to all.
    streaming = bool(rows[0].get("streaming", False))
    return [_engine_call(row, request_id, streaming, vocab_size) for row in rows]


def _engine_call(
    row: Fields, request_id: str, streaming: bool, vocab_size: int | None
) -> EngineCall:
    for required in ("input_ids", "max_tokens"):
        if required not in row:
            name = next(tensor.name for tensor in ENGINE.inputs if tensor.key == required)
            raise InvalidRequest(name, "is missing")
    ids = row["input_ids"]
    length = row.get("input_lengths", len(ids))
    if not 0 < length <= len(ids):
        raise InvalidRequest(
            "input_lengths", f"{length} is not allowed; input_ids holds {len(ids)} ids"
        )
    request = EngineRequest(
        request_id=request_id,
        input_ids=tuple(ids[:length].tolist()),
        max_tokens=row["max_tokens"],
        streaming=streaming,
        sampling=sampling_of(row),
        num_return_sequences=row.get("num_return_sequences", 1),
        end_id=row.get("end_id"),
        pad_id=row.get("pad_id"),
        stop_sequences=_words(row, "stop_sequences", "stop_words_list"),
        bad_sequences=_words(row, "bad_sequences", "bad_words_list"),
        embedding_bias=_sparse(row.get("embedding_bias"), vocab_size),
        draft=_draft(row),
        wants=wants_of(row),
        extras=extras_of(row),
    )
    return EngineCall(request, row.get("exclude_input_in_output"))


def sampling_of(row: Fields) -> Sampling:
    """The sampling options of one row; ``top_p <= 0`` counts as not set."""
    values = {name: row[name] for name in _SAMPLING if name in row}
    if values.get("top_p", 1) <= 0:
        del values["top_p"]
    return Sampling(**values)


def wants_of(row: Fields) -> Wants:
    """Which outputs beside the tokens one row asks for."""
    return Wants(**{name: row.get(f"return_{name}", False) for name in _WANTS})


def extras_of(row: Fields) -> dict[str, Array]:
    """The inputs that are carried unopened, as arrays without batch dimension."""
    return {
        tensor.name: _carried(tensor, row[tensor.key]) for tensor in EXTRAS if tensor.key in row
    }


def _carried(tensor: Tensor, value: Any) -> Array:
    if tensor.single:
        value = [value.encode() if tensor.dtype == "STRING" else value]
    return np.asarray(value, dtype=tensor.numpy_type)


def _words(row: Fields, key: str, name: str) -> tuple[TokenIds, ...]:
    return unpack_words(name, row[key]) if key in row else ()


def _sparse(bias: Array | None, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    if bias is None or not bias.size:
        return ()
    if vocab_size is not None and len(bias) != vocab_size:
        raise InvalidRequest(
            "embedding_bias", f"holds {len(bias)} values; the vocabulary has {vocab_size} tokens"
        )
    if not np.isfinite(bias).all():
        raise InvalidRequest("embedding_bias", "holds a value that is not finite")
    (where,) = np.nonzero(bias)
    return tuple((int(token), float(bias[token])) for token in where)


def _draft(row: Fields) -> Draft | None:
    ids = row.get("draft_input_ids")
    if ids is None or len(ids) == 0:
        if "draft_logits" in row and row["draft_logits"].size:
            raise InvalidRequest("draft_logits", "is only allowed together with draft_input_ids")
        return None
    return Draft(
        token_ids=tuple(ids.tolist()),
        logits=row.get("draft_logits"),
        acceptance_threshold=row.get("draft_acceptance_threshold"),
    )


class ChunkWriter:
    """Chunks of one request to arrays; remembers what "so far" means for the log-probs."""

    def __init__(self, call: EngineCall, exclude_input: bool, row: int | None) -> None:
        self._request = call.request
        self._echo = not exclude_input and not call.request.streaming
        self._row = row  # None: the request had one row, so no batch_index is sent
        self._log_probs: dict[int, list[float]] = {}

    def arrays(self, chunk: EngineChunk) -> dict[str, Array]:
        """Every output this chunk can fill, batch dimension 1 included."""
        prompt = self._request.input_ids if self._echo else ()
        ids = [*prompt, *chunk.token_ids]
        arrays: dict[str, Array] = {
            "output_ids": np.array([[ids]], dtype=np.int32),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
        }
        if self._row is not None:
            arrays["batch_index"] = _one(self._row)
        if self._request.num_return_sequences > 1:
            arrays["sequence_index"] = _one(chunk.sequence_index)
        self._scores(chunk, arrays)
        if self._request.wants.num_input_tokens:
            arrays["num_input_tokens"] = _one(len(self._request.input_ids))
        if self._request.wants.num_output_tokens:
            arrays["num_output_tokens"] = _one(len(ids))
        if chunk.metrics is not None:
            arrays |= metrics_arrays(chunk.metrics)
        return arrays

    def _scores(self, chunk: EngineChunk, arrays: dict[str, Array]) -> None:
        if chunk.log_probs is not None:
            so_far = self._log_probs.setdefault(chunk.sequence_index, [])
            so_far.extend(chunk.log_probs)
            arrays["output_log_probs"] = np.array([[so_far]], dtype=np.float32)
        if chunk.cum_log_prob is not None:
            arrays["cum_log_probs"] = np.array([[chunk.cum_log_prob]], dtype=np.float32)
        if chunk.context_logits is not None:
            arrays["context_logits"] = np.asarray(chunk.context_logits, dtype=np.float32)[None]
        if chunk.generation_logits is not None:
            arrays["generation_logits"] = generation_logits(
                chunk.generation_logits, self._request.streaming
            )


def generation_logits(rows: Array, streaming: bool) -> Array:
    """``[steps, vocab]`` in the wire's shape, which differs by mode (axes swapped upstream).

    Not padded to the token limit as upstream does: a caller could fill our memory with that, and
    rows past the answer mean nothing.
    """
    rows = np.asarray(rows, dtype=np.float32)
    return rows[None, :, None] if streaming else rows[None, None]


def metrics_arrays(metrics: EngineMetrics) -> dict[str, Array]:
    """The performance outputs that are known, each ``[1, 1]``."""
    arrays: dict[str, Array] = {
        name: np.array([[value]], dtype=ENGINE.output_named[name].numpy_type)
        for name in _METRICS
        if (value := getattr(metrics, name)) is not None
    }
    drafted, accepted = metrics.total_draft_tokens, metrics.total_accepted_draft_tokens
    if drafted is not None and accepted is not None:
        rate = accepted / drafted if drafted else 0.0
        arrays["acceptance_rate"] = np.array([[rate]], dtype=np.float32)
    return arrays


def _one(value: int) -> Array:
    return np.array([[value]], dtype=np.int32)


# --- the caller's side ----------------------------------------------------------------------


def request_arrays(
    request: EngineRequest, declared: Iterable[str], vocab_size: int
) -> dict[str, Array]:
    """The request as inputs of a ``tensorrt_llm`` model that declares the names ``declared``.

    ``vocab_size`` is the length of a dense embedding bias. Raises ``InvalidRequest`` for an
    option that this engine has no input for: never dropped in silence.
    """
    declared = frozenset(declared)
    arrays: dict[str, Array] = {}
    for key, value in _plain_values(request):
        name = _spelling(key, declared)
        arrays[name] = _one_of(name, value)
    arrays["input_ids"] = _ids_row(request.input_ids)
    arrays |= {name: array[None] for name, array in request.extras.items()}
    if request.stop_sequences:
        arrays["stop_words_list"] = pack_words(request.stop_sequences)[None]
    if request.bad_sequences:
        arrays["bad_words_list"] = pack_words(request.bad_sequences)[None]
    if request.embedding_bias:
        dense = np.zeros((1, vocab_size), dtype=np.float32)
        for token, weight in request.embedding_bias:
            dense[0, token] += weight
        arrays["embedding_bias"] = dense
    if request.draft is not None:
        arrays |= _draft_arrays(request.draft)
    for name in arrays:
        if name not in declared:
            raise InvalidRequest(name, "this engine version has no such input")
    if "exclude_input_in_output" in declared:
        arrays["exclude_input_in_output"] = _one_of("exclude_input_in_output", True)
    return arrays


def _plain_values(request: EngineRequest) -> Iterable[tuple[str, Any]]:
    yield "input_lengths", len(request.input_ids)
    yield "max_tokens", request.max_tokens
    if request.streaming:  # absent means no
        yield "streaming", True
    if request.num_return_sequences > 1:
        yield "num_return_sequences", request.num_return_sequences
    for name in ("end_id", "pad_id"):
        if (value := getattr(request, name)) is not None:
            yield name, value
    for name in _SAMPLING:
        if (value := getattr(request.sampling, name)) is not None:
            yield name, value
    for name in _WANTS:
        # Counts are the caller's own business; the engine need not send them.
        if getattr(request.wants, name) and not name.startswith("num_"):
            yield f"return_{name}", True


@lru_cache(maxsize=1024)
def _spelling(key: str, declared: frozenset[str]) -> str:
    spellings = _SPELLINGS[key]
    for tensor in spellings:
        if tensor.name in declared:
            return tensor.name
    raise InvalidRequest(spellings[0].name, "this engine version has no such input")


@lru_cache(maxsize=4096)
def _one_of(name: str, value: Any) -> Array:
    """``[1, 1]``; kept, since rounds of speculation send the same numbers again and again."""
    array: Array = np.array([[value]], dtype=ENGINE.input_named[name].numpy_type)
    array.flags.writeable = False
    return array


def _ids_row(ids: TokenIds) -> Array:
    """``[1, N]`` int32; three times as fast as numpy's own reading of a tuple."""
    return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), dtype=np.int32)[None]


def _draft_arrays(draft: Draft) -> dict[str, Array]:
    arrays: dict[str, Array] = {"draft_input_ids": _ids_row(draft.token_ids)}
    if draft.logits is not None:
        arrays["draft_logits"] = np.asarray(draft.logits, dtype=np.float32)[None]
    if draft.acceptance_threshold is not None:
        name = "draft_acceptance_threshold"
        arrays[name] = _one_of(name, draft.acceptance_threshold)
    return arrays


class ChunkReader:
    """Responses of one request to chunks.

    ``prompt_included`` says whether this engine puts the prompt into non-streaming output, which
    the arrays alone cannot tell. The wire marks only the end of the whole request as final.
    """

    def __init__(self, request: EngineRequest, prompt_included: bool) -> None:
        self._request = request
        self._skip = len(request.input_ids) if prompt_included and not request.streaming else 0
        self._log_probs_read: dict[int, int] = {}

    def chunk(self, arrays: Mapping[str, Array], final: bool) -> EngineChunk:
        """One response as a chunk; raises ``EngineError`` if it breaks the contract."""
        if "output_ids" not in arrays or "sequence_length" not in arrays:
            raise EngineError("the engine's response lacks output_ids or sequence_length")
        length = int(np.asarray(arrays["sequence_length"]).reshape(-1)[0])
        ids = np.asarray(arrays["output_ids"])
        row = ids[0, 0, self._skip : length]
        index = _number(arrays, "sequence_index") or 0
        if not 0 <= index < self._request.num_return_sequences:
            raise EngineError(f"the engine's response is of sequence_index {index}: none such")
        return EngineChunk(
            token_ids=tuple(row.tolist()),
            sequence_index=index,
            final=final or (not self._request.streaming),
            metrics=self._metrics(arrays),
            **self._scores(arrays, index, len(row)),
        )

    def _scores(self, arrays: Mapping[str, Array], index: int, new: int) -> dict[str, Any]:
        scores: dict[str, Any] = {}
        wants = self._request.wants
        if wants.log_probs and "output_log_probs" in arrays:
            so_far = np.asarray(arrays["output_log_probs"])[0, 0]
            read = self._log_probs_read.get(index, 0)
            self._log_probs_read[index] = read + new
            scores["log_probs"] = tuple(_first("output_log_probs", so_far[read:], new).tolist())
        if wants.log_probs and "cum_log_probs" in arrays:
            scores["cum_log_prob"] = float(np.asarray(arrays["cum_log_probs"]).reshape(-1)[0])
        if wants.context_logits and "context_logits" in arrays:
            scores["context_logits"] = np.array(arrays["context_logits"])[0]
        if wants.generation_logits and "generation_logits" in arrays:
            rows = np.array(arrays["generation_logits"])
            rows = rows[0, :, 0] if self._request.streaming else rows[0, 0]
            scores["generation_logits"] = _first("generation_logits", rows, new)
        return scores

    def _metrics(self, arrays: Mapping[str, Array]) -> EngineMetrics | None:
        if not self._request.wants.perf_metrics or arrays.keys().isdisjoint(_METRICS):
            return None
        return EngineMetrics(**{name: _number(arrays, name) for name in _METRICS})


def _first(name: str, scores: Array, count: int) -> Array:
    if len(scores) < count:
        raise EngineError(f"the engine's {name} hold {len(scores)} entries for {count} tokens")
    return scores[:count]


def _number(arrays: Mapping[str, Array], name: str) -> int | None:
    return int(np.asarray(arrays[name]).reshape(-1)[0]) if name in arrays else None
