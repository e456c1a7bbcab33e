"""A Triton for engines, at the wire: real gRPC, a model configuration, scripted inferences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtllm_bls.contract import ENGINE
from trtllm_bls.contract.pbtxt import model_config
from trtllm_bls.engines.grpc import GrpcEngine
from trtllm_bls.messages import EngineChunk, EngineRequest


@dataclass(frozen=True)
class Say:
    """One response with these tokens."""

    tokens: tuple[int, ...] = ()
    final: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    empty: bool = False  # no outputs at all


@dataclass(frozen=True)
class Fail:
    message: str


HOLD, LINGER = "nothing until the caller leaves", "a while between the last word and the end"
HANG_UP = "the call ends in the middle of a request"


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every inference with ``steps``; knows what its callers did.

    ``calls`` lists, per call that was opened, the ids of the requests that it carried; ``closed``
    counts the calls that their callers ended politely, ``cancelled`` tells of the others.
    """

    def __init__(self, *steps: Any, config: Any = None) -> None:
        self.steps = steps
        self.config = config or model_config(ENGINE, {"max_sequence_tokens": "64"})
        self.asked: list[Any] = []
        self.calls: list[list[str]] = []
        self.closed = 0
        self.config_asked = 0
        self.loading = False
        self.cancelled = asyncio.Event()
        self.url = ""

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        self.config_asked += 1
        if self.loading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has no available versions")
        if request.name != self.config.name:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
        return service_pb2.ModelConfigResponse(config=self.config)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        carried: list[str] = []
        self.calls.append(carried)
        try:
            async for request in requests:
                self.asked.append(request)
                carried.append(request.id)
                for step in self.steps:
                    if step is HANG_UP:
                        return
                    if step is HOLD:
                        await asyncio.Event().wait()
                    elif isinstance(step, asyncio.Event):
                        await step.wait()
                    elif step is LINGER:
                        await asyncio.sleep(0.03)
                    elif isinstance(step, grpc.StatusCode):
                        await context.abort(step, "the wire says so")
                    else:
                        yield self._reply(step)
            self.closed += 1
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _reply(self, step: Say | Fail) -> Any:
        if isinstance(step, Fail):
            return service_pb2.ModelStreamInferResponse(error_message=step.message)
        response = service_pb2.ModelInferResponse(model_name="tensorrt_llm")
        response.parameters["triton_final_response"].bool_param = step.final
        arrays = {
            "output_ids": np.array([[step.tokens]], np.int32),
            "sequence_length": np.array([[len(step.tokens)]], np.int32),
            **step.more,
        }
        for name, array in {} if step.empty else arrays.items():
            dtype = ENGINE.output_named[name].dtype
            response.outputs.add(name=name, datatype=dtype, shape=array.shape)
            response.raw_output_contents.append(array.tobytes())
        return service_pb2.ModelStreamInferResponse(infer_response=response)


@asynccontextmanager
async def serving(triton: Triton) -> AsyncIterator[Triton]:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    triton.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield triton
    finally:
        await server.stop(grace=None)


def run(dialogue: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(dialogue, 20))


ASK = EngineRequest(request_id="mine", input_ids=(7, 8), max_tokens=9)


@asynccontextmanager
async def reaching(
    *steps: Any, config: Any = None, stall: float = 0, name: str = "tensorrt_llm"
) -> AsyncIterator[tuple[GrpcEngine, Triton]]:
    async with serving(Triton(*steps, config=config)) as triton:
        engine = GrpcEngine(triton.url, name, vocab_size=50, stall_seconds=stall)
        try:
            yield engine, triton
        finally:
            await engine.close()


async def read(engine: GrpcEngine, request: EngineRequest = ASK) -> list[EngineChunk]:
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks]
