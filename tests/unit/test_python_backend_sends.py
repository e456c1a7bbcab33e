"""Sends that are slow or fail, callers who leave: each request still has exactly one end."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tests.helpers.request_servers import (
    ONE,
    Gate,
    ManualSenders,
    call_of,
    failing,
    number,
    opened,
)
from tests.helpers.waiting import join, until
from trtllm_bls.errors import EngineError, Overloaded
from trtllm_bls.pipeline.testing import SECONDS, FakeTriton, TritonModelError
from trtllm_bls.triton.request_server import SENDERS, WATCHED_AT_ONCE, Call


def test_a_slow_send_holds_up_neither_other_calls_nor_the_loop() -> None:
    """Sending blocks its thread, which is not the event loop's."""
    gate = Gate()

    async def handle(call: Call) -> None:
        for value in range(3):
            call.send(number(value), final=value == 2)
            await call.ready()

    triton = FakeTriton()
    slow, other = (triton.ask(ONE, "number") for _ in range(2))
    slow.on_send = gate
    with opened(triton, handle) as server:
        server.accept([slow])
        assert gate.begun.wait(SECONDS)
        server.accept([other])
        assert other.wait().said("number") == [[0], [1], [2]]
        assert slow.responses == []
        gate.open.set()
        assert slow.wait().said("number") == [[0], [1], [2]]


def test_sends_of_one_call_keep_their_order_and_never_overlap() -> None:
    """Whichever threads do it; the fake refuses two sends of one call at once."""

    async def handle(call: Call) -> None:
        for value in range(100):
            call.send(number(value), final=value == 99)
            if value % 7 == 0:
                await asyncio.sleep(0)

    triton = FakeTriton()
    asks = [triton.ask(ONE, "number") for _ in range(20)]
    with opened(triton, handle) as server:
        server.accept(asks)
        for ask in asks:
            assert ask.wait().said("number") == [[value] for value in range(100)]


def test_a_call_that_sends_nothing_is_ready_at_once() -> None:
    """Without giving way to any other task."""
    triton = FakeTriton()
    with pytest.raises(StopIteration):
        call_of(triton.ask(ONE), triton).ready().send(None)


def test_a_call_is_ready_once_everything_has_been_sent() -> None:
    """All who wait for it get it; one that has left meanwhile harms nobody."""
    gate, seen = Gate(), []
    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = gate

    async def handle(call: Call) -> None:
        call.send(number(1))
        call.send(number(2))
        waiting = [asyncio.create_task(call.ready()) for _ in range(3)]
        assert await asyncio.to_thread(gate.begun.wait, SECONDS)
        waiting[0].cancel()
        await asyncio.wait({waiting[0]})
        seen.append([len(ask.responses), *(task.done() for task in waiting)])
        gate.open.set()
        await asyncio.gather(*waiting[1:])
        seen.append(len(ask.responses))

    with opened(triton, handle) as server:
        server.accept([ask])
        ask.wait()
    assert seen == [[0, True, False, False], 2]


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("failures", range(1, 7))
def test_a_send_that_fails_ends_its_call_once(failures: int, final: bool) -> None:
    """With an error, or the bare end where that fails too, again until one of them is taken."""
    over: list[str] = []

    async def handle(call: Call) -> None:
        call.send(number(1), final=final)
        if call.client_id == "broken" and not final:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                over.append("cancelled")
                await asyncio.to_thread(broken.wait)  # cleaning up takes longer than every retry
                over.append("clean")
                raise
        call.finish()

    triton = FakeTriton()
    broken, other = (triton.ask(ONE, "number", id=id) for id in ("broken", "other"))
    broken.on_send = failing(failures)
    with opened(triton, handle) as server:
        server.accept([broken, other])
        assert broken.wait().responses == []
        assert other.wait().said("number") == [[1]] and other.error is None
    assert over == ([] if final else ["cancelled", "clean"])
    if broken.error is None:
        assert failures % 3 == 2  # the error failed, the bare end was taken
    else:
        assert broken.error.code() == "UNAVAILABLE"


def test_an_error_that_cannot_even_be_made_still_ends_its_call() -> None:
    """The bare end needs nothing; the thread that sends lives on."""
    triton = FakeTriton()
    make = triton.InferenceResponse

    def only_answers(tensors: Any, error: Any = None) -> Any:
        if error is not None:
            raise TritonModelError("no memory")
        return make(tensors)

    triton.InferenceResponse = only_answers  # type: ignore[assignment,misc]

    async def handle(call: Call) -> None:
        raise EngineError("broken")

    asks = [triton.ask(ONE, "number") for _ in range(8)]
    with opened(triton, handle) as server:
        server.accept(asks)
        for ask in asks:
            ask.wait()


def test_a_model_that_is_not_decoupled_owes_one_response() -> None:
    """An empty one, where its handler has nothing to say."""

    async def handle(call: Call) -> None:
        pass

    triton, sends = FakeTriton(), []
    ask = triton.ask(ONE, "number")
    ask.on_send = sends.append
    with opened(triton, handle, decoupled=False) as server:
        server.accept([ask])
        assert ask.wait().responses == [{}]
    assert [response is not None for response in sends] == [True]


def test_a_model_that_is_not_decoupled_never_ends_without_a_response() -> None:
    """Triton raises where it is told so; an empty response is the least that ends a call."""

    async def handle(call: Call) -> None:
        call.send(number(1), final=True)

    triton, sends, fail = FakeTriton(), [], failing(2)
    ask = triton.ask(ONE, "number")

    def on_send(response: Any) -> None:
        sends.append(response)
        fail(response)

    ask.on_send = on_send
    with opened(triton, handle, decoupled=False) as server:
        server.accept([ask])
        assert ask.wait().responses == [{}] and ask.error is None
    assert len(sends) == 3 and None not in sends


def test_a_call_that_cannot_be_ended_is_tried_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And has one line in the log, however often that is."""
    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = failing(24)
    senders = ManualSenders()
    call = call_of(ask, triton, senders)
    call.send(number(1))
    senders.send()
    for _ in range(7):
        assert not ask.responses and ask.error is None
        assert call.gone()  # so that its work is cancelled, though Triton knows of no leaving
        senders.time_is_up()
    assert senders.delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    senders.time_is_up()
    assert ask.wait().error is not None
    call.finish()
    senders.send()
    senders.time_is_up()
    assert len(senders.delays) == 8  # it has ended: not tried again
    assert [record.getMessage() for record in caplog.records] == [
        f"{call.id}: a response could not be sent: no space left in shared memory"
    ]


# --- watching callers ---------------------------------------------------------------------------


def test_asking_for_a_caller_never_waits_behind_a_send() -> None:
    """Nor is Triton asked while a response is on its way."""
    gate, triton = Gate(), FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = gate
    senders = ManualSenders()
    call = call_of(ask, triton, senders)
    call.finish()
    sending = threading.Thread(target=senders.send, daemon=True)
    sending.start()
    assert gate.begun.wait(SECONDS)
    assert not call.gone()
    assert sending.is_alive() and ask.questions == 0
    gate.open.set()
    join(sending)
    assert not call.gone() and triton.broken == []


def test_a_call_that_sends_without_a_pause_still_finds_its_caller_gone() -> None:
    """Asked for while a response is being sent, Triton is asked as soon as it has left."""
    gate, triton = Gate(), FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = gate
    senders = ManualSenders()
    call = call_of(ask, triton, senders)
    call.send(number(1))
    sending = threading.Thread(target=senders.send, daemon=True)
    sending.start()
    assert gate.begun.wait(SECONDS)
    ask.leave()
    assert not call.gone() and ask.questions == 0
    gate.open.set()
    join(sending)
    assert ask.questions == 1 and call.gone()
    call.finish()
    senders.send()
    assert triton.broken == []


def test_a_caller_who_leaves_during_a_send_is_no_shutdown() -> None:
    """Why a task was cancelled is known, and not asked for again."""
    gate, triton = Gate(), FakeTriton()
    ask = triton.ask(ONE, "number")

    async def handle(call: Call) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ask.on_send = gate
            call.send(number(1))
            assert await asyncio.to_thread(gate.begun.wait, SECONDS)

    with opened(triton, handle) as server:
        server.accept([ask])
        ask.leave()
        assert gate.begun.wait(SECONDS)
        asyncio.run_coroutine_threadsafe(_idle(), server.loop).result(SECONDS)
        gate.open.set()
        assert ask.wait().error is None


async def _idle() -> None:
    """Until all other tasks have ended."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[operator]
        await asyncio.wait(others)


def test_a_caller_who_leaves_cancels_the_work_once() -> None:
    """A second cancellation would hit the clean-up after the first."""
    triton, clean = FakeTriton(), threading.Event()
    ask = triton.ask(ONE, "number")

    async def handle(call: Call) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            begin = ask.questions
            while ask.questions < begin + 3:  # the watcher comes by again
                await asyncio.sleep(0)
            clean.set()
            raise

    with opened(triton, handle) as server:
        server.accept([ask])
        ask.leave()
        assert ask.wait().error is None
    assert clean.is_set()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_clean_up_is_left_alone(stopped: bool) -> None:
    """By a request that stops the call, and by the server's end."""
    triton, cleaning, disturbed, clean = FakeTriton(), *(threading.Event() for _ in range(3))

    async def handle(call: Call) -> None:
        if cleaning.is_set():
            call.stop_namesakes()
            disturbed.set()
            return
        call.may_be_stopped = True
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            while not disturbed.is_set():
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            clean.set()

    left, stop = (triton.ask(ONE, "number", id="mine") for _ in range(2))
    with opened(triton, handle) as server:
        server.accept([left])
        left.leave()
        assert cleaning.wait(SECONDS)
        if stopped:
            server.accept([stop])
            assert clean.wait(SECONDS)
        disturbed.set()
    assert clean.is_set()


def test_calls_that_have_ended_are_let_go() -> None:
    """On an idle server, too; each thread that sends keeps at most the call it sent last."""
    triton, calls = FakeTriton(), list[weakref.ref[Call]]()

    async def handle(call: Call) -> None:
        calls.append(weakref.ref(call))
        call.send(number(1), final=True)

    asks = [triton.ask(ONE, "number") for _ in range(3 * SENDERS)]
    with opened(triton, handle) as server:
        server.accept(asks)
        for ask in asks:
            ask.wait()
        until(lambda: sum(call() is not None for call in calls) <= SENDERS, 10)


class Ticks:
    """In place of the watcher's clock: it looks when told to."""

    def __init__(self) -> None:
        self._idle, self._go, self._over = threading.Semaphore(0), threading.Semaphore(0), False

    def wait(self, seconds: float) -> bool:
        self._idle.release()
        assert self._go.acquire(timeout=SECONDS)
        return self._over

    def set(self) -> None:
        self._over = True
        self._go.release()

    def look(self) -> None:
        """Returns when the watcher has looked."""
        self._go.release()
        self.settle()

    def settle(self) -> None:
        """Until the watcher waits."""
        assert self._idle.acquire(timeout=SECONDS)


@pytest.mark.parametrize(("calls", "looks"), [(40, 1), (60, 1), (61, 2), (150, 3)])
def test_all_calls_share_so_many_questions_a_look(calls: int, looks: int) -> None:
    """Each is asked once in as many looks as that takes."""

    async def handle(call: Call) -> None:
        call.send(number(1))
        await asyncio.Event().wait()

    triton, ticks = FakeTriton(), Ticks()
    asks = [triton.ask(ONE, "number") for _ in range(calls)]
    with opened(triton, handle) as server:
        server._closing = ticks  # type: ignore[assignment]
        ticks.settle()
        server.accept(asks)
        for ask in asks:
            ask.wait(responses=1)
        for turn in (1, 2):
            for look in range(1, looks + 1):
                before = sum(ask.questions for ask in asks)
                ticks.look()
                asked = sum(ask.questions for ask in asks) - before
                assert asked == min(WATCHED_AT_ONCE, calls - (look - 1) * WATCHED_AT_ONCE)
            assert {ask.questions for ask in asks} == {turn}


# --- everything at once ---------------------------------------------------------------------------


async def live_by_lot(call: Call) -> None:
    """Sends some responses; then fails, waits for ever or ends."""
    fate, lot = call.arrays["fate"][0], random.Random(int(call.arrays["seed"][0]))
    try:
        for value in range(lot.randrange(8)):
            call.send(number(value), final=lot.random() < 0.05)
            if lot.random() < 0.5:
                await (call.ready() if lot.random() < 0.5 else asyncio.sleep(0))
        if fate == FAILS:
            raise EngineError("by lot")
        if fate == HANGS:
            await asyncio.Event().wait()  # until its caller leaves, or the server closes
        call.send(number(-1), final=lot.random() < 0.5)
    finally:
        if lot.random() < 0.2:
            call.fail(Overloaded("by lot"))


FAILS, HANGS, ENDS = range(3)


@pytest.mark.parametrize("seed", range(6))
def test_every_call_has_one_end_whatever_happens(seed: int) -> None:
    """Handlers that fail, hang or end, sends that fail, callers who leave, in any order."""
    chance = random.Random(seed)
    triton = FakeTriton()
    fates = [chance.choice([FAILS, HANGS, ENDS]) for _ in range(120)]
    asks = [
        triton.ask({"fate": np.array([fate]), "seed": np.array([index + 1000 * seed])}, "number")
        for index, fate in enumerate(fates)
    ]
    for ask in chance.sample(asks, 40):
        ask.on_send = failing(chance.randint(1, 5))
    with opened(triton, live_by_lot) as server:
        for ask in asks:
            server.accept([ask])
            if chance.random() < 0.3:
                chance.choice(asks).leave()
        for ask, fate in zip(asks, fates, strict=True):
            if fate != HANGS and chance.random() < 0.5:
                ask.wait()
    for ask in asks:
        ask.wait()
