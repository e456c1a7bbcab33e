"""gRPC calls kept from one request to the next."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from tests.helpers.fake_engine_server import ASK, LINGER, Fail, Say, reaching, read, run
from trtllm_bls.engines.stream_pool import Carried, Streams
from trtllm_bls.errors import EngineError
from trtllm_bls.messages import EngineRequest


def named(request_id: str) -> EngineRequest:
    return replace(ASK, request_id=request_id)


def test_a_request_goes_over_the_call_that_the_one_before_it_left() -> None:
    """Opening a call costs more than a short request; one that fails or leaves takes its call."""

    async def dialogue() -> None:
        async with reaching(Say((3,)), Say((4,), final=True)) as (engine, triton):
            for name in "abc":
                await read(engine, named(name))
            assert triton.calls == [["a", "b", "c"]]
            async with aclosing(engine.generate(named("leaves"))) as chunks:
                await anext(chunks)
            await read(engine, named("d"))
            assert triton.calls == [["a", "b", "c", "leaves"], ["d"]]
            triton.steps = (Fail("out of blocks"),)
            with pytest.raises(EngineError):
                await read(engine, named("fails"))
            with pytest.raises(EngineError):
                await read(engine, named("fails too"))
            assert triton.calls[1:] == [["d", "fails"], ["fails too"]]

    run(dialogue())


def test_a_call_that_told_of_an_error_is_ended_politely() -> None:
    """The error may be the last of it or not; a cancel then would leak the request."""

    async def dialogue() -> None:
        told = Say((3,)), Fail("out of blocks"), LINGER, Say(final=True, empty=True)
        async with reaching(*told) as (engine, triton):
            with pytest.raises(EngineError, match="out of blocks"):
                await read(engine)
            while not triton.closed and not triton.cancelled.is_set():
                await asyncio.sleep(0)
            assert triton.closed == 1

    run(dialogue())


def test_no_two_requests_share_a_call_at_a_time() -> None:
    """A cancel ends a whole call."""

    async def dialogue() -> None:
        all_asked = asyncio.Event()
        async with reaching(Say((3,)), all_asked, Say((4,), final=True)) as (engine, triton):
            await engine.dialect()
            for names, calls in (("abcd", [1, 1, 1, 1]), ("efgh", [2, 2, 2, 2])):
                all_asked.clear()
                reading = [asyncio.create_task(read(engine, named(name))) for name in names]
                while len(triton.asked) < sum(calls):
                    await asyncio.sleep(0)
                all_asked.set()
                await asyncio.gather(*reading)
                assert [len(carried) for carried in triton.calls] == calls

    run(dialogue())


class Call:
    """A call as ``grpc.aio`` makes it: its end is only known once somebody has listened."""

    def __init__(self) -> None:
        self.heard_end = self.ended = self.cancelled = False
        self.written: list[str] = []

    def done(self) -> bool:
        return self.heard_end

    async def write(self, message: str) -> None:
        if self.ended:
            status = grpc.StatusCode.INTERNAL
            raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), "ended")
        self.written.append(message)

    async def read(self) -> str:
        return f"reply to {self.written[-1]}"

    async def done_writing(self) -> None:
        self.ended = True

    def cancel(self) -> None:
        self.cancelled = True


def test_a_kept_call_that_has_ended_costs_no_request() -> None:
    """Whether the end was heard of or not: a server restarts, a proxy ends what is idle."""

    async def dialogue() -> None:
        calls: list[Call] = []

        def open_call() -> Call:
            calls.append(Call())
            return calls[-1]

        streams = Streams(open_call)
        for unheard in (False, True):
            carried = Carried(streams)
            assert await carried.ask("one") == "reply to one"
            carried.finish()
            calls[-1].ended, calls[-1].heard_end = True, not unheard
            again = Carried(streams)
            assert await again.ask("two") == "reply to two"
            again.finish()
        assert [call.written for call in calls] == [["one"], ["two", "one"], ["two"]]

    run(dialogue())


def test_a_new_call_that_fails_is_not_tried_again() -> None:
    """It was not the waiting that ended it."""

    def open_call() -> Call:
        call = Call()
        call.ended = True
        return call

    async def dialogue() -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="ended"):
            await Carried(Streams(open_call)).ask("one")

    run(dialogue())


def test_a_request_that_is_over_no_longer_cancels() -> None:
    """Its stall timer may outlive it, while the call carries another one."""

    async def dialogue() -> None:
        streams = Streams(Call)
        carried = Carried(streams)
        await carried.ask("one")
        carried.finish()
        other = streams.take().call
        carried.cancel()
        assert other.written == ["one"] and not other.cancelled

    run(dialogue())


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_REPLIES", 2), ("MAX_IDLE", 0), ("IDLE_SECONDS", 0.01)]
)
def test_a_call_is_ended_politely(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    """After many replies, beside enough others, or idle for long; a cancel would leak requests."""
    monkeypatch.setattr(f"trtllm_bls.engines.stream_pool.{limit}", value)

    async def dialogue() -> None:
        async with reaching(Say((3,)), Say((4,), final=True)) as (engine, triton):
            await read(engine, named("a"))
            while not triton.closed:
                await asyncio.sleep(0.001)
            await read(engine, named("b"))
            assert triton.calls == [["a"], ["b"]]
            assert not triton.cancelled.is_set()

    run(dialogue())
