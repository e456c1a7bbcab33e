"""Calls of other models of this server, over its own gRPC port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype

from trtllm_bls.errors import EngineError, EngineUnavailable, Overloaded, TrtllmBlsError, from_wire
from trtllm_bls.grpc_client import GrpcChannel, GrpcError
from trtllm_bls.types import Array
from trtllm_bls.wire.engine_client import is_final, output_arrays, packed_infer_message

_SERVICE = "/inference.GRPCInferenceService/"


def as_array(name: str, value: Any) -> Array:
    """A value as the array of one tensor: texts become bytes, a single value gets one dimension.

    Raises ``TrtllmBlsError`` for what no tensor can hold.
    """
    array = np.asarray(value)
    if array.dtype.kind in "USO":
        flat = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1)]
        if not all(isinstance(each, bytes) for each in flat):
            raise TrtllmBlsError(f"{name}: holds objects; a tensor holds numbers, texts or bytes")
        shape, array = array.shape, np.empty(len(flat), np.object_)
        array[:] = flat
        array = array.reshape(shape)
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
