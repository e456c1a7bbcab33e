"""An engine behind any Triton server's gRPC port, this server's own included.

All requests share one connection; each running one has a ``ModelStreamInfer`` call to itself. A
cancelled call ends its request in Triton, every error is delivered, and no two requests can disturb
each other. A call is never cancelled around its final response, which would leak the request inside
Triton.

Opening a call costs more than a short request does, and speculative decoding makes two requests a
round. So a call whose request has ended is kept for the next one (``StreamPool``). Requests never
share a call at one time: a cancel ends the whole call, and in Triton 24.10 a request that is
refused on a shared call can end the server. An idle call is ended by closing our side of it: soon,
since Triton does not shut down while any call is open, and after many replies, since Triton 24.10
keeps about a kilobyte for each until the call ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import replace

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from trtllm_bls.engines.base import AskedCapacity, CallChunks, RunningCalls
from trtllm_bls.engines.triton.own_port import is_own
from trtllm_bls.errors import EngineError, EngineUnavailable, Unsupported, from_wire
from trtllm_bls.grpc_client import GrpcCall, GrpcChannel, GrpcError, ignore
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest
from trtllm_bls.wire.engine_client import (
    NO_PARAMETERS,
    DeployedModel,
    ResponseReader,
    packed_infer_message,
    request_inputs,
    wire_id,
)

_SERVICE = "/inference.GRPCInferenceService/"
IDLE_SECONDS = 1.0  # rounds of speculative decoding come back within milliseconds
MAX_IDLE = 64
MAX_REPLIES = 512  # half a megabyte inside Triton 24.10
_CLOSE_SECONDS = 1.0  # for the server to end its side of idle calls
_CONFIG_SECONDS = 10.0  # for the server to send the model's configuration
_PROBE_SECONDS = 5.0  # for a silent server to answer that it is alive
_REFRESH_SECONDS = 30.0  # after which the configuration is asked for again: models are reloaded
_ADVICE = "set engine_url to this server's gRPC port"


class GrpcEngine:
    """The ``tensorrt_llm`` model named ``name`` at ``url`` (host:port).

    ``vocab_size`` is the length of a dense embedding bias. ``stall_seconds`` is that of
    ``RunningCalls``. ``own_server``: the address is to be that of the server which this process
    belongs to, so another process that listens there is refused.
    """

    def __init__(
        self,
        url: str,
        name: str,
        vocab_size: int,
        stall_seconds: float = 0,
        tls: ssl.SSLContext | None = None,
        own_server: bool = False,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._url = url
        self._own_server = own_server
        self._channel = GrpcChannel(url, tls=tls)
        self.pool = StreamPool(self._channel)
        self._model: DeployedModel | None = None
        self._capacity = AskedCapacity(self._ask_model, _REFRESH_SECONDS)
        self.calls = RunningCalls(name, stall_seconds, self._problem, self._capacity.doubt)

    async def capacity(self) -> EngineCapacity:
        """What the model's parameters tell. Raises ``EngineError``."""
        return await self._capacity.get()

    def generate(self, request: EngineRequest) -> GrpcChunks:
        """See ``Engine.generate``."""
        if self._model is None:
            raise EngineUnavailable(f"{self.name} at {self._url}: not asked for its capacity yet")
        return GrpcChunks(self, request, self._model)

    async def close(self) -> None:
        """Close the connection; running calls end with it."""
        self.calls.close()
        await self.pool.close()
        await self._channel.close()
        await self._capacity.close()

    def failure(self, error: GrpcError) -> EngineError:
        """A call's status as an engine's error."""
        details = f"{self.name} at {self._url}: {error.details.removeprefix(f'{self._url}: ')}"
        if error.unreachable:
            return EngineUnavailable(details)
        return EngineError(details)

    async def _ask_model(self) -> EngineCapacity:
        request = service_pb2.ModelConfigRequest(name=self.name).SerializeToString()
        if self._own_server and self._model is None and is_own(self._url) is False:
            problem = f"{self.name}: another process than this server listens at {self._url}"
            raise EngineUnavailable(f"{problem}; {_ADVICE}")
        try:
            answer = await self._channel.unary(_SERVICE + "ModelConfig", request, _CONFIG_SECONDS)
            config = service_pb2.ModelConfigResponse.FromString(answer).config
        except GrpcError as error:
            failure = self.failure(error)
            if self._own_server and not await self._server_answers():
                failure = EngineUnavailable(f"{failure}; {_ADVICE}")
            raise failure from error
        except DecodeError as error:
            problem = f"{self.name} at {self._url}: its configuration cannot be read"
            raise EngineError(problem) from error
        self._model = DeployedModel.of(config)
        return self._model.capacity

    async def _problem(self) -> str | None:
        answers = await self._server_answers()
        return None if answers else f"{self.name} at {self._url}: its server does not answer"

    async def _server_answers(self) -> bool:
        """Whether there is a Triton at the address, whatever its models do."""
        try:
            await self._channel.unary(_SERVICE + "ServerLive", b"", _PROBE_SECONDS)
        except GrpcError:
            return False
        return True


class GrpcChunks(CallChunks):
    """One request over one call of the engine's pool."""

    def __init__(self, engine: GrpcEngine, request: EngineRequest, model: DeployedModel) -> None:
        if not model.decoupled:
            if (sequences := request.num_return_sequences) > 1:
                problem = f"{sequences}; the engine's model is not decoupled and answers once"
                raise Unsupported("num_return_sequences", f"{problem}; send 1")
            request = replace(request, streaming=False)
        self._engine = engine
        self._id = wire_id(request)
        self._reader = ResponseReader(request, model)
        self._message = packed_infer_message(
            engine.name,
            self._id,
            request_inputs(request, model, engine.vocab_size),
            model.outputs_for(request),
            {"traceparent": request.traceparent} if request.traceparent else NO_PARAMETERS,
        )
        super().__init__(engine.calls)
        self._begin()

    def _begin(self) -> None:
        self._call = self._engine.pool.take()
        self._replies_before = self._call.replies
        self._call.on_messages, self._call.on_end = self.on_messages, self._on_end
        self._call.send(self._message)

    def _read(self, messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        for message in messages:
            if (ids := self._reader.next_id(message)) is not None:
                chunks.append(EngineChunk(token_ids=ids))
                continue
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                # It does not say whether more is to come, so the call takes no other request.
                self._engine.pool.end(self._call)
                raise from_wire(reply.error_message)
            if reply.infer_response.id != self._id:
                raise EngineError(f"{self._engine.name} answered to another request's id")
            new, last = self._reader.read(reply.infer_response, message)
            chunks += new
            if last:
                return True
        return False

    def _let_go(self, finished: bool) -> None:
        if finished:
            self._engine.pool.give_back(self._call)
        elif not self._call.half_closed:  # the pool is ending it already
            self._call.cancel()

    def _on_end(self, error: GrpcError | None) -> None:
        if self._replies_before and self._call.replies == self._replies_before:
            self._begin()  # a kept call had ended before it took the request: take a new one
        elif error is not None:
            self.give_up(self._engine.failure(error))
        else:
            problem = f"{self._engine.name} ended its stream without a last response"
            self.give_up(EngineError(problem))


class StreamPool:
    """The calls of one connection that no request uses at the moment."""

    def __init__(self, channel: GrpcChannel) -> None:
        self._channel = channel
        self._idle: dict[GrpcCall, asyncio.TimerHandle] = {}
        self._ending: set[GrpcCall] = set()
        self._all_ended = asyncio.Event()

    def take(self) -> GrpcCall:
        """A call for one request: the latest used, so that the others may expire, or a new one."""
        if not self._idle:
            return self._channel.open(_SERVICE + "ModelStreamInfer", ignore, ignore)
        call, expiry = self._idle.popitem()
        expiry.cancel()
        return call

    def give_back(self, call: GrpcCall) -> None:
        """Take back a call whose request has had its final reply."""
        if call.replies >= MAX_REPLIES or len(self._idle) >= MAX_IDLE:
            self.end(call)
            return
        call.on_messages, call.on_end = ignore, lambda error: self._forget(call)
        loop = asyncio.get_running_loop()
        self._idle[call] = loop.call_later(IDLE_SECONDS, self._expire, call)

    def end(self, call: GrpcCall) -> None:
        """Close our side of a call; what still arrives is dropped."""
        call.on_messages, call.on_end = ignore, lambda error: self._forget(call)
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
