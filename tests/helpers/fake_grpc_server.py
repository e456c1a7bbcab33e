"""A Triton server at the wire: scripted answers, real gRPC, the streaming rules kept.

The rules: an empty final response is sent only to callers that opted in; every response says
whether it is final; the stream ends when the caller has closed its side and every request on it
is answered; a cancelled call ends its handler at once.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor


@dataclass(frozen=True)
class Say:
    """One response; values are arrays without batch dimension, or one string or number."""

    outputs: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False


@dataclass(frozen=True)
class Fail:
    """An error in the stream, which stays open."""

    message: str


@dataclass(frozen=True)
class Abort:
    """The call ends with a gRPC status."""

    code: grpc.StatusCode
    details: str


class Hold:
    """Nothing more comes until the caller leaves."""


@dataclass(frozen=True)
class Until:
    """Nothing more comes until the event is set."""

    event: asyncio.Event


class Unflagged(Say):
    """A response of a server that does not mark final responses."""


Step = Say | Fail | Abort | Hold | Until
Script = Sequence[Step] | Callable[[Any], Sequence[Step]]


def text(text: str, final: bool = False, **outputs: Any) -> Say:
    """A response of a text model."""
    return Say({"text_output": text, **outputs}, final)


def tokens(*ids: int, final: bool = False, **outputs: Any) -> Say:
    """A response of an engine model, one beam."""
    beams = {"output_ids": np.array([ids], np.int32), "sequence_length": np.int32(len(ids))}
    return Say({**beams, **outputs}, final)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """``async with FakeTriton(script) as server``; ``script`` may depend on the request."""

    def __init__(self, script: Script, credentials: Any = None) -> None:
        self.script = script
        self.credentials = credentials
        self.requests: list[Any] = []
        self.cancels = 0
        self.asked = asyncio.Event()  # a request has arrived
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()  # a stream has ended well
        self.url = ""
        self._server = grpc.aio.server()

    async def __aenter__(self) -> FakeTriton:
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if self.credentials:
            port = self._server.add_secure_port("127.0.0.1:0", self.credentials)
        else:
            port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._server.stop(grace=None)

    async def vanish(self) -> None:
        """Close every connection at once."""
        await self._server.stop(grace=None)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        try:
            async for request in requests:
                self.requests.append(request)
                self.asked.set()
                script = self.script
                for step in script(request) if callable(script) else script:
                    async for response in self._play(step, request, context):
                        yield response
            self.ended.set()
        except asyncio.CancelledError:
            self.cancels += 1
            self.cancelled.set()
            raise

    async def _play(self, step: Step, request: Any, context: Any) -> Any:
        if isinstance(step, Hold):
            await asyncio.Event().wait()
        elif isinstance(step, Until):
            await step.event.wait()
        elif isinstance(step, Abort):
            await context.abort(step.code, step.details)
        elif isinstance(step, Fail):
            yield service_pb2.ModelStreamInferResponse(error_message=step.message)
        elif step.outputs or request.parameters["triton_enable_empty_final_response"].bool_param:
            yield service_pb2.ModelStreamInferResponse(infer_response=_response(step, request))


def _response(step: Say, request: Any) -> Any:
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    if not isinstance(step, Unflagged):
        response.parameters["triton_final_response"].bool_param = step.final
    for name, value in step.outputs.items():
        is_text = isinstance(value, str)
        array = np.array([value.encode()], dtype=object) if is_text else np.atleast_1d(value)
        array = array[np.newaxis]
        packed = serialize_byte_tensor(array).item() if is_text else array.tobytes()
        response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        response.raw_output_contents.append(packed)
    return response


def inputs_of(request: Any) -> dict[str, Any]:
    """What a request carries, by wire name: lists of rows, strings decoded."""
    found = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values: list[Any] = []
            while raw:
                size = int.from_bytes(raw[:4], "little")
                values.append(raw[4 : 4 + size].decode())
                raw = raw[4 + size :]
            found[tensor.name] = np.array(values, object).reshape(tensor.shape).tolist()
        else:
            dtype = {"FP32": "float32", "FP16": "float16"}.get(tensor.datatype)
            array = np.frombuffer(raw, dtype or tensor.datatype.lower())
            found[tensor.name] = array.reshape(tensor.shape).tolist()
    return found


def dialogue(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run
