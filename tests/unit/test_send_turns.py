"""What is counted, not timed: responses made ahead, the order of turns, feeds."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.helpers.request_servers import ONE, Gate, number, opened
from tests.helpers.virtual_time import settle
from tests.helpers.waiting import eventually, run_async
from trtllm_bls.pipeline.testing import SECONDS, FakeTriton
from trtllm_bls.triton.request_server import MAX_QUEUED, Call, SenderThreads

MANY = 3 * MAX_QUEUED


def test_first_responses_wait_for_no_others_and_later_ones_for_a_turn() -> None:
    """While no send comes to its end, no second response is made, and every first one is."""
    gate, made, second = Gate(), threading.Semaphore(0), []

    async def handle(call: Call) -> None:
        await call.ready()
        call.send(number(0))
        made.release()
        await call.ready()
        second.append(call)
        call.send(number(1), final=True)

    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(MANY)]
    with opened(triton, handle) as server:
        for ask in asks:
            ask.on_send = gate
        server.accept(asks)
        for _ in asks:
            assert made.acquire(timeout=SECONDS)
        assert second == []
        gate.open.set()
        for ask in asks:
            assert ask.wait().said("number") == [[0], [1]]


def test_turns_come_in_the_order_of_asking_and_none_is_lost() -> None:
    """Though some of those who wait for one leave, and the others do nothing with theirs."""

    async def wait_and_leave() -> list[int]:
        gate, order = Gate(), []
        triton = FakeTriton()
        senders = SenderThreads(asyncio.get_running_loop(), 1)
        begun = [
            Call(triton, triton.ask(ONE, "number"), senders, decoupled=True) for _ in range(MANY)
        ]
        for call in begun:
            call.send(number(0))
            await call.ready()
        asks = [triton.ask(ONE, "number") for _ in range(MAX_QUEUED + 1)]
        asks[0].on_send = gate
        for ask in asks:
            Call(triton, ask, senders, decoupled=True).send(number(0), final=True)
        assert await asyncio.to_thread(gate.begun.wait, SECONDS)
        assert not senders.take_reports()

        async def turn(number: int, call: Call) -> None:
            await call.ready()
            order.append(number)

        tasks = [asyncio.create_task(turn(*each)) for each in enumerate(begun)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        gate.open.set()
        _, late = await asyncio.wait(tasks, timeout=SECONDS)
        assert not late
        await senders.close()
        return order

    assert run_async(wait_and_leave()) == [number for number in range(MANY) if number % 3]


def test_first_responses_are_sent_before_others() -> None:
    """Also where they were made later."""

    async def send_and_look() -> list[str]:
        gate, triton, sent = Gate(), FakeTriton(), []
        senders = SenderThreads(asyncio.get_running_loop(), 1)

        def call(name: str) -> Call:
            ask = triton.ask(ONE, "number")
            ask.on_send = lambda _: sent.append(name)
            return Call(triton, ask, senders, decoupled=True)

        begun = [call("later 1"), call("later 2")]
        for each in begun:
            each.send(number(0))
            await each.ready()
        sent.clear()
        blocking = triton.ask(ONE, "number")
        blocking.on_send = gate
        Call(triton, blocking, senders, decoupled=True).finish()
        assert await asyncio.to_thread(gate.begun.wait, SECONDS)
        for each in (*begun, call("first")):
            each.finish()
        gate.open.set()
        await senders.close()
        return sent

    assert run_async(send_and_look()) == ["first", "later 1", "later 2"]


def test_requests_that_come_just_before_the_end_are_told() -> None:
    """Though their tasks have not begun."""

    async def handle(call: Call) -> None:
        await asyncio.Event().wait()

    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(MANY)]
    with opened(triton, handle) as server:
        server.accept(asks)
    for ask in asks:
        error = ask.wait().error
        assert error is not None and error.code() == "UNAVAILABLE"


async def test_a_call_is_ready_for_what_would_leave_soon() -> None:
    """Nothing of its own is under way and there is room, which a first response does not need."""
    gate, triton = Gate(), FakeTriton()
    senders = SenderThreads(asyncio.get_running_loop(), 1)

    def made(count: int) -> list[Call]:
        asks = [triton.ask(ONE, "number") for _ in range(count)]
        asks[0].on_send = gate
        return [Call(triton, ask, senders, decoupled=True) for ask in asks]

    sending, begun, fresh, *others = made(MAX_QUEUED + 3)

    def is_ready(call: Call) -> bool:
        """Whether ``ready`` would not suspend."""
        asking = call.ready()
        try:
            asking.send(None)
        except StopIteration:
            return True
        asking.close()
        return False

    begun.send(number(0))
    await eventually(lambda: is_ready(begun))
    sending.send(number(0))
    assert await asyncio.to_thread(gate.begun.wait, SECONDS)
    assert is_ready(begun) and not is_ready(sending)
    with pytest.raises(StopIteration):  # it does not suspend
        begun.ready().send(None)
    for each in others:
        each.send(number(0), final=True)
    assert [is_ready(each) for each in (sending, begun, fresh)] == [False, False, True]
    waiting = asyncio.create_task(begun.ready())
    await settle()
    assert not waiting.done()
    gate.open.set()
    await asyncio.gather(waiting, sending.ready())
    assert is_ready(sending) and is_ready(begun)
    await senders.close()
