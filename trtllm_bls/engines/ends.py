"""Where a sequence ends, for an engine that does not know all of a request's ends.

TensorRT-LLM's gRPC service and its LLM API end at one end id and at single stop ids, give the end
id as a token of the answer, and give a stop of several ids up to its last one. Here every end that
the request names is watched for, so the chunks are those that ``engines.base`` promises: without
the end id, up to and including a stop, and never more than ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_bls.stopping import StopSequences
from trtllm_bls.types import EngineChunk, EngineRequest, FinishReason, TokenIds


def end_id_of(request: EngineRequest) -> int | None:
    """The id that ends the request; ``None`` where none does."""
    return None if request.end_id == -1 else request.end_id


class SequenceEnds:
    """One sequence of ``request``: ids in as they come, chunks out, the last of them ``final``."""

    def __init__(self, request: EngineRequest, index: int) -> None:
        self.done = False
        self._index = index
        self._end_id = end_id_of(request)
        stops = request.stop_sequences
        self.stop_ids = frozenset(stop[0] for stop in stops if len(stop) == 1)
        longer = [stop for stop in stops if len(stop) > 1]
        self._longer = StopSequences(longer) if longer else None
        self._plain = not stops
        self._least = request.sampling.min_tokens or 0
        self._most = request.max_tokens
        self._count = 0
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
        kept = len(ids)
        usual = kept == 1 and self._plain and not ended and log_probs is None
        if usual and ids[0] != self._end_id and self._count + 1 < self._most:
            self._count += 1
            return EngineChunk(token_ids=ids, sequence_index=self._index, ids_only=True)
        for place, token in enumerate(ids):
            found = self._end_at(token)
            if found is not None:
                kept = place if found is FinishReason.END_ID else place + 1
                ended, reason = True, found
                break
        self.done = ended
        if log_probs is not None:
            log_probs = tuple(log_probs[:kept])
            self._cum_log_prob += sum(log_probs)
        return EngineChunk(
            token_ids=ids[:kept],
            sequence_index=self._index,
            final=ended,
            finish_reason=reason if ended else None,
            log_probs=log_probs,
            cum_log_prob=None if log_probs is None else self._cum_log_prob,
        )

    def _end_at(self, token: int) -> FinishReason | None:
        if token == self._end_id:
            return FinishReason.END_ID
        self._count += 1
        stops = token in self.stop_ids
        if self._longer is not None:
            stops = self._longer.feed(token) or stops
        if stops and self._count >= self._least:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._count >= self._most else None
