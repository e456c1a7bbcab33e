"""The ``tensorrt_llm`` tensors from the engine's side: requests read, chunks written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trtllm_bls.admission import RequestLimits
from trtllm_bls.contract import ENGINE
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import Array, Draft, EngineChunk, EngineRequest, TokenIds
from trtllm_bls.wire.scores import metrics_arrays, score_arrays
from trtllm_bls.wire.text import Fields, common_fields, read_rows
from trtllm_bls.wire.words import unpack_words


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
    return [
        (
            _engine_request(row, request_id, streaming, vocab_size),
            row.get("exclude_input_in_output", exclude_input),
        )
        for row in rows
    ]


def _engine_request(
    row: Fields, request_id: str, streaming: bool, vocab_size: int | None
) -> EngineRequest:
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
    if len(row.get("decoder_input_ids", ())) > 1:
        raise InvalidRequest(
            "decoder_input_ids", "the model has no encoder; send the text as input_ids"
        )
    return EngineRequest(
        request_id=request_id,
        input_ids=tuple(ids[:length].tolist()),
        max_tokens=row["max_tokens"],
        streaming=streaming,
        stop_sequences=_words(row, "stop_sequences", "stop_words_list"),
        bad_sequences=_words(row, "bad_sequences", "bad_words_list"),
        embedding_bias=_sparse(row.get("embedding_bias"), vocab_size),
        draft=_draft(row),
        **common_fields(row),
    )


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
    """Chunks of one request to arrays; keeps what later responses repeat."""

    def __init__(self, request: EngineRequest, exclude_input: bool, row: int | None) -> None:
        self._request = request
        self._echo = not exclude_input and not request.streaming
        self._row = row  # None: the request had one row, so no batch_index is sent
        self._log_probs: dict[int, list[float]] = {}  # by sequence, all so far
        self._context_logits: Array | None = None  # on every response from the first that has them

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
        if chunk.log_probs is not None:
            self._log_probs.setdefault(chunk.sequence_index, []).extend(chunk.log_probs)
        if chunk.context_logits is not None:
            self._context_logits = chunk.context_logits
        arrays |= score_arrays(
            self._log_probs.get(chunk.sequence_index),
            chunk.cum_log_prob,
            self._context_logits,
            chunk.generation_logits,
            chunk.top_log_probs,
            streaming=self._request.streaming,
        )
        if self._request.wants.num_input_tokens:
            arrays["num_input_tokens"] = _one(len(self._request.input_ids))
        if self._request.wants.num_output_tokens:
            arrays["num_output_tokens"] = _one(len(ids))
        if self._request.wants.perf_metrics:
            arrays |= metrics_arrays(chunk.metrics, filled=True)
        elif (done := chunk.speculation) is not None:  # of an engine that speculates by itself
            arrays["total_draft_tokens"] = _one(done.drafted)
            arrays["total_accepted_draft_tokens"] = _one(done.accepted)
        if chunk.cached_tokens is not None:
            arrays["cached_tokens"] = _one(chunk.cached_tokens)
        return arrays


def _one(value: int) -> Array:
    return np.array([[value]], dtype=np.int32)
