"""Messages of one ``Generate`` call as the chunks of its request, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trtllm_bls.engines.base import join_chunks
from trtllm_bls.engines.ends import SequenceEnds
from trtllm_bls.engines.trtllm_fields import REASONS
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.engines.trtllm_service.requests import ServiceRequest
from trtllm_bls.errors import EngineError
from trtllm_bls.types import EngineChunk, EngineRequest, FinishReason, TokenIds, TopLogProbs

_response = messages.GenerateResponse.FromString


class ServiceAnswer:
    """The answer of one request.

    A sequence ends here as soon as its last token is there. The server's own word on it,
    ``complete``, comes when all sequences have ended, repeats every token, and is believed only
    about what the chunks before it did not have.
    """

    def __init__(self, request: EngineRequest, asked: ServiceRequest) -> None:
        self._request_id: str = asked.message.request_id
        self._copies = asked.copies
        self._streaming = request.streaming
        count = request.num_return_sequences // asked.copies
        self._sequences = [_SequenceAnswer(request, index) for index in range(count)]
        self._unfinished = count

    def read(self, raw_messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        """Add what the messages hold to ``chunks``; whether all sequences have ended.

        Raises ``EngineError``, and protobuf's errors for bytes that are no message.
        """
        for raw in raw_messages:
            chunk = self._read(_response(raw))
            if chunk is not None and self._copies > 1:
                chunks += [replace(chunk, sequence_index=copy) for copy in range(self._copies)]
            elif chunk is not None:
                chunks.append(chunk)
        return not self._unfinished

    def _read(self, response: Any) -> EngineChunk | None:
        """What is new in one message, if anything is; only of sequences that go on."""
        if response.request_id != self._request_id:
            raise EngineError("the engine answered to another request's id")
        streamed = response.HasField("chunk")
        if not streamed and not response.HasField("complete"):
            return None
        part: Any = response.chunk if streamed else response.complete
        index: int = part.sequence_index
        if index >= len(self._sequences):
            raise EngineError(f"the engine answered for sequence {index}: none such")
        sequence = self._sequences[index]
        if sequence.ends.done:
            return None
        chunk = sequence.read_chunk(part) if streamed else sequence.read_complete(part)
        self._unfinished -= chunk.final
        if not self._streaming:
            return sequence.collected(chunk)
        return chunk if chunk.token_ids or chunk.final else None


class _SequenceAnswer:
    """One sequence: what has arrived of it."""

    def __init__(self, request: EngineRequest, index: int) -> None:
        self.ends = SequenceEnds(request, index)
        self._scored, self._top = request.wants.log_probs, request.wants.top_log_probs
        self._received = 0
        self._collected: list[EngineChunk] = []

    def read_chunk(self, part: Any) -> EngineChunk:
        """A ``GenerateStreamChunk``, whose ids are new."""
        several = part.token_ids
        # Iterating over a repeated field takes two microseconds, even of one value.
        ids = (several[0],) if len(several) == 1 else tuple(several[:])
        self._received += len(ids)
        if not self._scored:
            return self.ends.feed(ids)
        return self._chunk(ids, _paired(ids, part.logprobs))

    def read_complete(self, part: Any) -> EngineChunk:
        """A ``GenerateComplete``, which repeats all ids, or all but those of a stop."""
        if part.finish_reason == "error":
            raise EngineError("the engine failed while it answered")
        every: TokenIds = tuple(part.output_token_ids[:])
        scores = _paired(every, part.logprobs)[self._received :] if self._scored else None
        ids, reason = every[self._received :], REASONS.get(part.finish_reason)
        if part.finish_reason == "stop":
            kind = part.WhichOneof("matched_stop")
            matched = part.matched_token_id if kind == "matched_token_id" else None
            if kind == "matched_stop_str" or matched in self.ends.stop_ids:
                reason = FinishReason.STOP
            elif ids and matched in (None, ids[-1]):
                ids = ids[:-1]  # an end id of the server's own
        return self._chunk(ids, scores, ended=True, reason=reason)

    def _chunk(
        self,
        ids: TokenIds,
        scores: Sequence[Any] | None,
        ended: bool = False,
        reason: FinishReason | None = None,
    ) -> EngineChunk:
        values = None if scores is None else [entry.logprob for entry in scores]
        chunk = self.ends.feed(ids, values, ended, reason)
        if scores is None or not self._top:
            return chunk
        entries = scores[: len(chunk.token_ids)]
        return replace(chunk, top_log_probs=tuple(self._best(entry) for entry in entries))

    def _best(self, entry: Any) -> TopLogProbs:
        """The likeliest ids of one place; the chosen one is listed whatever its place."""
        listed = [(top.token_id, top.logprob) for top in entry.top_logprobs]
        return tuple(sorted(listed, key=lambda pair: -pair[1])[: self._top])

    def collected(self, chunk: EngineChunk) -> EngineChunk | None:
        """All chunks as one, once there is the last."""
        self._collected.append(chunk)
        return join_chunks(self._collected) if chunk.final else None


def _paired(ids: Sequence[int], entries: Iterable[Any]) -> list[Any]:
    """The entry of each id; there may be others, for ids that were cut off."""
    left = iter(entries)
    found = [next((entry for entry in left if entry.token_id == token), None) for token in ids]
    if None in found:
        raise EngineError("the engine's log-probabilities are not those of its tokens")
    return found
