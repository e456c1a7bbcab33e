"""TensorRT-LLM's own gRPC service (``trtllm-serve --grpc``) as an engine.

One HTTP/2 connection; each request is a call of its own. A request is ended from here by ``Abort``,
and only then is its call cancelled: a cancelled call alone can leave the server generating to the
end. The end of an aborted stream is never waited for, since a queued request may have none.

Written from the service's protocol and source and tested against a server that plays it
(``doubles.trtllm_service``); not run on a TensorRT-LLM so far.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from packaging.version import InvalidVersion, Version

from trtllm_bls.engines.base import AskedCapacity, CallChunks, RunningCalls
from trtllm_bls.engines.trtllm_fields import SPECULATES
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.engines.trtllm_service.answers import ServiceAnswer
from trtllm_bls.engines.trtllm_service.requests import service_request
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    TrtllmBlsError,
)
from trtllm_bls.grpc_client import GrpcCall, GrpcChannel, GrpcError, ignore
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest
from trtllm_bls.wire.engine_client import wire_id

_ASK_SECONDS = 10.0  # for information about the model
_PROBE_SECONDS = 5.0  # for a silent server to say how it is
# For an Abort to be answered, before its call is cancelled all the same: on a busy host a server
# takes seconds, and a call that is cancelled first may run to its end.
_ABORT_SECONDS = 10.0
_AGAIN_SECONDS = 0.2  # until a request that may not have begun is aborted again
_CLOSE_SECONDS = 1.0  # for aborts under way
_HEALTH_SECONDS = 1.0  # between questions for its health
_LINGER_SECONDS = 1.0  # for the server to end by itself what has had its last token
_READ = Version("1.3.0rc29")  # whose source was read; earlier ones ignore some fields

_TOO_LONG = re.compile(
    r"maximum context length|default_max_tokens.*must be greater than 0|max_num_tokens"
    r"|message larger than max|(prompt|input) length.*exceed|exceeds? max_(input|seq)_len",
    re.IGNORECASE,
)
_OTHER = "another gRPC service answers there, not TrtllmService"
_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")

log = logging.getLogger(__name__)


class TrtllmServiceEngine:
    """The TrtllmService at ``url`` (host:port). Implements ``trtllm_bls.engines.base.Engine``.

    What the service cannot be asked, or not reliably: ``eos_id``, the id at which it ends by
    itself, its tokenizer's; ``vocab_size``, the ids that there are; ``max_sequence_tokens`` as in
    ``EngineCapacity``. ``stall_seconds`` is that of ``RunningCalls``.
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
        self._eos_id, self._vocab_size = eos_id, vocab_size
        self._max_sequence_tokens = max_sequence_tokens
        self.channel = GrpcChannel(url, tls=tls, coalesce_reads=True)
        self._capacity = AskedCapacity(self._ask_capacity, _HEALTH_SECONDS)
        self._aborting: set[asyncio.Task[None]] = set()
        probe = partial(self._problem, _PROBE_SECONDS)
        self.calls = RunningCalls(self.name, stall_seconds, probe, self._capacity.doubt)

    async def capacity(self) -> EngineCapacity:
        """What the service and its settings tell. Raises ``EngineUnavailable``.

        A service that is not healthy by its own account is unavailable, too.
        """
        return await self._capacity.get()

    def generate(self, request: EngineRequest) -> ServiceChunks:
        """See ``Engine.generate``."""
        capacity = self._capacity.known
        if capacity is None:
            raise EngineUnavailable(f"{self.name}: not asked for its capacity yet")
        request_id = wire_id(request)
        asked = service_request(request, request_id, self._eos_id, capacity)
        return ServiceChunks(self, request, *asked)

    async def close(self) -> None:
        """Abort what runs and close the connection."""
        self.calls.close()
        for chunks in list(self.calls.running):
            await chunks.aclose()
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=_CLOSE_SECONDS)
        await self.channel.close()
        await self._capacity.close()

    # --- used by the running requests ---------------------------------------------------------

    def abort(self, request_id: str, call: GrpcCall) -> None:
        """End a request's work: ``Abort``, then the call is cancelled."""
        task = asyncio.create_task(self._abort(request_id, call))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def failure(self, error: GrpcError) -> TrtllmBlsError:
        """A call's status as an error of ours."""
        details = error.details.strip().partition("\n")[0] or error.status
        details = details.removeprefix(f"{self.channel.target}: ")  # which is in our name
        if error.status == "UNIMPLEMENTED":
            return EngineError(f"{self.name}: {_OTHER}")
        if _TOO_LONG.search(error.details):
            return InvalidRequest("input_ids", details)
        if error.status in _UNREACHABLE:
            return EngineUnavailable(f"{self.name}: {details}")
        if error.status == "INVALID_ARGUMENT":
            return InvalidRequest("request", details)
        if error.status == "RESOURCE_EXHAUSTED":
            return Overloaded(f"{self.name}: {details}; try again later")
        return EngineError(details)

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
        """What is wrong with the server, by its own account or for want of one."""
        try:
            status = (await self._ask("HealthCheck", timeout)).status
        except GrpcError as error:
            problem = _OTHER if error.status == "UNIMPLEMENTED" else error.details
        else:
            problem = "" if status == "OK" else f"it is not healthy: {status}"
        return f"{self.name}: {problem.partition(chr(10))[0]}" if problem else None

    async def _ask_capacity(self) -> EngineCapacity:
        problem = await self._problem(_ASK_SECONDS)
        if problem is not None:
            raise EngineUnavailable(problem)
        if self._capacity.known is not None:
            return self._capacity.known
        try:
            model = await self._ask("GetModelInfo", _ASK_SECONDS)
            server = await self._ask("GetServerInfo", _ASK_SECONDS)
        except GrpcError as error:
            raise EngineUnavailable(f"{self.name}: {error.details}") from error
        log.info("%s: TensorRT-LLM %s, %s", self.name, server.version, model.model_id)
        if not _is_read(server.version):
            log.warning(
                "%s: TensorRT-LLM %s may ignore penalties, bad words, n-grams and seeds",
                self.name,
                server.version or "of an unknown version",
            )
        # Repeating max_input_len, it is a default that nothing enforces.
        told = model.max_seq_len if model.max_seq_len != model.max_input_len else 0
        return EngineCapacity(
            vocab_size=self._vocab_size,  # theirs leaves added tokens out
            max_sequence_tokens=self._max_sequence_tokens or told or None,
            max_draft_tokens=0,
            tells_top_log_probs=True,
            speculates=SPECULATES,
        )


class ServiceChunks(CallChunks):
    """One request over one ``Generate`` call; ``ends_known``: as ``service_request`` tells."""

    def __init__(
        self, engine: TrtllmServiceEngine, request: EngineRequest, message: Any, ends_known: bool
    ) -> None:
        self._engine = engine
        self._request_id, self._ends_known = message.request_id, ends_known
        self._answer = ServiceAnswer(request, message.request_id)
        super().__init__(engine.calls)
        self._call = engine.channel.open(
            messages.SERVICE + "Generate", self.on_messages, self._on_end, request.traceparent
        )
        self._call.send(message.SerializeToString())
        self._call.half_close()

    def _read(self, messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        return self._answer.read(messages, chunks)

    def _let_go(self, finished: bool) -> None:
        if self._call.done:
            return
        if not finished:
            self._abort()
            return
        # The server ends by itself what has had its last token, unless it does not know of that end
        # or errs.
        seconds = _LINGER_SECONDS if self._ends_known else 0
        timer = asyncio.get_running_loop().call_later(seconds, self._abort)
        self._call.on_messages, self._call.on_end = ignore, lambda error: timer.cancel()

    def _abort(self) -> None:
        self._call.on_messages = self._call.on_end = ignore
        self._engine.abort(self._request_id, self._call)

    def _on_end(self, error: GrpcError | None) -> None:
        if error is not None:
            self.give_up(self._engine.failure(error))
        else:
            problem = f"{self._engine.name} ended its stream without a last message"
            self.give_up(EngineError(problem))


def _is_read(version: str) -> bool:
    try:
        return Version(version) >= _READ
    except InvalidVersion:
        return False
