"""What is counted, not timed: responses made ahead, the order of turns, wake-ups, feeds."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.helpers.fake_python_backend import SECONDS, FakeTriton
from tests.helpers.request_servers import ONE, Gate, number, opened
from tests.helpers.scripted_text import asking
from tests.helpers.virtual_time import settle
from tests.helpers.waiting import eventually
from trtllm_bls.answer import Answer, TextRules
from trtllm_bls.python_backend import (
    MAX_QUEUED,
    Call,
    RequestServer,
    SenderThreads,
    request_server,
)
from trtllm_bls.python_backend.request_server import READ_AT_ONCE, STARTED_AT_ONCE, ThreadedLoop
from trtllm_bls.python_backend.sender_threads import MANY_NEW, NEW_SECONDS
from trtllm_bls.types import EngineChunk, TokenIds

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
        asks = [triton.ask(ONE, "number") for _ in range(MAX_QUEUED + 1)]
        asks[0].on_send = gate
        for ask in asks:
            Call(triton, ask, senders, decoupled=True).send(number(0), final=True)
        await asyncio.to_thread(gate.begun.wait, SECONDS)
        assert not senders.has_room()

        async def turn(number: int) -> None:
            await senders.room()
            order.append(number)

        tasks = [asyncio.create_task(turn(number)) for number in range(MANY)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        gate.open.set()
        await asyncio.wait(tasks, timeout=SECONDS)
        await asyncio.to_thread(senders.close)
        return order

    assert asyncio.run(wait_and_leave()) == [number for number in range(MANY) if number % 3]


class Turn:
    """Something to send, which notes that it is sent."""

    def __init__(self, sent: list[str], name: str, gate: Gate | None = None) -> None:
        self.sent, self.name, self.gate = sent, name, gate

    def send_queued(self) -> list[asyncio.Future[None]]:
        if self.gate is not None:
            self.gate(None)
        self.sent.append(self.name)
        return []


class Clock:
    """All that ``SenderThreads`` needs of a loop where nobody waits for a turn."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_first_responses_are_sent_before_others() -> None:
    """Also where they were made later."""
    loop: Any = Clock()
    sent: list[str] = []
    gate, senders = Gate(), SenderThreads(loop, 1)
    senders.work_on(Turn(sent, "under way", gate))
    assert gate.begun.wait(SECONDS)
    for name in ("later 1", "later 2"):
        senders.work_on(Turn(sent, name))
    senders.work_on(Turn(sent, "first"), urgent=True)
    gate.open.set()
    senders.close()
    assert sent == ["under way", "first", "later 1", "later 2"]


def test_in_a_rush_only_first_responses_are_made_ahead() -> None:
    """It lasts until most of those who came have a response, or have waited for long."""
    clock: Any = Clock()
    senders = SenderThreads(clock, 0)
    switch_seconds = sys.getswitchinterval()
    new = [Turn([], "new") for _ in range(2 * MANY_NEW)]
    for turn in new:
        senders.expect(turn)
    assert sys.getswitchinterval() < switch_seconds
    assert senders.has_room()  # nothing else is to be sent
    senders.work_on(Turn([], "later"))
    assert not senders.has_room()
    for turn in new[:MANY_NEW]:
        senders.work_on(turn, urgent=True)
    assert sys.getswitchinterval() == switch_seconds
    for turn in new[:MANY_NEW]:
        senders.expect(turn)
    assert not senders.has_room()
    clock.now += 2 * NEW_SECONDS  # whoever they wait for, it is not a sender
    senders.has_room()
    assert sys.getswitchinterval() == switch_seconds
    senders.close()


def test_requests_that_come_just_before_the_end_are_told() -> None:
    """Though they are started a few at a time, and most have not been."""

    async def handle(call: Call) -> None:
        await asyncio.Event().wait()

    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(5 * STARTED_AT_ONCE)]
    with opened(triton, handle) as server:
        server.accept(asks)
    for ask in asks:
        error = ask.wait().error
        assert error is not None and error.code() == "UNAVAILABLE"


def test_calls_from_other_threads_are_never_lost() -> None:
    """Whether the loop sleeps, is busy, or is about to sleep; each thread waits for its last."""
    loop = ThreadedLoop()
    running = threading.Thread(target=loop.run_forever)
    running.start()

    def ask() -> None:
        for turn in range(2000):
            answered = threading.Event()
            if turn % 3:
                loop.call_soon_threadsafe(bool)
            loop.call_soon_threadsafe(answered.set)
            assert answered.wait(SECONDS)
        done.release()

    done = threading.Semaphore(0)
    for _ in range(3):
        threading.Thread(target=ask, daemon=True).start()
    assert all(done.acquire(timeout=SECONDS) for _ in range(3))
    loop.call_soon_threadsafe(loop.stop)
    running.join()
    loop.close()


async def test_a_call_is_ready_for_what_would_leave_soon() -> None:
    """Nothing of its own is under way and there is room, which a first response does not need."""
    gate, triton = Gate(), FakeTriton()
    senders = SenderThreads(asyncio.get_running_loop(), 1)

    def made(count: int) -> list[Call]:
        asks = [triton.ask(ONE, "number") for _ in range(count)]
        asks[0].on_send = gate
        return [Call(triton, ask, senders, decoupled=True) for ask in asks]

    sending, begun, fresh, *others = made(MAX_QUEUED + 3)
    begun.send(number(0))
    await eventually(begun.is_ready)
    sending.send(number(0))
    await asyncio.to_thread(gate.begun.wait, SECONDS)
    assert begun.is_ready() and not sending.is_ready()
    with pytest.raises(StopIteration):  # it does not suspend
        begun.ready().send(None)
    for each in others:
        each.send(number(0), final=True)
    assert [each.is_ready() for each in (sending, begun, fresh)] == [False, False, True]
    waiting = asyncio.create_task(begun.ready())
    await settle()
    assert not waiting.done()
    gate.open.set()
    await asyncio.gather(waiting, sending.ready())
    assert sending.is_ready() and begun.is_ready()
    await asyncio.to_thread(senders.close)


@contextmanager
def stuck_loop(triton: FakeTriton) -> Iterator[tuple[RequestServer, threading.Event]]:
    """A server whose loop stands still until the event is set; then it ends all its calls."""
    stuck, go_on = threading.Event(), threading.Event()

    async def handle(call: Call) -> None:
        if call.client_id == "stuck":
            stuck.set()
            go_on.wait(SECONDS)
        call.finish()

    with opened(triton, handle) as server:
        server.accept([triton.ask(ONE, "number", id="stuck")])
        assert stuck.wait(SECONDS)
        yield server, go_on


def test_requests_that_arrive_while_the_loop_is_busy_wake_it_once() -> None:
    """Each wake-up is a write to a socket, which hands over the interpreter's lock."""
    wakes = []
    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(50)]
    with stuck_loop(triton) as (server, go_on):
        wake = server._loop.call_soon_threadsafe
        main = threading.get_ident()

        def counted(*arguments: object) -> object:
            if threading.get_ident() == main:
                wakes.append(arguments)
            return wake(*arguments)  # type: ignore[arg-type]

        server._loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
        for ask in asks:
            server.accept([ask])
        assert len(wakes) == 1
        go_on.set()
        for ask in asks:
            ask.wait()


def test_several_that_come_together_are_started_before_more_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read more of them first would keep the interpreter's lock from the loop."""
    monkeypatch.setattr(request_server, "START_SECONDS", SECONDS)
    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(3 * STARTED_AT_ONCE)]
    with stuck_loop(triton) as (server, go_on):
        threading.Timer(0, go_on.set).start()
        server.accept(asks)
        assert not server._arrived
        for ask in asks:
            ask.wait()


def test_of_very_many_that_come_together_the_first_are_started_before_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody's first token waits until the prompts of all have been tokenised."""
    monkeypatch.setattr(request_server, "START_SECONDS", SECONDS)
    happened: list[str] = []
    told_before: list[bool] = []  # that all have begun

    async def handle(call: Call) -> None:
        happened.append("started")
        told_before.append(server._all_started.is_set())
        call.finish()

    def together(calls: Sequence[Call]) -> None:
        happened.extend(["read"] * len(calls))

    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(2 * READ_AT_ONCE + 2)]
    server = RequestServer(triton, handle, together=together)
    server.accept(asks)
    server.close()
    sizes = [len(list(several)) for _, several in itertools.groupby(happened)]
    assert happened[0] == "read"
    assert sizes == [READ_AT_ONCE] * 4 + [2] * 2
    assert not any(told_before)


def test_a_loop_that_is_stuck_keeps_no_request_from_being_taken() -> None:
    """Triton's thread goes on after a while: what comes then is answered, too."""
    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(2 + 3 * READ_AT_ONCE)]
    with stuck_loop(triton) as (server, go_on):
        server.accept(asks[:2])
        waited = mock.patch.object(server._all_started, "wait", return_value=False)
        with waited as wait:
            server.accept(asks[2:])
        assert wait.call_count == 1  # however many pieces there are
        assert len(server._arrived) == len(asks)
        go_on.set()
        for ask in asks:
            ask.wait()


class Counting:
    """A detokenizer that counts how often it is fed."""

    def __init__(self) -> None:
        self.feeds = 0

    def feed(self, ids: TokenIds) -> str:
        self.feeds += 1
        return "x" * len(ids)

    def flush(self) -> str:
        return ""


def answers(streams: int) -> Iterator[tuple[Answer, Counting]]:
    for _ in range(streams):
        counting = Counting()
        request = asking(stream=True, max_tokens=1000)
        yield Answer(request, TextRules(prompt_tokens=1, max_tokens=1000), [counting]), counting


def test_chunks_that_are_taken_together_are_fed_together() -> None:
    """One feed and one response, however many tokens have come."""

    def one_by_one(count: int) -> Sequence[EngineChunk]:
        return [EngineChunk(token_ids=(n,)) for n in range(count)]

    for answer, counting in answers(3):
        (chunk,) = answer.feed(one_by_one(100))
        assert (chunk.text, counting.feeds) == ("x" * 100, 1)
        (chunk,) = answer.feed([*one_by_one(50), EngineChunk(token_ids=(1,), final=True)])
        assert (chunk.text, counting.feeds) == ("x" * 51, 3)
        assert chunk.ending is not None and chunk.ending.completion_tokens == 151
