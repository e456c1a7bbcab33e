"""A ``tensorrt_llm`` model on the fake gRPC server, and the engine that reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import numpy as np

from tests.helpers import fake_grpc_server as wire
from tests.helpers.fake_grpc_server import Fail, FakeGrpcServer, Step
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.types import EngineChunk, EngineRequest
from trtllm_bls.wire.contract import ENGINE

__all__ = [
    "ASK",
    "HANG_UP",
    "HOLD",
    "LINGER",
    "Fail",
    "Say",
    "Triton",
    "inputs",
    "reaching",
    "read",
    "run",
]

HOLD, HANG_UP = wire.Hold(), wire.HangUp()
LINGER = wire.Pause(0.03)  # between the last word and the end
ASK = EngineRequest(request_id="mine", input_ids=(7, 8), max_tokens=9)


def inputs(message: Any) -> dict[str, Any]:
    """A request's inputs: numbers by name."""
    found = {}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            found[tensor.name] = raw[4:].decode()
        else:
            dtype = ENGINE.input_named[tensor.name].numpy_type
            found[tensor.name] = np.frombuffer(raw, dtype).reshape(tensor.shape).tolist()
    return found


def Say(
    tokens: tuple[int, ...] = (),
    final: bool = False,
    more: Mapping[str, Any] | None = None,
    empty: bool = False,
) -> wire.Say:
    """One response with these tokens; ``more`` is a batch of one, ``empty`` has no outputs."""
    if empty:
        return wire.Say(final=final)
    rows = {name: array[0] for name, array in (more or {}).items()}
    return wire.tokens(*tokens, final=final, **rows)


class Triton(FakeGrpcServer):
    """Answers every inference with ``steps``: an event is waited for, a status ends the call."""

    def __init__(self, *steps: Any, config: Any = None) -> None:
        super().__init__(self._script, config=config or _engine_config())
        self.steps = steps

    def _script(self, request: Any) -> Sequence[Step]:
        return [_step(step) for step in self.steps]


def _engine_config() -> Any:
    return model_config(ENGINE, {"max_sequence_tokens": "64"})


def _step(step: Any) -> Step:
    if isinstance(step, asyncio.Event):
        return wire.Until(step)
    if isinstance(step, grpc.StatusCode):
        return wire.Abort(step, "the wire says so")
    return step  # type: ignore[no-any-return]


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 20))


@asynccontextmanager
async def reaching(
    *steps: Any, config: Any = None, stall: float = 0, name: str = "tensorrt_llm"
) -> AsyncIterator[tuple[GrpcEngine, Triton]]:
    async with Triton(*steps, config=config) as triton:
        engine = GrpcEngine(triton.url, name, vocab_size=50, stall_seconds=stall)
        try:
            yield engine, triton
        finally:
            await engine.close()


async def read(engine: GrpcEngine, request: EngineRequest = ASK) -> list[EngineChunk]:
    await engine.capacity()
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks]
