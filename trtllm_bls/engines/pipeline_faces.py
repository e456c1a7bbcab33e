"""Requests to the faces of pipelines behind a Triton server, beside conversations.

A request is one JSON text in the tensor that the face names, and an answer its outputs. The last
response has the usage; an answer without it has failed.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from trtllm_bls.errors import EngineError, EngineUnavailable, from_wire
from trtllm_bls.settings.faces import FACE_END, Face
from trtllm_bls.types import Array
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, CallContext, signed_context
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError, ResponseStream, close_or_cancel
from trtllm_bls.wire.kserve import SERVICE, is_final, output_arrays, packed_infer_message


@dataclass(frozen=True, kw_only=True)
class FaceCall:
    """A request to one face of a pipeline.

    ``fields``: the endpoint's. ``key``: a digest of the caller's API key, if there are keys.
    ``cache_salt``: callers share KV cache blocks only with the same salt.
    """

    model: str
    face: Face
    fields: Mapping[str, Any]
    request_id: str
    key: str | None = None
    cache_salt: str | None = None
    traceparent: str | None = None

    @property
    def body(self) -> bytes:
        """The request as JSON."""
        return json.dumps(self.fields).encode()

    def message(self, seconds: float | None) -> bytes:
        """Serialise the request for Triton. ``seconds``: until its time limit."""
        text = np.array([self.body, None], np.object_)[:1]
        outputs: list[str] = []
        for name, _, _ in self.face.outputs:
            outputs.append(name)
        context = CallContext(key=self.key, cache_salt=self.cache_salt, seconds=seconds)
        return packed_infer_message(
            self.model,
            self.request_id,
            [(self.face.request, "BYTES", text)],
            outputs,
            self.traceparent,
            parameters={CONTEXT_PARAMETER: signed_context(self.model, context)},
        )


@dataclass(frozen=True)
class FaceUsage:
    """Tokens of the language models that an answer came from."""

    prompt_tokens: int
    completion_tokens: int


class FaceModels:
    """The pipelines behind the gRPC port ``url``."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._channel = GrpcChannel(url, tls=tls)

    async def responses(
        self, call: FaceCall, seconds: float | None
    ) -> AsyncGenerator[Mapping[str, Array] | FaceUsage, None]:
        """Yield the responses as they come, and the usage last. Closing this ends the model's work.

        ``seconds``: until the request's time limit.
        Raises ``EngineError`` for an answer without an end, and the pipeline's errors.
        """
        usage: FaceUsage | None = None
        async with aclosing(self._arrivals(call, seconds)) as arrivals:
            async for outputs in arrivals:
                if FACE_END in outputs:
                    usage = FaceUsage(**json.loads(outputs[FACE_END][0]))
                else:
                    yield outputs
        if usage is None:
            raise EngineError(f"{call.model}: the answer has no end")
        yield usage

    async def _arrivals(
        self, call: FaceCall, seconds: float | None
    ) -> AsyncGenerator[Mapping[str, Array], None]:
        stream = _Responses(call.model, self._channel, call.message(seconds))
        try:
            await stream.wait()
            while responses := stream.take():
                for outputs in responses:
                    yield outputs
                await stream.wait()
        finally:
            await stream.aclose()

    async def close(self) -> None:
        """End running requests, and disconnect."""
        await self._channel.close()


class _Responses(ResponseStream[Mapping[str, Array]]):
    """The responses of one answer, as far as they have arrived."""

    def __init__(self, model: str, channel: GrpcChannel, message: bytes) -> None:
        super().__init__(close_or_cancel)
        self._model = model
        self._call = channel.open(SERVICE + "ModelStreamInfer", self.on_messages, self.on_end)
        self._call.send(message)

    def _read(self, messages: list[bytes], items: list[Mapping[str, Array]]) -> bool:
        for message in messages:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise from_wire(reply.error_message)
            if reply.infer_response.outputs:
                items.append(output_arrays(reply.infer_response))
            if is_final(reply.infer_response):
                return True
        return False

    def _failure(self, error: GrpcError | None) -> EngineError:
        if error is None:
            return EngineError(f"{self._model}: ended in mid-stream")
        kind = EngineUnavailable if error.unreachable else EngineError
        return kind(f"{self._model}: {error.details}")

    def _unreadable(self, error: Exception) -> EngineError:
        return EngineError(f"{self._model}: a response cannot be read: {error}")
