"""gRPC calls kept from one request to the next."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.helpers.fake_engine_server import (
    ASK,
    HANG_UP,
    LINGER,
    Fail,
    Say,
    Triton,
    reaching,
    read,
)
from tests.helpers.waiting import eventually
from trtllm_bls.errors import EngineError
from trtllm_bls.types import EngineRequest


@pytest.fixture(autouse=True)
def long_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call ends between two requests, however long a test is in coming to the second one."""
    monkeypatch.setattr("trtllm_bls.engines.triton_model.IDLE_SECONDS", 600)


def named(request_id: str) -> EngineRequest:
    return replace(ASK, request_id=request_id)


def called(triton: Triton) -> list[list[str]]:
    """The requests of each call, without the numbers that begin their ids."""
    return [[id.partition("/")[2] for id in call] for call in triton.calls]


async def test_a_request_goes_over_the_call_that_the_one_before_it_left() -> None:
    """Opening a call costs more than a short request; one that fails or leaves takes its call."""
    async with reaching(Say((3,)), Say((4,), final=True)) as (engine, triton):
        for name in "abc":
            await read(engine, named(name))
        assert called(triton) == [["a", "b", "c"]]
        async with aclosing(engine.generate(named("leaves"))) as chunks:
            await chunks.wait()
        await read(engine, named("d"))
        assert called(triton) == [["a", "b", "c", "leaves"], ["d"]]
        triton.steps = (Fail("out of blocks"),)
        with pytest.raises(EngineError):
            await read(engine, named("fails"))
        with pytest.raises(EngineError):
            await read(engine, named("fails too"))
        assert called(triton)[1:] == [["d", "fails"], ["fails too"]]


async def test_a_call_that_told_of_an_error_is_ended_politely() -> None:
    """The error may be the last of it or not; a cancel then would leak the request."""
    told = Say((3,)), Fail("out of blocks"), LINGER, Say(final=True, empty=True)
    async with reaching(*told) as (engine, triton):
        with pytest.raises(EngineError, match="out of blocks"):
            await read(engine)
        await eventually(lambda: triton.closed or triton.cancelled.is_set())
        assert triton.closed == 1


async def test_no_two_requests_share_a_call_at_a_time() -> None:
    """A cancel ends a whole call."""
    all_asked = asyncio.Event()
    async with reaching(Say((3,)), all_asked, Say((4,), final=True)) as (engine, triton):
        await engine.capacity()
        for names, calls in (("abcd", [1, 1, 1, 1]), ("efgh", [2, 2, 2, 2])):
            all_asked.clear()
            reading = [asyncio.create_task(read(engine, named(name))) for name in names]
            await eventually(lambda calls=calls: len(triton.asked) == sum(calls))
            all_asked.set()
            await asyncio.gather(*reading)
            assert [len(requests) for requests in triton.calls] == calls


async def test_a_kept_call_that_ended_before_it_took_the_request_costs_nothing() -> None:
    """A server restarts, a proxy ends what is idle: the request goes over a new call."""
    async with reaching(Say((3,), final=True)) as (engine, triton):
        await read(engine, named("a"))
        (kept,) = engine.pool._idle
        send = kept.send
        kept.send = lambda message: asyncio.get_running_loop().call_soon(kept.on_end, None)
        assert [chunk.token_ids for chunk in await read(engine, named("b"))] == [(3,)]
        assert called(triton) == [["a"], ["b"]] and send is not kept.send


async def test_a_new_call_that_ends_is_not_tried_again() -> None:
    """It was not the waiting that ended it."""
    async with reaching(HANG_UP) as (engine, triton):
        with pytest.raises(EngineError, match="without a last response"):
            await read(engine, named("a"))
        assert called(triton) == [["a"]]


async def test_a_request_that_is_over_no_longer_cancels() -> None:
    """Its reader may close it late, while the call has another one."""
    go_on = asyncio.Event()
    async with reaching(Say((3,), final=True)) as (engine, triton):
        await engine.capacity()
        early = engine.generate(named("early"))
        await early.wait()
        triton.steps = (Say((3,)), go_on, Say((4,), final=True))
        other = asyncio.create_task(read(engine, named("other")))
        await eventually(lambda: len(triton.asked) == 2)
        await early.aclose()
        go_on.set()
        assert [chunk.token_ids for chunk in await other] == [(3,), (4,)]
        assert called(triton) == [["early", "other"]]


async def test_a_reply_to_another_request_is_an_error() -> None:
    """A kept call has one request after the other; their answers must never be mixed up."""
    stale = replace(Say((3,), final=True), id="another")
    async with reaching(stale) as (engine, _):
        with pytest.raises(EngineError, match="another request's id"):
            await read(engine)


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_REPLIES", 2), ("MAX_IDLE", 0), ("IDLE_SECONDS", 0.01)]
)
async def test_a_call_is_ended_politely(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    """After many replies, beside enough others, or idle for long; a cancel would leak requests."""
    monkeypatch.setattr(f"trtllm_bls.engines.triton_model.{limit}", value)
    async with reaching(Say((3,)), Say((4,), final=True)) as (engine, triton):
        await read(engine, named("a"))
        await eventually(lambda: triton.closed)
        await read(engine, named("b"))
        assert called(triton) == [["a"], ["b"]]
        assert not triton.cancelled.is_set()
