"""Calls over a Triton server's gRPC port: an engine, and other models of this server.

All requests of an engine share one connection; each running one has a ``ModelStreamInfer`` call to
itself. A cancelled call ends its request in Triton, every error is delivered, and no two requests
can disturb each other. A call is never cancelled around its final response, which would leak the
request inside Triton.

Opening a call costs more than a short request does, and speculative decoding makes two requests a
round. So a call whose request has ended is kept for the next one (``StreamPool``). Requests never
share a call at one time: a cancel ends the whole call, and in Triton 24.10 a request that is
refused on a shared call can end the server. An idle call is ended by closing our side of it: soon,
since Triton does not shut down while any call is open, and after many replies, since Triton 24.10
keeps about a kilobyte for each until the call ends.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype

from trtllm_bls.engines.base import AskedCapacity, CallChunks, RunningCalls
from trtllm_bls.engines.triton.own_port import is_own
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    Overloaded,
    TrtllmBlsError,
    Unsupported,
    from_wire,
)
from trtllm_bls.grpc_client import GrpcCall, GrpcChannel, GrpcError, ignore
from trtllm_bls.types import Array, EngineCapacity, EngineChunk, EngineRequest
from trtllm_bls.wire.engine_client import (
    DeployedModel,
    ResponseReader,
    is_final,
    output_arrays,
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
            if self._own_server and await self._problem() is not None:
                failure = EngineUnavailable(f"{failure}; {_ADVICE}")
            raise failure from error
        except DecodeError as error:
            problem = f"{self.name} at {self._url}: its configuration cannot be read"
            raise EngineError(problem) from error
        self._model = DeployedModel.of(config)
        return self._model.capacity

    async def _problem(self) -> str | None:
        """Whether there is no Triton at the address, whatever its models do."""
        try:
            await self._channel.unary(_SERVICE + "ServerLive", b"", _PROBE_SECONDS)
        except GrpcError:
            return f"{self.name} at {self._url}: its server does not answer"
        return None


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
            request.traceparent,
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
        # Of the calls whose server has not ended its side yet.
        self._ending: set[asyncio.Future[GrpcError | None]] = set()

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
        self._idle[call] = loop.call_later(IDLE_SECONDS, self.end, call)

    def end(self, call: GrpcCall) -> None:
        """Close our side of a call; what still arrives is dropped."""
        self._forget(call)
        if not call.done:
            ended = asyncio.get_running_loop().create_future()
            ended.add_done_callback(self._ending.discard)
            self._ending.add(ended)
            call.on_messages, call.on_end = ignore, ended.set_result
            call.half_close()

    async def close(self) -> None:
        """End what is idle, in order; calls that requests use are left to them."""
        for call in list(self._idle):
            self.end(call)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_SECONDS)

    def _forget(self, call: GrpcCall) -> None:
        if (expiry := self._idle.pop(call, None)) is not None:
            expiry.cancel()


# --- other models of this server ------------------------------------------------------------


def as_array(name: str, value: Any) -> Array:
    """A value as the array of one tensor: texts become bytes, a single value gets one dimension.

    Raises ``TrtllmBlsError`` for what no tensor can hold.
    """
    array = np.asarray(value)
    if array.dtype.kind in "USO":
        flat = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1)]
        if not all(isinstance(each, bytes) for each in flat):
            raise TrtllmBlsError(f"{name}: holds objects; a tensor holds numbers, texts or bytes")
        array = np.array(flat, np.object_).reshape(array.shape)
    return array if array.ndim else array.reshape(1)


class OtherModels:
    """``url`` is the server's gRPC port."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._channel = GrpcChannel(url, tls=tls)

    async def infer(
        self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str], request_id: str
    ) -> dict[str, Array]:
        """The one response of a model that is not decoupled."""
        message = _packed(model, inputs, outputs, request_id)
        try:
            answer = await self._channel.unary(_SERVICE + "ModelInfer", message)
        except GrpcError as error:
            raise _failure(model, error) from error
        return dict(output_arrays(service_pb2.ModelInferResponse.FromString(answer)))

    def stream(
        self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str], request_id: str
    ) -> ModelStream:
        """The responses of a decoupled model."""
        return ModelStream(model, self._channel, _packed(model, inputs, outputs, request_id))

    async def close(self) -> None:
        """End what runs, and disconnect."""
        await self._channel.close()


class ModelStream:
    """An async iterator over the responses of a decoupled model; ``aclose`` ends its work."""

    def __init__(self, model: str, channel: GrpcChannel, message: bytes) -> None:
        self._model = model
        self._arrived: asyncio.Queue[bytes | GrpcError | None] = asyncio.Queue()
        self._over = False
        method = _SERVICE + "ModelStreamInfer"
        self._call = channel.open(method, self._on_messages, self._arrived.put_nowait)
        self._call.send(message)

    def __aiter__(self) -> ModelStream:
        return self

    async def __anext__(self) -> dict[str, Array]:
        while not self._over:
            message = await self._arrived.get()
            if not isinstance(message, bytes):
                self._over = True
                raise _failure(self._model, message or GrpcError("INTERNAL", "ended in mid-stream"))
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            self._over = bool(reply.error_message) or is_final(reply.infer_response)
            if self._over:
                # Triton 24.10 leaks a request that is cancelled around its last response.
                self._call.half_close()
            if reply.error_message:
                raise _named(self._model, from_wire(reply.error_message))
            if reply.infer_response.outputs:
                return dict(output_arrays(reply.infer_response))
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the model's work, unless it has ended; a reader that waits gets an error."""
        if not self._over:
            self._over = True
            self._call.cancel()
            self._arrived.put_nowait(GrpcError("CANCELLED", "its request has ended"))

    def _on_messages(self, messages: list[bytes]) -> None:
        for message in messages:
            self._arrived.put_nowait(message)


def _packed(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str], request_id: str
) -> bytes:
    arrays = {name: as_array(name, value) for name, value in inputs.items()}
    typed = [(name, np_to_triton_dtype(each.dtype), each) for name, each in arrays.items()]
    return packed_infer_message(model, request_id, typed, outputs)


def _failure(model: str, error: GrpcError) -> Exception:
    if error.unreachable:
        return EngineUnavailable(f"{model}: {error.details}")
    hint = "; use request.stream" if "decoupled transaction policy" in error.details else ""
    return _named(model, from_wire(error.details + hint))


def _named(model: str, error: Exception) -> Exception:
    """The error of another model; a mistake in what it was sent is not the caller's."""
    kind = EngineUnavailable if isinstance(error, Overloaded) else EngineError
    return kind(f"{model}: {error}")
