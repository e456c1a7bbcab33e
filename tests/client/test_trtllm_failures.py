"""TrtllmService that fails, falls ill, is old or is another server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from doubles.scripted import Fault
from doubles.trtllm_service import Behaviour
from tests.helpers.fake_engine_server import Triton
from tests.helpers.scripted_pairs import ids, read
from tests.helpers.scripted_services import (
    ANSWER,
    ASK,
    EOS,
    RULE,
    answered,
    playing,
    reaching,
)
from tests.helpers.virtual_time import skipping_waits
from tests.helpers.waiting import eventually
from trtllm_bls.engines.base import RunningCalls
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.engines.trtllm_service.service_engine import ServiceChunks, TrtllmServiceEngine
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
)
from trtllm_bls.types import (
    EngineChunk,
    FinishReason,
)
from trtllm_bls.wire.grpc_client import StreamEnd

# --- errors ---------------------------------------------------------------------------------


async def test_an_error_before_the_first_token_and_one_after() -> None:
    async with reaching(RULE) as (engine, service):
        for after in (0, 3):
            service.engine.fault = Fault(error=EngineError("it broke\nhere"), after_tokens=after)
            chunks: list[EngineChunk] = []
            with pytest.raises(EngineError, match=r"^it broke$"):
                async for chunk in engine.generate(ASK):
                    chunks.append(chunk)
            assert tuple(ids(chunks)) == ANSWER[:after]
        service.engine.fault = None
        assert tuple(ids(await read(engine, ASK))) == ANSWER


def test_a_prompt_that_is_too_long_is_the_callers_mistake() -> None:
    """The service tells it as an internal error, by its text."""
    request = replace(ASK, input_ids=tuple(range(40)))
    with pytest.raises(InvalidRequest, match=r"^input_ids: .*maximum context length is 32 tokens"):
        answered(request, max_seq_len=32, settings={"max_sequence_tokens": 100})
    with pytest.raises(InvalidRequest, match=r"^input_ids: 40 tokens; at most 31"):
        answered(request, max_seq_len=32)


def test_a_stream_without_its_end_is_an_error() -> None:
    """Unless the tokens themselves show that it had ended."""
    with pytest.raises(EngineError, match="without a last message"):
        answered(replace(ASK, streaming=False), breaks_off=True)
    chunks, _ = answered(replace(ASK, max_tokens=3), breaks_off=True)
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def generated(**answer: Any) -> bytes:
    message = messages.GenerateResponse(**{"request_id": "r", **answer})
    return bytes(message.SerializeToString())


TOKEN = generated(chunk={"token_ids": [7]})


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"\xff", "its message cannot be read"),
        (generated(request_id="another", chunk={"token_ids": [7]}), "another request's id"),
        (generated(chunk={"token_ids": [7], "sequence_index": 3}), "for sequence 3: none such"),
        (generated(complete={"finish_reason": "error"}), "the engine failed while it answered"),
    ],
)
async def test_an_answer_that_is_none_ends_the_request_and_its_work(
    raw: bytes, problem: str
) -> None:
    """After the tokens before it; what comes later is nobody's."""
    engine, call = Mock(), Mock(done=False)
    engine.calls = RunningCalls("trtllm://gpu", 0, AsyncMock(), engine.doubt)
    engine.channel.open.return_value = call
    chunks = ServiceChunks(engine, ASK, "r", b"", ends_known=True)
    chunks.on_messages([generated(), TOKEN, raw, TOKEN])
    chunks.on_messages([TOKEN])
    assert [chunk.token_ids for chunk in chunks.take()] == [(7,)]
    with pytest.raises(EngineError, match=problem):
        await chunks.wait()
    engine.release.assert_called_once_with("r", True, call, StreamEnd.FAILED)
    engine.doubt.assert_called_once_with()
    assert not engine.calls.running


@skipping_waits
async def test_a_server_that_is_well_is_asked_once_in_each_stall() -> None:
    """However long it is silent."""
    probe = AsyncMock(return_value=None)
    calls = RunningCalls("trtllm://gpu", 4.0, probe, Mock())
    calls.add(Mock())
    await asyncio.sleep(61)
    assert 10 <= probe.await_count <= 13
    calls.close()


async def test_a_server_that_is_down_is_unavailable_and_comes_back() -> None:
    async with playing(RULE) as (_, url):
        port = int(url.rpartition(":")[2])
        engine = TrtllmServiceEngine(url, eos_id=EOS)
        await engine.capacity()
        assert tuple(ids(await read(engine, ASK))) == ANSWER
    with pytest.raises(EngineUnavailable):
        await read(engine, ASK)
    with pytest.raises(EngineUnavailable):
        await engine.capacity()
    async with playing(RULE, port=port):
        await engine.capacity()
        assert tuple(ids(await read(engine, ASK))) == ANSWER
        await engine.close()


def test_a_server_that_is_not_healthy_is_not_ready() -> None:
    """By its own account; what it says of it is told."""
    with pytest.raises(EngineUnavailable, match="not healthy: RuntimeError: out of memory"):
        answered(health="RuntimeError: out of memory\nTraceback")


async def test_another_grpc_server_is_named_as_such() -> None:
    async with Triton() as triton:
        engine = TrtllmServiceEngine(triton.url)
        with pytest.raises(EngineUnavailable, match="another gRPC service answers there"):
            await engine.capacity()
        await engine.close()


@pytest.mark.parametrize("health", ["RuntimeError: dead", "OK"])
async def test_silence_is_asked_about(health: str) -> None:
    """A server that is not healthy any more has its requests ended; one that is may be slow."""
    settings = {"stall_seconds": 0.05}
    async with reaching(RULE, settings=settings) as (engine, service):
        service.engine.fault = Fault(error=None, after_tokens=2)
        stream: Awaitable[Any] = read(engine, ASK)
        task = asyncio.ensure_future(stream)
        await eventually(lambda: service.live == 1)
        service.behaviour = Behaviour(eos_id=EOS, health=health)
        if health == "OK":
            await eventually(lambda: service.health_checks > 3)
            assert not task.done()
            task.cancel()
            await asyncio.wait({task})
        else:
            with pytest.raises(EngineStalled, match="dead"):
                await task
        await eventually(lambda: service.live == 0)


@pytest.mark.parametrize(
    ("ill", "problem"),
    [
        ({"health": "NOT_OK"}, "it is not healthy: NOT_OK"),
        ({"unreadable": "HealthCheck"}, "its HealthCheckResponse cannot be read"),
    ],
)
async def test_a_service_that_falls_ill_is_refused_without_a_request_to_it(
    ill: dict[str, str], problem: str
) -> None:
    """It is asked for its health all the time; what runs there goes on."""

    async def refused(engine: Any) -> bool:
        try:
            await engine.capacity()
        except EngineUnavailable as error:
            return problem in str(error)
        return False

    async with reaching(RULE) as (engine, service):
        service.engine.fault = Fault(error=None, after_tokens=2)
        running = engine.generate(ASK)
        await running.wait()
        well = service.behaviour
        service.behaviour = replace(well, **ill)
        await eventually(lambda: refused(engine))
        assert service.live == 1
        service.behaviour = well
        assert not await refused(engine)
        await running.aclose()


@pytest.mark.parametrize("method", ["HealthCheck", "GetModelInfo", "GetServerInfo"])
async def test_an_answer_about_itself_that_is_no_message_is_its_failure(method: str) -> None:
    """And it is asked again: the next request finds it well."""
    async with playing(RULE) as (service, url):
        engine = TrtllmServiceEngine(url, eos_id=EOS)
        service.behaviour = replace(service.behaviour, unreadable=method)
        with pytest.raises(EngineUnavailable, match=rf"{url}: its {method}Response cannot be read"):
            await engine.capacity()
        service.behaviour = replace(service.behaviour, unreadable="")
        assert await engine.capacity()
        assert tuple(ids(await read(engine, ASK))) == ANSWER
        await engine.close()


# --- what the server tells of itself ----------------------------------------------------------


@pytest.mark.parametrize(
    ("max_seq_len", "settings", "longest"),
    [
        (0, {}, None),  # 1024 twice, which nothing enforces
        (4096, {}, 4096),
        (4096, {"max_sequence_tokens": 2000}, 2000),
        (0, {"max_sequence_tokens": 2000}, 2000),
    ],
)
async def test_limits_come_from_the_settings_or_the_server(
    max_seq_len: int, settings: dict[str, Any], longest: int | None
) -> None:
    async with reaching(RULE, settings=settings, max_seq_len=max_seq_len) as (engine, _):
        limits = await engine.capacity()
        assert limits.max_sequence_tokens == longest
        assert limits.max_draft_tokens == 0


@pytest.mark.parametrize(
    ("version", "warned"),
    [("1.3.0rc29", False), ("1.3.0", False), ("1.3.0rc4", True), ("1.2.0", True), ("", True)],
)
def test_an_old_server_is_warned_about(
    version: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answered(version=version)
    assert ("may ignore penalties" in caplog.text) is warned
