"""Where a sequence ends, for an engine that does not know all of a request's ends.

TensorRT-LLM's gRPC service and its LLM API end at one end id and at single stop ids, give the end
id as a token of the answer, and give a stop of several ids up to its last one. Here every end that
the request names is watched for, so the chunks are those that ``engines.base`` promises: without
the end id, up to and including a stop, and never more than ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_bls.stopping import StoppingCriteria
from trtllm_bls.types import EngineChunk, EngineRequest, FinishReason, TokenIds


def end_id_of(request: EngineRequest) -> int | None:
    """The id that ends the request; ``None`` where none does."""
    return None if request.end_id == -1 else request.end_id


class SequenceEnds:
    """One sequence of ``request``: ids in as they come, chunks out, the last of them ``final``."""

    def __init__(self, request: EngineRequest, index: int) -> None:
        self.done = False
        self._index = index
        self._criteria = StoppingCriteria(
            request.max_tokens,
            min_tokens=request.sampling.min_tokens,
            end_ids=(end_id_of(request),),
            stop_sequences=request.stop_sequences,
        )
        self.stop_ids = frozenset(stop[0] for stop in request.stop_sequences if len(stop) == 1)
        self._cum_log_prob = 0.0

    def feed(
        self,
        ids: TokenIds,
        log_probs: Sequence[float] | None = None,
        ended: bool = False,
        reason: FinishReason | None = None,
    ) -> EngineChunk:
        """The chunk of the next ids; ``log_probs`` are theirs, or more.

        ``ended``: nothing follows, for ``reason`` where no end of the request's own is in ``ids``.
        """
        kept, found = self._criteria.feed(ids)
        if found is not None:
            ended, reason = True, found
        if not ended and log_probs is None:  # of nearly every token
            return EngineChunk(token_ids=kept, sequence_index=self._index)
        self.done = ended
        if log_probs is not None:
            log_probs = tuple(log_probs[: len(kept)])
            self._cum_log_prob += sum(log_probs)
        return EngineChunk(
            token_ids=kept,
            sequence_index=self._index,
            final=ended,
            finish_reason=reason if ended else None,
            log_probs=log_probs,
            cum_log_prob=None if log_probs is None else self._cum_log_prob,
        )
