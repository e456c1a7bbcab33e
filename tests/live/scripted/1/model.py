"""Test model: ``tensorrt_llm`` played by scripted engines that say the prompt back.

So the right answer to any text is the text itself, whatever the tokenizer. The request's seed
chooses what goes wrong (see ``FAULTS``); parameter ``step_ms`` is the time of one step. With
``llm_api``, a release, they are behind TensorRT-LLM's LLM API, played.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from doubles.generated import GeneratedChunks
from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests import helpers
from trtllm_bls.engines.base import ChunkStream, Engine
from trtllm_bls.engines.llm_api import open_llm
from trtllm_bls.errors import EngineError
from trtllm_bls.orchestrator.log_lines import log_to_triton
from trtllm_bls.orchestrator.reports import keep_for_ever
from trtllm_bls.settings.parameters import (
    FLAG,
    NUMBER,
    TEXT,
    EngineParameters,
    Parameters,
    count,
    none_if_zero,
)
from trtllm_bls.triton.engine_service import EngineService
from trtllm_bls.triton.request_server import RequestServer
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest

FAULTS = {
    666001: Fault(error=EngineError("the script says so"), after_tokens=3),
    666002: Fault(error=None, after_tokens=3),
    666003: Fault(error=EngineError("the script says so")),
}


@dataclass(frozen=True, kw_only=True)
class EchoParameters:
    step_ms: float = NUMBER.parameter("Time of one step.", "0")
    max_sequence_tokens: int | None = none_if_zero(count(0)).parameter(
        "Prompt and answer; 0 = any.", "0"
    )
    vocab_size: int = count(1).parameter("Tokens there are.", "100000")
    exclude_input_in_output: bool = FLAG.parameter("Leave the prompt out.", "false")
    llm_api: str = TEXT.parameter("Release of the LLM API before it.")


class Gauge:
    """A number on ``/metrics``, by which a test sees what the engine is doing."""

    def __init__(self, name: str) -> None:
        self._family = pb_utils.MetricFamily(
            name=name, description=name, kind=pb_utils.MetricFamily.GAUGE
        )
        self._metric = self._family.Metric(labels={"model": "tensorrt_llm"})
        for each in (self._family, self._metric):
            keep_for_ever(each)

    def add(self, value: int) -> None:
        self._metric.increment(value)


class EchoEngine:
    """Says the prompt back, then ends; tells how many requests are live and the tokens made."""

    name = "echo"

    def __init__(self, script: Script) -> None:
        self._script = script
        self._live = Gauge("echo_live_requests")
        self._made = Gauge("echo_tokens")

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity()

    def generate(self, request: EngineRequest) -> ChunkStream:
        return GeneratedChunks(self._chunks(request))

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        end = request.end_id if request.end_id is not None else -1
        rule = reciting(request.input_ids, len(request.input_ids), then=max(end, 0))
        engine = ScriptedEngine(rule, self._script)
        engine.fault = FAULTS.get(request.sampling.seed or 0)
        tokens = 0
        self._live.add(1)
        try:
            async with aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    tokens += len(chunk.token_ids)
                    yield chunk
        finally:
            self._made.add(tokens)
            self._live.add(-1)

    async def close(self) -> None:
        pass


def behind_the_llm_api(engine: Engine, parameters: EchoParameters) -> Engine:
    sys.path.insert(0, str(Path(helpers.__file__).parent / "llm_api"))
    api: Any = importlib.import_module("tensorrt_llm")
    api.use(parameters.llm_api)
    api.ENGINE = engine
    told = EngineParameters(model_dir=Path(), engine="llm_api")
    return open_llm("echo", told, lambda: parameters.vocab_size)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        parameters = Parameters(args).read(EchoParameters)
        script = Script(
            step_seconds=parameters.step_ms / 1000,
            vocab_size=parameters.vocab_size,
            max_sequence_tokens=parameters.max_sequence_tokens,
        )
        engine: Engine = EchoEngine(script)
        if parameters.llm_api:
            engine = behind_the_llm_api(engine, parameters)
        service = EngineService(engine, parameters.exclude_input_in_output)
        self._engine = engine
        self._traced = Gauge("echo_traced_requests")
        self._server = RequestServer(pb_utils, service.handle, senders=1)

    def execute(self, requests: list[Any]) -> None:
        self._traced.add(sum('"traceparent"' in (each.parameters() or "") for each in requests))
        self._server.accept(requests)

    def finalize(self) -> None:
        self._server.close(self._engine.close)
