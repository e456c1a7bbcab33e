"""An engine behind any Triton server's gRPC port, this server's own included.

Preferred where the decoupled BLS API of the running Triton cannot cancel or loses errors: a gRPC
call cancels for real, delivers every error, and couples no two requests. One connection; each
running request has a ``ModelStreamInfer`` call to itself. A call is never cancelled around its
final response, which would leak the request inside Triton.

Opening a call costs more than a short request does, and speculative decoding makes two requests a
round; so a call whose request has ended is kept for the next one (``StreamPool``). Requests that
share a call at one time could not be told apart by a cancel, and in Triton 24.10 one that is
refused can end the server. An idle call is ended by closing our side: soon, since Triton does not
shut down while any call is open, and after many replies, since Triton 24.10 keeps about a kilobyte
for each until the call ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.engines.grpc_call import StallWatch, ignore
from trtllm_bls.engines.grpc_transport import Connection, GrpcCall, GrpcError
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    TrtllmBlsError,
    from_wire,
)
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest
from trtllm_bls.wire.engine_client import DeployedModel, ResponseReader, request_inputs, wire_id
from trtllm_bls.wire.infer_message import NO_PARAMETERS, packed_infer_message

_SERVICE = "/inference.GRPCInferenceService/"
_STREAM = _SERVICE + "ModelStreamInfer"
IDLE_SECONDS = 1.0  # rounds of speculative decoding come back within milliseconds
MAX_IDLE = 64
MAX_REPLIES = 512  # half a megabyte inside Triton 24.10
_CLOSE_SECONDS = 1.0  # for the server to end its side of idle calls
_CONFIG_SECONDS = 10.0  # for the server to send the model's configuration
_PROBE_SECONDS = 5.0  # for a silent server to answer that it is alive
_REFRESH_SECONDS = 30.0  # after which the configuration is asked for again: models are reloaded

log = logging.getLogger(__name__)


class GrpcEngine:
    """The ``tensorrt_llm`` model named ``name`` at ``url`` (host:port).

    ``vocab_size`` is the length of a dense embedding bias. When nothing at all has arrived for
    ``stall_seconds`` (0 = never) although requests run, the server is asked whether it is alive; if
    it does not answer, they fail. So no answer ends for being long or queued.
    """

    def __init__(
        self,
        url: str,
        name: str,
        vocab_size: int,
        stall_seconds: float = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.vocab_size = vocab_size
        self._connection = Connection(url, tls=tls)
        self.pool = StreamPool(self._connection)
        self._known: DeployedModel | None = None
        self._known_at = 0.0
        self._doubted = False
        self._asking: asyncio.Task[DeployedModel] | None = None
        self._running: set[GrpcChunks] = set()
        self.watch = StallWatch(
            stall_seconds, lambda: bool(self._running), self._problem, self._stall
        )

    async def capacity(self) -> EngineCapacity:
        """What the model's parameters tell."""
        return (await self.model()).capacity

    async def model(self, timeout: float = _CONFIG_SECONDS) -> DeployedModel:
        """What the model declares; known for a while once asked for. Raises ``EngineError``."""
        if self._known is None or self._doubted:
            return await self._ask_model(timeout)
        if _now() - self._known_at > _REFRESH_SECONDS and self._asking is None:
            self._asking = asyncio.create_task(self._ask_model(timeout))
            self._asking.add_done_callback(self._asked)
        return self._known

    def doubt_model(self) -> None:
        """The model may have been reloaded: ``capacity`` asks again.

        Requests that have asked for the capacity already, and rounds of speculative decoding, go on
        with what is known: another request's failure must not be theirs.
        """
        self._doubted = True

    async def server_answers(self, timeout: float) -> bool:
        """Whether there is a Triton at the address, whatever its models do."""
        try:
            await self._connection.unary(_SERVICE + "ServerLive", b"", timeout)
        except GrpcError:
            return False
        return True

    def generate(self, request: EngineRequest) -> GrpcChunks:
        """See ``Engine.generate``."""
        if self._known is None:
            raise EngineUnavailable(f"{self.name} at {self.url}: not asked for its capacity yet")
        chunks = GrpcChunks(self, request, self._known)
        self._running.add(chunks)
        self.watch.begin()
        return chunks

    async def close(self) -> None:
        """Close the connection; running calls end with it."""
        self.watch.close()
        if self._asking is not None:
            self._asking.cancel()
        await self.pool.close()
        await self._connection.close()

    # --- used by the running requests ---------------------------------------------------------

    def ended(self, chunks: GrpcChunks) -> None:
        """A request is over."""
        self._running.discard(chunks)

    def failure(self, error: GrpcError) -> EngineError:
        """A transport's error as an engine's."""
        unreachable = error.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
        kind = EngineUnavailable if unreachable else EngineError
        details = error.details.removeprefix(f"{self.url}: ")
        return kind(f"{self.name} at {self.url}: {details}")

    # --- the model and the server -------------------------------------------------------------

    async def _ask_model(self, timeout: float) -> DeployedModel:
        request = service_pb2.ModelConfigRequest(name=self.name).SerializeToString()
        try:
            answer = await self._connection.unary(_SERVICE + "ModelConfig", request, timeout)
        except GrpcError as error:
            raise self.failure(error) from error
        try:
            config = service_pb2.ModelConfigResponse.FromString(answer).config
        except DecodeError as error:
            problem = f"{self.name} at {self.url}: its configuration cannot be read"
            raise EngineError(problem) from error
        self._known = DeployedModel.of(config)
        self._known_at, self._doubted = _now(), False
        return self._known

    def _asked(self, task: asyncio.Task[DeployedModel]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is not None:
            self.doubt_model()

    async def _problem(self) -> str | None:
        answers = await self.server_answers(_PROBE_SECONDS)
        return None if answers else f"{self.name} at {self.url}: its server does not answer"

    def _stall(self, problem: str) -> None:
        log.error("%s; %d requests fail", problem, len(self._running))
        for chunks in list(self._running):
            chunks.stall(EngineStalled(problem))


class GrpcChunks(QueuedChunks):
    """One request on its way over one call."""

    def __init__(self, engine: GrpcEngine, request: EngineRequest, model: DeployedModel) -> None:
        super().__init__(self._cancel_call)
        self._engine = engine
        self._id = wire_id(request)
        self._running = True
        self._reader = ResponseReader(request, model)
        inputs = request_inputs(request, model, engine.vocab_size)
        self._message = packed_infer_message(
            engine.name,
            self._id,
            inputs,
            model.outputs_for(request),
            {"traceparent": request.traceparent} if request.traceparent else NO_PARAMETERS,
        )
        self._begin()

    def stall(self, error: EngineStalled) -> None:
        """Give the request up."""
        self._cancel_call()
        self.fail(error)

    def _begin(self) -> None:
        self._call = self._engine.pool.take()
        self._replies_before = self._call.replies
        self._call.on_messages, self._call.on_end = self._on_messages, self._on_end
        self._call.send(self._message)

    def _on_messages(self, messages: list[bytes]) -> None:
        self._engine.watch.arrived()
        chunks: list[EngineChunk] = []
        last = False
        try:
            for message in messages:
                if (ids := self._reader.repeated.next_id(message)) is not None:
                    chunks.append(EngineChunk(token_ids=ids))
                    continue
                reply = service_pb2.ModelStreamInferResponse.FromString(message)
                if reply.error_message:
                    # It does not say whether more is to come, so the call is not used again.
                    self._over()
                    self._engine.pool.end(self._call)
                    raise from_wire(reply.error_message)
                if reply.infer_response.id != self._id:
                    raise EngineError(f"{self._engine.name} answered to another request's id")
                new, last = self._reader.read(reply.infer_response, message)
                chunks += new
                if last:
                    break
        except Exception as error:
            self.put(chunks)
            self._fail(error)
            return
        # The call is given back first: whoever leaves with a last chunk cancels nothing.
        if last:
            self._over()
            self._engine.pool.give_back(self._call)
        self.put(chunks)
        if last:
            self.end()

    def _on_end(self, error: GrpcError | None) -> None:
        if self._replies_before and self._call.replies == self._replies_before:
            self._begin()  # a kept call had ended before it took the request: take a new one
        elif error is not None:
            self._fail(self._engine.failure(error))
        else:
            self._fail(EngineError(f"{self._engine.name} ended its stream without a last response"))

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TrtllmBlsError):
            error = EngineError(f"{self._engine.name}: its response cannot be read: {error}")
        if isinstance(error, EngineError):
            self._engine.doubt_model()
        self._cancel_call()
        self.fail(error)

    def _cancel_call(self) -> None:
        """End the request's work, unless it is over."""
        if self._running:
            self._over()
            self._call.cancel()

    def _over(self) -> None:
        self._running = False
        self._engine.ended(self)


class StreamPool:
    """The calls of one connection that no request uses at the moment."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: dict[GrpcCall, asyncio.TimerHandle] = {}
        self._ending: set[GrpcCall] = set()
        self._all_ended = asyncio.Event()

    def take(self) -> GrpcCall:
        """A call for one request: the latest used, so that the others may expire, or a new one."""
        if not self._idle:
            return self._connection.open(_SERVICE + "ModelStreamInfer", ignore, ignore)
        call, expiry = self._idle.popitem()
        expiry.cancel()
        return call

    def give_back(self, call: GrpcCall) -> None:
        """Take back a call whose request has had its final reply."""
        call.on_messages = ignore
        if call.replies >= MAX_REPLIES or len(self._idle) >= MAX_IDLE:
            self.end(call)
            return
        call.on_end = lambda error: self._forget(call)
        loop = asyncio.get_running_loop()
        self._idle[call] = loop.call_later(IDLE_SECONDS, self._expire, call)

    def end(self, call: GrpcCall) -> None:
        """Close our side of a call; what still arrives is dropped."""
        call.on_messages = ignore
        call.on_end = lambda error: self._forget(call)
        if not call.done:
            self._ending.add(call)
            call.half_close()

    async def close(self) -> None:
        """End what is idle, in order; calls that requests use are left to them."""
        for call in list(self._idle):
            self._expire(call)
        if self._ending:
            self._all_ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), _CLOSE_SECONDS)

    def _expire(self, call: GrpcCall) -> None:
        self._forget(call)
        self.end(call)

    def _forget(self, call: GrpcCall) -> None:
        expiry = self._idle.pop(call, None)
        if expiry is not None:
            expiry.cancel()
        self._ending.discard(call)
        if not self._ending:
            self._all_ended.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
