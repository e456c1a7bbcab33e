"""A Triton server at the wire: scripted answers, real gRPC, the streaming rules kept.

``trtllm_bls.pipeline.testing`` is the other side: what Triton gives to a Python model.

The rules: an empty final response is sent only to callers that opted in; every response says
whether it is final; the stream ends when the caller has closed its side and every request on it
is answered; a cancelled call ends its handler at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from tests.helpers.waiting import join


@dataclass(frozen=True)
class Say:
    """One response; values are arrays without batch dimension, or one string or number.

    ``id``: of another request than the one it answers. ``damage`` changes the finished message.
    """

    outputs: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False
    id: str | None = None
    damage: Callable[[Any], object] | None = None


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


class HangUp:
    """The call ends in the middle of a request."""


@dataclass(frozen=True)
class Until:
    """Nothing more comes until the event is set."""

    event: asyncio.Event


class Unflagged(Say):
    """A response of a server that does not mark final responses."""


@dataclass(frozen=True)
class Pause:
    """A while between two responses."""

    seconds: float


Server = TypeVar("Server", bound="FakeGrpcServer")
Step = Say | Fail | Abort | Hold | HangUp | Until | Pause
Script = Sequence[Step] | Callable[[Any], Sequence[Step]]


def text(text: str, final: bool = False, **outputs: Any) -> Say:
    """A response of a text model."""
    return Say({"text_output": text, **outputs}, final)


def tokens(*ids: int, final: bool = False, **outputs: Any) -> Say:
    """A response of an engine model, one beam."""
    beams = {"output_ids": np.array([ids], np.int32), "sequence_length": np.int32(len(ids))}
    return Say({**beams, **outputs}, final)


class FakeGrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """``async with FakeGrpcServer(script) as server``; ``script`` may depend on the request.

    ``asked`` holds all requests; ``calls``, per call that was opened, the ids of the requests on
    it. ``config`` is the configuration of its one model, ``loading`` hides it. A ``frozen`` server
    does not say that it is alive. A ``port`` of 0 is any free one.
    """

    def __init__(
        self, script: Script, credentials: Any = None, config: Any = None, port: int = 0
    ) -> None:
        self.script = script
        self.credentials = credentials
        self.config = config
        self.port = port
        self.loading = False
        self.frozen = False  # does not say that it is alive
        self.live_asked = 0
        self.config_asked = 0
        self.asked: list[Any] = []
        self.calls: list[list[str]] = []
        self.closed = 0  # calls whose callers ended them in order
        self.cancels = 0
        self.arrived = asyncio.Event()  # a request is here
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()  # a stream has ended well
        self.url = ""
        self._server = grpc.aio.server()

    async def __aenter__(self: Server) -> Server:
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if self.credentials:
            port = self._server.add_secure_port(f"127.0.0.1:{self.port}", self.credentials)
        else:
            port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.url = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._server.stop(grace=None)

    async def vanish(self) -> None:
        """Close every connection at once."""
        await self._server.stop(grace=None)

    async def ServerLive(self, request: Any, context: Any) -> Any:
        self.live_asked += 1
        if self.frozen:
            await asyncio.Event().wait()
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=not self.loading)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        self.config_asked += 1
        if self.loading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has no available versions")
        if self.config is None or request.name != self.config.name:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
        return service_pb2.ModelConfigResponse(config=self.config)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        ids: list[str] = []
        self.calls.append(ids)
        try:
            async for request in requests:
                self.asked.append(request)
                ids.append(request.id)
                self.arrived.set()
                script = self.script
                for step in script(request) if callable(script) else script:
                    if isinstance(step, HangUp):
                        return
                    async for response in self._play(step, request, context):
                        yield response
            self.closed += 1
            self.ended.set()
        except (asyncio.CancelledError, GeneratorExit):  # the latter while a response is sent
            self.cancels += 1
            self.cancelled.set()
            raise

    async def _play(self, step: Step, request: Any, context: Any) -> Any:
        if isinstance(step, Hold):
            await asyncio.Event().wait()
        elif isinstance(step, Until):
            await step.event.wait()
        elif isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, Abort):
            await context.abort(step.code, step.details)
        elif isinstance(step, Fail):
            yield service_pb2.ModelStreamInferResponse(error_message=step.message)
        elif isinstance(step, Say) and (
            step.outputs or request.parameters["triton_enable_empty_final_response"].bool_param
        ):
            yield service_pb2.ModelStreamInferResponse(infer_response=_response(step, request))


def _response(step: Say, request: Any) -> Any:
    id = request.id if step.id is None else step.id
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=id)
    if not isinstance(step, Unflagged):
        response.parameters["triton_final_response"].bool_param = step.final
    for name, value in step.outputs.items():
        is_text = isinstance(value, str)
        array = np.array([value.encode()], dtype=object) if is_text else np.atleast_1d(value)
        array = array[np.newaxis]
        packed = serialize_byte_tensor(array).item() if is_text else array.tobytes()
        response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        response.raw_output_contents.append(packed)
    if step.damage is not None:
        step.damage(response)
    return response


def inputs_of(request: Any) -> dict[str, Any]:
    """A request's inputs by wire name: lists of rows, strings decoded."""
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


@contextmanager
def in_a_thread(make: Callable[[], FakeGrpcServer]) -> Iterator[FakeGrpcServer]:
    """The server that ``make`` makes, on a loop of its own, for callers that have none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def started() -> FakeGrpcServer:
        return await make().__aenter__()

    server = asyncio.run_coroutine_threadsafe(started(), loop).result(60)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        join(thread)
        loop.close()
