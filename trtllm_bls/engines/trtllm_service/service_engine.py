"""TensorRT-LLM's own gRPC service (``trtllm-serve --grpc``) as an engine.

One HTTP/2 connection; each request is a call of its own. A request is ended from here by ``Abort``,
and only then is its call cancelled: a cancelled call alone can leave the server generating to the
end. The end of an aborted stream is never waited for, since a queued request may have none.

In this order: a request as a message, messages as an answer, the engine, and its running requests.
Written from the service's protocol and source and tested against a server that plays it
(``doubles.trtllm_service``); not run on a TensorRT-LLM so far.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from trtllm_bls.engines import trtllm_fields as trtllm
from trtllm_bls.engines.base import CallChunks, RenewedCapacity, RunningCalls, wire_id
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TrtllmBlsError,
    Unsupported,
)
from trtllm_bls.types import (
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    SpeculationStats,
    TopLogProbs,
)
from trtllm_bls.wire.grpc_client import GrpcCall, GrpcChannel, GrpcError, StreamEnd, ignore

_ASK_SECONDS = 10.0  # for information about the model
_HEALTH_PROBE_SECONDS = 5.0  # for the health of a silent server
# For the response to an Abort, before its call is cancelled all the same: on a busy host a server
# takes seconds, and a call that is cancelled first may run to its end.
_ABORT_SECONDS = 10.0
_AGAIN_SECONDS = 0.2  # until a request that may not have begun is aborted again
_ABORTS_SECONDS = 1.0  # for aborts under way
_HEALTH_SECONDS = 1.0  # between questions for its health
_LINGER_SECONDS = 1.0  # for the server to end a request that has had its last token

_TOO_LONG_WORDS = re.compile(
    r"maximum context length|default_max_tokens.{0,200}must be greater than 0|max_num_tokens"
    r"|message larger than max|(prompt|input) length.{0,200}exceed|exceeds? max_(input|seq)_len",
    re.IGNORECASE,
)
_OTHER = "another gRPC service answers there, not TrtllmService"
_response = messages.GenerateResponse.FromString

log = logging.getLogger(__name__)

# --- a request as a message -----------------------------------------------------------------

_NO_FIELD = "TrtllmService has no field for it"
_DROPPED = "TrtllmService drops what it computes of them"
_SERVICE_INPUTS = {GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT, "lora_task_id"}
_SERVICE_REFUSALS = {
    "draft_input_ids": f"{_NO_FIELD}; {trtllm.SPECULATES}",
    "embedding_bias": "TrtllmService wants another length than that of the logits",
    "return_context_logits": _DROPPED,
    "return_generation_logits": _DROPPED,
    "return_perf_metrics": "TrtllmService reports no figures",
    "bad_words_list": "TrtllmService takes bad words of one token only",
    "lora_weights": "TrtllmService takes lora_task_id alone, of an adapter that its server has",
    "lora_config": "TrtllmService takes lora_task_id alone, of an adapter that its server has",
}
_GUIDE_TYPES = {kind: number for number, kind in enumerate(trtllm.GUIDE_TYPES, start=1)}


def service_request(
    request: EngineRequest, request_id: str, eos_id: int | None, capacity: EngineCapacity
) -> tuple[bytes, bool]:
    """Return the request as a serialised message, and true if the server knows all of its ends.

    Such a request ends by itself. ``eos_id``: the id at which the server ends one. Raises
    ``InvalidRequest``, and ``Unsupported`` for fields that the service cannot honour.
    """
    trtllm.check(request, capacity, _SERVICE_INPUTS, _SERVICE_REFUSALS, _NO_FIELD)
    sampling = trtllm.sampling_fields(request.sampling)
    message = messages.GenerateRequest(
        request_id=request_id,
        max_tokens=request.max_tokens,
        sampling_config={
            "beam_width": 1,
            "num_return_sequences": len(trtllm.sequence_ends(request)),
            **sampling,
        },
        bad_token_ids=[words[0] for words in request.bad_sequences],
    )
    if request.wants.log_probs:
        message.output_config.logprobs = max(1, request.wants.top_log_probs)  # 0 gives none at all
    ends_known = _add_ends(message, request, eos_id)
    # An answer that is ended from here is read while it grows.
    message.streaming = request.streaming or not ends_known
    guide = request.guide
    if guide is not None:
        text = trtllm.guide_text(guide)
        message.guided_decoding.guide_type = _GUIDE_TYPES[guide.kind]
        message.guided_decoding.guide = text or guide.kind  # without one nothing is guided
    if request.adapter is not None and request.adapter.task_id:  # 0 is the model itself
        message.lora_config.task_id = request.adapter.task_id
    return messages.packed_request(message, request.input_ids), ends_known


def _add_ends(message: Any, request: EngineRequest, eos_id: int | None) -> bool:
    """Add the request's ends to its message; return true if the server knows all of them."""
    has_no_end_id = request.end_id in (None, -1)
    min_tokens = request.sampling.min_tokens or 0
    message.ignore_eos = has_no_end_id or request.end_id != eos_id
    if message.ignore_eos:  # turns stop ids off, too
        if not has_no_end_id and min_tokens > 1:
            raise Unsupported("min_tokens", f"only the model's own end_id ({eos_id}) waits for it")
        return has_no_end_id and not request.stop_sequences
    if min_tokens:
        message.sampling_config.min_tokens = min_tokens
    stop_ids, are_all = trtllm.stop_ids(request)
    message.stop_token_ids.extend(stop_ids)
    # Without this, the server may or may not cut the id off, depending on the end.
    message.include_stop_token_in_output = bool(stop_ids)
    return are_all


# --- messages as an answer, without I/O -----------------------------------------------------


class ServiceAnswer:
    """The answer of one request, which the service knows as ``request_id``.

    A sequence ends here as soon as its last token is there. The server's own word on it,
    ``complete``, comes when all sequences have ended, repeats every token, and is believed only
    about what the chunks before it did not have.
    """

    def __init__(self, request: EngineRequest, request_id: str) -> None:
        self._request_id = request_id
        self._has_scores = request.wants.log_probs
        self._num_top = request.wants.top_log_probs
        self._sequences = trtllm.sequence_ends(request)

    def read(self, raw_messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        """Add the chunks of some messages to ``chunks``; return true once all sequences have ended.

        Raises ``EngineError``, and protobuf's errors for bytes that are no message.
        """
        for raw in raw_messages:
            response = _response(raw)
            chunks += self._read(response)
            complete = response.complete
            # From proto 0.4.19 on. In a stream the last token may have left before, without them.
            if complete.spec_draft_tokens and chunks and chunks[-1].final:
                chunks[-1].speculation = SpeculationStats(
                    drafted=complete.spec_draft_tokens, accepted=complete.spec_accepted_tokens
                )
        return all([sequence.done for sequence in self._sequences])

    def _read(self, response: Any) -> list[EngineChunk]:
        if response.request_id != self._request_id:
            raise EngineError("the engine answered to another request's id")
        part: Any = response.chunk
        is_complete = not response.HasField("chunk")
        if is_complete:
            if not response.HasField("complete"):
                return []
            part = response.complete
        index: int = part.sequence_index
        if index >= len(self._sequences):
            raise EngineError(f"the engine answered for sequence {index}: none such")
        sequence = self._sequences[index]
        if sequence.done:
            return []
        if not sequence.received:
            sequence.cached_tokens = part.cached_tokens
        if is_complete:
            return self._read_complete(sequence, part)
        new_ids = part.token_ids
        # Iterating over a repeated field takes two microseconds, even of one value.
        ids = (new_ids[0],) if len(new_ids) == 1 else tuple(new_ids[:])
        if not self._has_scores:
            return sequence.feed(ids)
        return sequence.feed(ids, *self._scores(ids, part.logprobs))

    def _read_complete(self, sequence: trtllm.SequenceEnds, part: Any) -> list[EngineChunk]:
        """Read a ``GenerateComplete``, which repeats all ids, or all but those of a stop."""
        if part.finish_reason == "error":
            raise EngineError("the engine failed while it answered")
        all_ids: tuple[int, ...] = tuple(part.output_token_ids[:])
        scores: tuple[Any, Any] = (None, None)
        if self._has_scores:
            scores = self._scores(all_ids, part.logprobs, sequence.received)
        ids = all_ids[sequence.received :]
        reason = trtllm.REASONS.get(part.finish_reason)
        if part.finish_reason == "stop":
            matched_id: int | None = None
            if part.HasField("matched_token_id"):
                matched_id = part.matched_token_id
            if matched_id in sequence.stop_ids:
                reason = FinishReason.STOP
            elif ids and matched_id in (None, ids[-1]):
                ids = ids[:-1]  # an end id of the server's own
        return sequence.feed(ids, *scores, ended=True, reason=reason)

    def _scores(
        self, ids: Sequence[int], entries: Iterable[Any], skip: int = 0
    ) -> tuple[list[float], list[TopLogProbs] | None]:
        """Return the log-probabilities of the ids after the first ``skip``.

        With them come those of the likeliest ids of each place, if the request wants any. There may
        be other entries, for ids that were cut off.
        """
        log_probs: list[float] = []
        top_log_probs: list[TopLogProbs] = []
        unread = iter(entries)
        for place, token in enumerate(ids):
            entry = next(unread, None)
            while entry is not None and entry.token_id != token:
                entry = next(unread, None)
            if entry is None:
                raise EngineError("the engine's log-probabilities are not those of its tokens")
            if place < skip:
                continue
            log_probs.append(entry.logprob)
            if self._num_top:
                pairs = [(top.token_id, top.logprob) for top in entry.top_logprobs]
                top_log_probs.append(trtllm.likeliest(pairs, self._num_top))
        return log_probs, top_log_probs if self._num_top else None


# --- the engine -----------------------------------------------------------------------------


class TrtllmServiceEngine:
    """The TrtllmService at ``url`` (host:port). Implements ``trtllm_bls.engines.base.Engine``.

    The service does not tell the following, or not reliably. ``eos_id``: its tokenizer's end id, at
    which it ends by itself. ``vocab_size``: the number of ids. ``max_sequence_tokens``: as in
    ``EngineCapacity``. ``stall_seconds``: as in ``RunningCalls``.
    """

    def __init__(
        self,
        url: str,
        *,
        eos_id: int | None = None,
        vocab_size: int | None = None,
        max_sequence_tokens: int | None = None,
        stall_seconds: float = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = f"trtllm://{url}"
        self._eos_id = eos_id
        self._vocab_size = vocab_size
        self._max_sequence_tokens = max_sequence_tokens
        self.channel = GrpcChannel(url, tls=tls, coalesce_reads=True)
        self._capacity = RenewedCapacity(self._ask_capacity, _HEALTH_SECONDS)
        self._aborting: set[asyncio.Task[None]] = set()
        probe = partial(self._problem, _HEALTH_PROBE_SECONDS)
        self.calls = RunningCalls(self.name, stall_seconds, probe, self._capacity.doubt)

    async def capacity(self) -> EngineCapacity:
        """Return the capacity by the service's and our settings. Raises ``EngineUnavailable``.

        A service that is not healthy by its own account is unavailable, too.
        """
        return await self._capacity.get()

    def generate(self, request: EngineRequest) -> ServiceChunks:
        """Generate as ``Engine.generate`` does."""
        capacity = self._capacity.latest
        if capacity is None:
            raise EngineUnavailable(f"{self.name}: not asked for its capacity yet")
        request_id = wire_id(request)
        message, ends_known = service_request(request, request_id, self._eos_id, capacity)
        return ServiceChunks(self, request, request_id, message, ends_known)

    async def close(self) -> None:
        """Abort what runs and close the connection."""
        self.calls.close()
        for chunks in list(self.calls.running):
            await chunks.aclose()
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=_ABORTS_SECONDS)
        await self.channel.close()
        await self._capacity.close()

    # --- used by the running requests ---------------------------------------------------------

    def release(self, request_id: str, ends_known: bool, call: GrpcCall, end: StreamEnd) -> None:
        """End a request's work, unless the server ends it: ``Abort``, then the call is cancelled.

        The server itself ends a request that has had its last token, unless it errs or does not
        know of that end (``ends_known``).
        """
        if call.done:
            return
        call.on_messages = ignore
        call.on_end = ignore
        if end is not StreamEnd.LAST:
            self._abort_soon(request_id, call)
            return
        seconds = 0.0
        if ends_known:
            seconds = _LINGER_SECONDS
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._abort_soon, request_id, call)
        call.on_end = lambda error: timer.cancel()

    def _abort_soon(self, request_id: str, call: GrpcCall) -> None:
        call.on_end = ignore
        task = asyncio.create_task(self._abort(request_id, call))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def failure(self, error: GrpcError) -> TrtllmBlsError:
        """Return a call's status as an error of ours."""
        reason = error.reason.strip().partition("\n")[0] or error.status
        if error.status == "UNIMPLEMENTED":
            return EngineError(f"{self.name}: {_OTHER}")
        if _TOO_LONG_WORDS.search(error.details):
            return PromptTooLong("input_ids", problem=reason)
        if error.unreachable:
            return EngineUnavailable(f"{self.name}: {reason}")
        if error.status == "INVALID_ARGUMENT":
            return InvalidRequest("request", reason)
        if error.status == "RESOURCE_EXHAUSTED":
            return Overloaded.for_now(f"{self.name}: {reason}", 1)
        return EngineError(reason)

    # --- the server ---------------------------------------------------------------------------

    async def _abort(self, request_id: str, call: GrpcCall) -> None:
        message = messages.AbortRequest(request_id=request_id).SerializeToString()
        try:
            await self.channel.unary(messages.SERVICE + "Abort", message, _ABORT_SECONDS)
            if not call.replies:
                # An Abort that overtakes its request finds nothing, and the request may begin
                # before its call is cancelled: so a request without an answer is aborted twice.
                await asyncio.sleep(_AGAIN_SECONDS)
                if not call.done:
                    await self.channel.unary(messages.SERVICE + "Abort", message, _ABORT_SECONDS)
        except GrpcError as error:
            log.warning("%s: Abort failed: %s", self.name, error)
        finally:
            call.cancel()

    async def _ask(self, method: str, timeout: float) -> Any:
        request = messages.MESSAGES[f"{method}Request"]().SerializeToString()
        answer = await self.channel.unary(messages.SERVICE + method, request, timeout)
        try:
            return messages.MESSAGES[f"{method}Response"].FromString(answer)
        except DecodeError as error:
            raise GrpcError("INTERNAL", f"its {method}Response cannot be read") from error

    async def _problem(self, timeout: float) -> str | None:
        """Return the server's problem, which may be that it does not tell its health."""
        try:
            status = (await self._ask("HealthCheck", timeout)).status
        except GrpcError as error:
            problem = error.details.partition("\n")[0]
            if error.status == "UNIMPLEMENTED":
                problem = _OTHER
        else:
            if status == "OK":
                return None
            problem = f"it is not healthy: {status}".partition("\n")[0]
        return f"{self.name}: {problem}" if problem else None

    async def _ask_capacity(self) -> EngineCapacity:
        problem = await self._problem(_ASK_SECONDS)
        if problem is not None:
            raise EngineUnavailable(problem)
        if self._capacity.latest is not None:
            return self._capacity.latest
        try:
            model = await self._ask("GetModelInfo", _ASK_SECONDS)
            server = await self._ask("GetServerInfo", _ASK_SECONDS)
        except GrpcError as error:
            raise EngineUnavailable(f"{self.name}: {error.details}") from error
        log.info("%s: TensorRT-LLM %s, %s", self.name, server.version, model.model_id)
        if warning := trtllm.ignored_fields(server.version):
            log.warning("%s: %s", self.name, warning)
        max_sequence_tokens = self._max_sequence_tokens
        # If it repeats max_input_len, it is a default that nothing enforces.
        if not max_sequence_tokens and model.max_seq_len != model.max_input_len:
            max_sequence_tokens = model.max_seq_len
        return EngineCapacity(
            vocab_size=self._vocab_size,  # theirs leaves added tokens out
            max_sequence_tokens=max_sequence_tokens or None,
            max_draft_tokens=0,
            tells_top_log_probs=True,
            speculates=trtllm.SPECULATES,
        )


class ServiceChunks(CallChunks):
    """A request over a ``Generate`` call of its own; ``ends_known``: as of ``service_request``."""

    def __init__(
        self,
        engine: TrtllmServiceEngine,
        request: EngineRequest,
        request_id: str,
        message: bytes,
        ends_known: bool,
    ) -> None:
        self._engine = engine
        self._answer = ServiceAnswer(request, request_id)
        super().__init__(engine.calls, partial(engine.release, request_id, ends_known))
        self._call = engine.channel.open(
            messages.SERVICE + "Generate", self.on_messages, self.on_end, request.traceparent
        )
        self._call.send(message)
        self._call.half_close()

    def _read(self, messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        return self._answer.read(messages, chunks)

    def _failure(self, error: GrpcError | None) -> TrtllmBlsError:
        if error is not None:
            return self._engine.failure(error)
        return EngineError(f"{self._engine.name} ended its stream without a last message")
