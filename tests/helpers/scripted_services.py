"""TrtllmServices that are played, and the engine that reaches them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import Rule, reciting
from doubles.trtllm_service import Behaviour, ScriptedService
from tests.helpers.fake_engine_server import run
from tests.helpers.scripted_pairs import read
from tests.helpers.waiting import join
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.types import EngineChunk, EngineRequest

EOS = 2


@asynccontextmanager
async def reaching(
    rule: Rule, script: Script | None = None, settings: Any = None, **behaviour: Any
) -> AsyncIterator[tuple[TrtllmServiceEngine, ScriptedService]]:
    """A service over ``rule``, in this loop, and the engine that has been asked for its limits."""
    async with playing(rule, script, **behaviour) as (service, url):
        engine = TrtllmServiceEngine(url, **{"eos_id": EOS} | (settings or {}))
        try:
            await engine.capacity()
            yield engine, service
        finally:
            await engine.close()


@asynccontextmanager
async def playing(
    rule: Rule, script: Script | None = None, port: int = 0, **behaviour: Any
) -> AsyncIterator[tuple[ScriptedService, str]]:
    """A service over ``rule``, in this loop, and its address."""
    service = ScriptedService(
        ScriptedEngine(rule, script), Behaviour(**{"eos_id": EOS} | behaviour)
    )
    port = await service.start(port)
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await service.stop()


@contextmanager
def service_in_a_thread(engine: Engine, behaviour: Behaviour) -> Iterator[tuple[Any, str]]:
    """A service with an event loop of its own, for a server in another process to reach."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    service = ScriptedService(engine, behaviour)
    try:
        yield service, f"127.0.0.1:{run(service.start())}"
    finally:
        run(service.stop())
        run(engine.close())
        loop.call_soon_threadsafe(loop.stop)
        join(thread)
        loop.close()


ANSWER = (11, 12, 13, 14, 15)
RULE = reciting(ANSWER, 2, then=EOS)
ASK = EngineRequest(request_id="r", input_ids=(5, 6), max_tokens=9, end_id=EOS)
LONG = reciting(range(10, 900), 2, then=EOS)


def answered(
    request: EngineRequest = ASK, rule: Any = RULE, **behaviour: Any
) -> tuple[list[EngineChunk], Any]:
    """The chunks, and the service that sent them."""

    async def scenario() -> Any:
        async with reaching(rule, **behaviour) as (engine, service):
            return await read(engine, request), service

    return run(scenario())  # type: ignore[no-any-return]
