"""One request on its way over one ``Generate`` call: messages in, chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trtllm_bls.engines.base import QueuedChunks, join_chunks
from trtllm_bls.engines.ends import SequenceEnds
from trtllm_bls.engines.grpc_transport import GrpcError
from trtllm_bls.engines.trtllm_fields import REASONS
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.engines.trtllm_service.requests import ServiceRequest
from trtllm_bls.errors import EngineError, TrtllmBlsError
from trtllm_bls.types import EngineChunk, EngineRequest, FinishReason, TokenIds, TopLogProbs

if TYPE_CHECKING:
    from trtllm_bls.engines.trtllm_service.engine import TrtllmServiceEngine

_response = messages.GenerateResponse.FromString
_LINGER_SECONDS = 1.0  # for the server to end by itself what has had its last token


class ServiceChunks(QueuedChunks):
    """The answer of one request.

    A sequence ends here as soon as its last token is there. The server's own word on it,
    ``complete``, comes when all sequences have ended, repeats every token, and is believed only
    about what the chunks before it did not have.
    """

    def __init__(
        self, engine: TrtllmServiceEngine, request: EngineRequest, asked: ServiceRequest
    ) -> None:
        super().__init__(self._abort)
        self._engine = engine
        self._request_id: str = asked.message.request_id
        self._copies = asked.copies
        self._ends_known = asked.ends_known
        self._in_pieces = request.streaming
        count = request.num_return_sequences // asked.copies
        self._sequences = [_Sequence(request, index) for index in range(count)]
        self._unfinished = count
        self._running = True
        self._call = engine.open_call(self, request.traceparent)
        self._call.send(asked.message.SerializeToString())
        self._call.half_close()

    def stall(self, error: TrtllmBlsError) -> None:
        """Give the request up."""
        self._abort()
        self.fail(error)

    def on_messages(self, raw_messages: list[bytes]) -> None:
        """Messages of the call have arrived."""
        self._engine.watch.arrived()
        chunks: list[EngineChunk] = []
        try:
            for raw in raw_messages:
                chunk = self._read(_response(raw))
                if chunk is not None:
                    chunks.append(chunk)
        except Exception as error:
            self._put(chunks)
            self._fail(error)
            return
        if self._unfinished:
            self._put(chunks)
            return
        self._finish()  # first: whoever leaves with a last chunk aborts nothing
        self._put(chunks)
        self.end()

    def on_end(self, error: GrpcError | None) -> None:
        """The call has ended, and some sequence has not."""
        self._over()
        if error is not None:
            self.fail(self._engine.failure(error))
        else:
            self.fail(EngineError(f"{self._engine.name} ended its stream without a last message"))

    def _read(self, response: Any) -> EngineChunk | None:
        """What is new in one message, if anything is; only of sequences that go on."""
        if response.request_id != self._request_id:
            raise EngineError(f"{self._engine.name} answered to another request's id")
        streamed = response.HasField("chunk")
        if not streamed and not response.HasField("complete"):
            return None
        part: Any = response.chunk if streamed else response.complete
        index: int = part.sequence_index
        if index >= len(self._sequences):
            raise EngineError(f"{self._engine.name} answered for sequence {index}: none such")
        sequence = self._sequences[index]
        if sequence.ends.done:
            return None
        chunk = sequence.piece(part) if streamed else sequence.rest(part)
        self._unfinished -= chunk.final
        if not self._in_pieces:
            return sequence.collected(chunk)
        return chunk if chunk.token_ids or chunk.final else None

    def _put(self, chunks: list[EngineChunk]) -> None:
        if self._copies > 1:
            chunks = [
                replace(chunk, sequence_index=copy)
                for chunk in chunks
                for copy in range(self._copies)
            ]
        self.put(chunks)

    def _finish(self) -> None:
        """All sequences have their last token: what the server still says is not waited for."""
        self._over()
        if self._call.done:
            return
        # It may go on where it does not know of an end, or errs; a call that has ended is left.
        seconds = _LINGER_SECONDS if self._ends_known else 0
        timer = asyncio.get_running_loop().call_later(seconds, self._stop)
        self._call.on_messages, self._call.on_end = _ignore, lambda error: timer.cancel()

    def _stop(self) -> None:
        if not self._call.done:
            self._call.on_messages, self._call.on_end = _ignore, _ignore
            self._engine.abort(self._request_id, self._call)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TrtllmBlsError):
            error = EngineError(f"{self._engine.name}: its message cannot be read: {error}")
        self._abort()
        self.fail(error)

    def _abort(self) -> None:
        """End the request's work, unless it is over."""
        if self._running:
            self._over()
            self._stop()

    def _over(self) -> None:
        self._running = False
        self._engine.ended(self)


class _Sequence:
    """One sequence: what has arrived of it."""

    def __init__(self, request: EngineRequest, index: int) -> None:
        self.ends = SequenceEnds(request, index)
        self._scored, self._top = request.wants.log_probs, request.wants.top_log_probs
        self._received = 0
        self._collected: list[EngineChunk] = []

    def piece(self, part: Any) -> EngineChunk:
        """Of a ``GenerateStreamChunk``, whose ids are new."""
        several = part.token_ids
        # Iterating over a repeated field takes two microseconds, even of one value.
        ids = (several[0],) if len(several) == 1 else tuple(several[:])
        self._received += len(ids)
        if not self._scored:
            return self.ends.feed(ids)
        return self._chunk(ids, _paired(ids, part.logprobs))

    def rest(self, part: Any) -> EngineChunk:
        """Of a ``GenerateComplete``, which repeats all ids, or all but those of a stop."""
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


def _ignore(event: object) -> None:
    pass
