"""An engine behind any Triton server's gRPC port, this server's own included.

Preferred where the decoupled BLS API of the running Triton cannot cancel or loses errors: a gRPC
call cancels for real, delivers every error, and couples no two requests. One channel; each running
request has a call to itself, kept for the next one when it has ended (``streams``). A call is never
cancelled around its final response, which would leak the request inside Triton.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from trtllm_bls.contract import ENGINE
from trtllm_bls.contract.tensors import NUMPY_TYPES
from trtllm_bls.engines.dialect import Dialect, Responses
from trtllm_bls.engines.stall import StallTimer
from trtllm_bls.engines.streams import Carried, Streams
from trtllm_bls.errors import EngineError, EngineStalled, EngineUnavailable, from_wire
from trtllm_bls.messages import Array, EngineChunk, EngineLimits, EngineRequest
from trtllm_bls.wire.engine import request_arrays

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Our own pool of connections: two engines on one address must not share flow control.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcEngine:
    """The ``tensorrt_llm`` model named ``name`` at ``url`` (host:port)."""

    def __init__(self, url: str, name: str, vocab_size: int, stall_seconds: float = 0) -> None:
        self.name = name
        self._url = url
        self._vocab_size = vocab_size
        self._stall_seconds = stall_seconds
        self._channel: grpc.aio.Channel | None = None
        self._calls: Any = None
        self._streams: Streams | None = None
        self._known: Dialect | None = None

    async def limits(self) -> EngineLimits:
        """What the model's parameters tell."""
        return (await self.dialect()).limits

    async def dialect(self, timeout: float | None = 10) -> Dialect:
        """The model's declared tensors, asked for once. Raises ``EngineError``."""
        if self._known is None:
            request = service_pb2.ModelConfigRequest(name=self.name)
            try:
                answer = await self._stub().ModelConfig(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                raise self._failure(error) from error
            self._known = Dialect.of(answer.config)
        return self._known

    async def server_answers(self, timeout: float) -> bool:
        """Whether there is a Triton at the address, whatever its models do."""
        try:
            await self._stub().ServerLive(service_pb2.ServerLiveRequest(), timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See ``Engine.generate``."""
        dialect = await self.dialect()
        message = _infer_request(self.name, request, dialect, self._vocab_size)
        carried, responses = Carried(self._kept_streams()), Responses(request, dialect)
        timer = StallTimer(self._stall_seconds, carried.cancel)
        try:
            reply = await carried.ask(message)
            while not carried.over:
                timer.feed()
                # The call is given back first: whoever leaves with a last chunk cancels nothing.
                for chunk in self._chunks(reply, carried, responses):
                    yield chunk
                if not carried.over:
                    reply = await carried.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            if not timer.stalled:
                raise
            raise EngineStalled(f"{self.name} sent nothing for {self._stall_seconds:g} s") from None
        finally:
            timer.close()
            carried.cancel()

    def _chunks(self, reply: Any, carried: Carried, responses: Responses) -> list[EngineChunk]:
        if reply is None:
            raise EngineError(f"{self.name} ended its stream without a final response")
        if reply.error_message:
            carried.fail()
            raise from_wire(reply.error_message)
        response = reply.infer_response
        if response.parameters["triton_final_response"].bool_param:
            carried.finish()
        return list(responses.chunks(_outputs(response), last=carried.over))

    async def close(self) -> None:
        """Close the channel; running calls end with it."""
        if self._streams is not None:
            await self._streams.close()
        if self._channel is not None:
            await self._channel.close()

    def _kept_streams(self) -> Streams:
        if self._streams is None:
            self._streams = Streams(self._stub().ModelStreamInfer)
        return self._streams

    def _stub(self) -> Any:
        if self._channel is None:  # made on first use: it belongs to the running event loop
            self._channel = grpc.aio.insecure_channel(self._url, options=_OPTIONS)
            # Kept: making it costs as much as a short call.
            self._calls = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._calls

    def _failure(self, error: grpc.aio.AioRpcError) -> EngineError:
        unreachable = error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        kind = EngineUnavailable if unreachable else EngineError
        return kind(f"{self.name} at {self._url}: {error.details()}")


def _infer_request(name: str, request: EngineRequest, dialect: Dialect, vocab_size: int) -> Any:
    message = service_pb2.ModelInferRequest(model_name=name, id=request.request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor, array in request_arrays(request, dialect.inputs, vocab_size).items():
        message.inputs.append(_header(tensor, array.shape))
        if ENGINE.input_named[tensor].dtype == "STRING":
            message.raw_input_contents.append(serialize_byte_tensor(array).item())
        else:
            message.raw_input_contents.append(array.tobytes())
    for output in dialect.outputs_for(request):
        message.outputs.add(name=output)
    return message


@lru_cache(maxsize=1024)
def _header(name: str, shape: tuple[int, ...]) -> Any:
    """A tensor without its numbers; copied where it is used, which is cheaper than made."""
    dtype = ENGINE.input_named[name].dtype
    datatype = "BYTES" if dtype == "STRING" else dtype
    return service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)


def _outputs(response: Any) -> Mapping[str, Array]:
    return {
        output.name: np.frombuffer(raw, dtype=NUMPY_TYPES[output.datatype]).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
