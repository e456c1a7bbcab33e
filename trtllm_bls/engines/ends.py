"""Where sequences end, for an engine that does not know all of a request's ends.

TensorRT-LLM's gRPC service and its LLM API end at one end id and at single stop ids, give the end
id as a token of the answer, and give a stop of several ids up to its last one. Here every end that
the request names is watched for, so the chunks are those that ``engines.base`` promises: without
the end id, up to and including a stop, and never more than ``max_tokens``. Greedy sequences of one
prompt are all equal, so such an engine is asked for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtllm_bls.stopping import StoppingCriteria
from trtllm_bls.types import EngineChunk, EngineRequest, FinishReason, TokenIds, TopLogProbs


def sequence_ends(request: EngineRequest) -> list[SequenceEnds]:
    """One for each sequence that the engine is asked for."""
    asked = 1 if request.sampling.is_greedy else request.num_return_sequences
    copies = request.num_return_sequences // asked
    return [SequenceEnds(request, range(i, i + copies)) for i in range(asked)]


class SequenceEnds:
    """One sequence of the engine: ids in as they come, chunks out, the last of them ``final``.

    ``indices``: the sequences of ``request`` that it is. ``received`` counts the ids that came in.
    ``cached_tokens``: set before the first ids are fed, it is on the first chunk.
    """

    def __init__(self, request: EngineRequest, indices: Sequence[int]) -> None:
        self.done = False
        self.received = 0
        self.cached_tokens: int | None = None
        self.stop_ids = frozenset(stop[0] for stop in request.stop_sequences if len(stop) == 1)
        self._criteria = StoppingCriteria.of(request)
        self._indices = indices
        self._cum_log_prob = 0.0

    def feed(
        self,
        ids: TokenIds,
        log_probs: Sequence[float] | None = None,
        top_log_probs: Sequence[TopLogProbs] | None = None,
        ended: bool = False,
        reason: FinishReason | None = None,
    ) -> list[EngineChunk]:
        """The chunks of the next ids. Not to be called once ``done``.

        Log-probabilities are those of the ids, and maybe more. ``ended``: nothing follows, for
        ``reason`` where no end of the request's own is in ``ids``.
        """
        self.received += len(ids)
        kept, found = self._criteria.feed(ids)
        self.done = ended or found is not None
        chunk = EngineChunk(token_ids=kept, sequence_index=self._indices[0])
        if self.done:
            chunk.final, chunk.finish_reason = True, found or reason
        if log_probs is not None:
            chunk.log_probs = tuple(log_probs[: len(kept)])
            self._cum_log_prob += sum(chunk.log_probs)
            chunk.cum_log_prob = self._cum_log_prob
        if top_log_probs is not None:
            chunk.top_log_probs = tuple(top_log_probs[: len(kept)])
        if not kept and not self.done:
            return []
        chunk.cached_tokens, self.cached_tokens = self.cached_tokens, None
        if len(self._indices) == 1:  # nearly always
            return [chunk]
        return [replace(chunk, sequence_index=index) for index in self._indices]
