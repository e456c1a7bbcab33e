"""Messages of one ``Generate`` call as the chunks of its request, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trtllm_bls.engines.ends import SequenceEnds, sequence_ends
from trtllm_bls.engines.trtllm_fields import REASONS, likeliest
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.errors import EngineError
from trtllm_bls.types import EngineChunk, EngineRequest, FinishReason, TokenIds, TopLogProbs

_response = messages.GenerateResponse.FromString


class ServiceAnswer:
    """The answer of one request, which the service knows as ``request_id``.

    A sequence ends here as soon as its last token is there. The server's own word on it,
    ``complete``, comes when all sequences have ended, repeats every token, and is believed only
    about what the chunks before it did not have.
    """

    def __init__(self, request: EngineRequest, request_id: str) -> None:
        self._request_id = request_id
        self._scored, self._top = request.wants.log_probs, request.wants.top_log_probs
        self._sequences = sequence_ends(request)

    def read(self, raw_messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        """Add what the messages hold to ``chunks``; whether all sequences have ended.

        Raises ``EngineError``, and protobuf's errors for bytes that are no message.
        """
        for raw in raw_messages:
            chunks += self._read(_response(raw))
        return all([sequence.done for sequence in self._sequences])

    def _read(self, response: Any) -> list[EngineChunk]:
        if response.request_id != self._request_id:
            raise EngineError("the engine answered to another request's id")
        streamed = response.HasField("chunk")
        if not streamed and not response.HasField("complete"):
            return []
        part: Any = response.chunk if streamed else response.complete
        index: int = part.sequence_index
        if index >= len(self._sequences):
            raise EngineError(f"the engine answered for sequence {index}: none such")
        sequence = self._sequences[index]
        if sequence.done:
            return []
        if not sequence.received:
            sequence.cached_tokens = part.cached_tokens
        if not streamed:
            return self._read_complete(sequence, part)
        several = part.token_ids  # all of them new
        # Iterating over a repeated field takes two microseconds, even of one value.
        ids = (several[0],) if len(several) == 1 else tuple(several[:])
        if not self._scored:
            return sequence.feed(ids)
        return sequence.feed(ids, *self._scores(_paired(ids, part.logprobs)))

    def _read_complete(self, sequence: SequenceEnds, part: Any) -> list[EngineChunk]:
        """A ``GenerateComplete``, which repeats all ids, or all but those of a stop."""
        if part.finish_reason == "error":
            raise EngineError("the engine failed while it answered")
        every: TokenIds = tuple(part.output_token_ids[:])
        entries = _paired(every, part.logprobs)[sequence.received :] if self._scored else None
        ids, reason = every[sequence.received :], REASONS.get(part.finish_reason)
        if part.finish_reason == "stop":
            matched = part.matched_token_id if part.HasField("matched_token_id") else None
            if matched in sequence.stop_ids:
                reason = FinishReason.STOP
            elif ids and matched in (None, ids[-1]):
                ids = ids[:-1]  # an end id of the server's own
        return sequence.feed(ids, *self._scores(entries), ended=True, reason=reason)

    def _scores(
        self, entries: Sequence[Any] | None
    ) -> tuple[list[float] | None, list[TopLogProbs] | None]:
        """Log-probabilities, and those of the likeliest ids of each place."""
        if entries is None:
            return None, None
        values = [entry.logprob for entry in entries]
        if not self._top:
            return values, None
        pairs = [[(top.token_id, top.logprob) for top in entry.top_logprobs] for entry in entries]
        return values, [likeliest(listed, self._top) for listed in pairs]


def _paired(ids: Sequence[int], entries: Iterable[Any]) -> list[Any]:
    """The entry of each id; there may be others, for ids that were cut off."""
    left = iter(entries)
    found = [next((entry for entry in left if entry.token_id == token), None) for token in ids]
    if None in found:
        raise EngineError("the engine's log-probabilities are not those of its tokens")
    return found
