"""Requests of Triton: each is answered exactly once, whatever its handler or its sends do."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.helpers.fake_python_backend import SECONDS, Ask, FakeTriton, TritonModelError
from trtllm_bls.errors import EngineError, InvalidRequest, Overloaded, Unsupported
from trtllm_bls.python_backend import (
    WATCHED_AT_ONCE,
    Call,
    RequestServer,
    SenderThreads,
    TritonLogHandler,
    answer_each,
    log_to_triton,
)

Handle = Callable[[Call], Awaitable[None]]
ONE = {"number": np.array([[1]], dtype=np.int32)}


def number(value: int) -> dict[str, Any]:
    return {"number": np.array([[value]], dtype=np.int32)}


@contextmanager
def opened(triton: FakeTriton, handle: Handle) -> Iterator[RequestServer]:
    """A server that must not leave a task behind nor break a rule of Triton."""
    server = RequestServer(triton, handle)
    left: list[asyncio.Task[Any]] = []

    async def finish() -> None:
        left.extend(asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]

    try:
        yield server
    finally:
        server.close(finish)
        assert (left, triton.broken) == ([], [])


def call_of(ask: Ask, triton: FakeTriton) -> Call:
    """A call whose responses are sent by nobody, unless the test does."""
    no_loop: Any = None
    return Call(triton, ask, SenderThreads(no_loop, 0), decoupled=True)


def failing(times: int) -> Callable[[Any], None]:
    """For ``Ask.on_send``: so many sends fail."""
    left = iter(range(times))

    def on_send(response: Any) -> None:
        if next(left, None) is not None:
            raise TritonModelError("no space left in shared memory")

    return on_send


class Gate:
    """For ``Ask.on_send``: sends wait here until it is open; ``begun``: one does."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, response: Any) -> None:
        self.begun.set()
        assert self.open.wait(SECONDS)


def answered(handle: Handle, *outputs: str) -> Ask:
    """One request, answered to its end."""
    triton = FakeTriton()
    ask = triton.ask(ONE, *(outputs or ("number",)), id="mine")
    with opened(triton, handle) as server:
        server.accept([ask])
        return ask.wait()


def test_chunks_arrive_in_order_and_the_last_is_final() -> None:
    """What is sent is what arrives; nothing after the last is needed or seen."""

    async def handle(call: Call) -> None:
        for value in range(3):
            call.send(number(value), final=value == 2)
        call.send(number(99))
        call.finish()

    assert answered(handle).said("number") == [[0], [1], [2]]


def test_a_handler_that_says_nothing_still_ends_its_request() -> None:
    """Without FINAL the caller would wait for ever."""

    async def handle(call: Call) -> None:
        call.send(number(1))

    assert answered(handle).said("number") == [[1]]


def test_only_what_was_asked_for_is_sent() -> None:
    """One more output would crash Triton 24.10, so the rest is dropped."""

    async def handle(call: Call) -> None:
        call.send({**number(1), "more": np.zeros((1, 1))}, final=True)

    assert [sorted(response) for response in answered(handle).responses] == [["number"]]


@pytest.mark.parametrize("sent", [0, 2])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidRequest("top_p", "2 is too much"), "INVALID_ARG", "INVALID_ARG: top_p: 2 is "),
        (Unsupported("beam_width", "no"), "UNSUPPORTED", "UNSUPPORTED: beam_width: no"),
        (Overloaded("later\nplease"), "UNAVAILABLE", "UNAVAILABLE: later please"),
        (EngineError("broken"), "INTERNAL", "INTERNAL: broken"),
    ],
)
def test_an_error_is_the_last_word(sent: int, error: Exception, code: str, text: str) -> None:
    """Before or after the first response: one error, its status, one line, with FINAL."""

    async def handle(call: Call) -> None:
        for value in range(sent):
            call.send(number(value))
        raise error

    ask = answered(handle)
    assert len(ask.responses) == sent
    assert ask.error is not None and ask.error.code() == code
    assert ask.error.message().startswith(text) and "\n" not in ask.error.message()


def test_a_mistake_of_ours_is_told_by_kind_only(caplog: pytest.LogCaptureFixture) -> None:
    """The caller learns where to look, the log learns what happened; no path leaves."""

    async def handle(call: Call) -> None:
        raise KeyError("/secret/path")

    ask = answered(handle)
    assert ask.error is not None
    assert "unexpected KeyError" in ask.error.message() and "mine-" in ask.error.message()
    assert "secret" not in ask.error.message() and "secret" in caplog.text


def test_a_caller_who_leaves_ends_the_work() -> None:
    """The handler is cancelled at its await, and the request still gets its FINAL."""
    ended = threading.Event()

    async def handle(call: Call) -> None:
        call.send(number(1))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            call.send(number(2))

    triton = FakeTriton()
    gone, stays = (triton.ask(ONE, "number") for _ in range(2))
    with opened(triton, handle) as server:
        server.accept([gone, stays])
        gone.wait(responses=1).leave()
        assert gone.wait().error is None
        assert ended.is_set()
        ended.clear()
        assert not stays.error
    assert ended.is_set()


def test_a_request_open_at_the_end_is_told_so() -> None:
    """An answer cut off by shutdown is never taken for a whole one."""

    async def handle(call: Call) -> None:
        call.send(number(1))
        await asyncio.Event().wait()

    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    with opened(triton, handle) as server:
        server.accept([ask])
        ask.wait(responses=1)
    assert ask.wait().error is not None and ask.error.code() == "UNAVAILABLE"


def test_one_request_that_cannot_be_read_does_not_spoil_the_others() -> None:
    """Its inputs cannot be copied: it gets the error, its neighbours their answers."""

    class Unreadable(Ask):
        def inputs(self) -> list[Any]:
            raise MemoryError("200 MB")

    async def handle(call: Call) -> None:
        call.send(number(1), final=True)

    triton = FakeTriton()
    asks = [triton.ask(ONE, "number"), Unreadable(triton, ONE, ["number"], "")]
    asks.append(triton.ask(ONE, "number"))
    with opened(triton, handle) as server:
        server.accept(asks)
        first, spoilt, last = (ask.wait() for ask in asks)
    assert first.said("number") == last.said("number") == [[1]]
    assert spoilt.error is not None and "MemoryError" in spoilt.error.message()


def test_a_question_that_fails_does_not_end_the_watch() -> None:
    """Triton refusing to tell of one caller must not keep others from being noticed."""

    class Odd(Ask):
        def is_cancelled(self) -> bool:
            raise TritonModelError("not today")

    async def handle(call: Call) -> None:
        await asyncio.Event().wait()

    triton = FakeTriton()
    odd, gone = Odd(triton, ONE, ["number"], ""), triton.ask(ONE, "number")
    with opened(triton, handle) as server:
        server.accept([odd, gone])
        gone.leave()
        gone.wait()


def test_a_send_that_fails_is_answered_with_an_error() -> None:
    """As when shared memory is full: the caller hears of it instead of waiting for ever."""

    def full(response: Any) -> None:
        if response is not None and not response.has_error():
            raise TritonModelError("no space left in shared memory")

    async def handle(call: Call) -> None:
        call.send(number(1))

    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = full
    with opened(triton, handle) as server:
        server.accept([ask])
        assert ask.wait().error is not None


def test_inputs_outlive_the_request() -> None:
    """Triton may reuse the memory of an input once ``execute`` has returned."""
    array = np.array([[7]], dtype=np.int32)
    may_read = threading.Event()

    async def handle(call: Call) -> None:
        await asyncio.to_thread(may_read.wait, SECONDS)
        call.send({"number": call.arrays["number"]}, final=True)

    triton = FakeTriton()
    ask = triton.ask({"number": array}, "number")
    with opened(triton, handle) as server:
        server.accept([ask])
        array[:] = 0
        may_read.set()
        assert ask.wait().said("number") == [[7]]


def test_ids_are_unique_whatever_clients_choose() -> None:
    """Two requests of one id are two calls; the client's own id is kept beside."""
    triton = FakeTriton()
    calls = [call_of(triton.ask(ONE, id=id), triton) for id in ("same", "same", "")]
    assert len({call.id for call in calls}) == 3
    assert [call.client_id for call in calls] == ["same", "same", ""]


def test_two_hundred_callers_of_whom_many_leave() -> None:
    """Leaving at any moment: every request ends once, and no task is left."""
    chance = random.Random(7)

    async def handle(call: Call) -> None:
        for value in range(chance.randrange(40)):
            call.send(number(value))
            await asyncio.sleep(0)
        if call.arrays["number"][0, 0] % 3 == 0:
            raise EngineError("by lot")
        if call.arrays["number"][0, 0] % 3 == 1:
            await asyncio.Event().wait()  # until its caller leaves
        call.send(number(-1), final=True)

    triton = FakeTriton()
    asks = [triton.ask(number(index), "number") for index in range(200)]
    with opened(triton, handle) as server:
        for begin in range(0, 200, 20):
            server.accept(asks[begin : begin + 20])
            for index in chance.sample(range(begin + 20), 10):
                asks[index].leave()
        for index in range(1, 200, 3):
            asks[index].leave()
        for ask in asks:
            ask.wait()
    for index in range(2, 200, 3):
        assert asks[index].gone or asks[index].said("number")[-1] == [-1]


# --- sending ------------------------------------------------------------------------------------


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
    """All who wait for it hear of it; one that has left meanwhile harms nobody."""
    gate, seen = Gate(), []
    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = gate

    async def handle(call: Call) -> None:
        call.send(number(1))
        call.send(number(2))
        waiting = [asyncio.create_task(call.ready()) for _ in range(3)]
        await asyncio.to_thread(gate.begun.wait, SECONDS)
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
    server = RequestServer(triton, handle, decoupled=False)
    server.accept([ask])
    assert ask.wait().responses == [{}]
    assert [response is not None for response in sends] == [True]

    async def finish() -> None:
        pass

    server.close(finish)


# --- watching callers ---------------------------------------------------------------------------


def test_asking_for_a_caller_never_waits_behind_a_send() -> None:
    """Nor is Triton asked while a response is on its way."""
    gate, triton = Gate(), FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.on_send = gate
    call = call_of(ask, triton)
    call.finish()
    sending = threading.Thread(target=call.send_queued)
    sending.start()
    assert gate.begun.wait(SECONDS)
    assert not call.gone()
    assert sending.is_alive() and ask.questions == 0
    gate.open.set()
    sending.join()
    assert not call.gone() and triton.broken == []


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
            await asyncio.to_thread(gate.begun.wait, SECONDS)

    with opened(triton, handle) as server:
        server.accept([ask])
        ask.leave()
        assert gate.begun.wait(SECONDS)
        asyncio.run_coroutine_threadsafe(_idle(), server._loop).result(SECONDS)
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


# --- models that are not decoupled ----------------------------------------------------------


def test_each_request_of_a_batch_has_its_own_answer() -> None:
    """A failing request fails alone, and only requested outputs are sent."""

    def answer(arrays: Any) -> dict[str, Any]:
        if arrays["number"][0, 0] == 2:
            raise InvalidRequest("number", "2 is odd enough")
        return {"number": arrays["number"] + 1, "more": arrays["number"]}

    triton = FakeTriton()
    asks = [triton.ask(number(value), "number") for value in (1, 2, 3)]
    first, second, third = answer_each(triton, asks, answer)
    assert [t.name() for t in first.output_tensors()] == ["number"]
    assert third.output_tensors()[0].as_numpy().tolist() == [[4]]
    assert second.error().message() == "INVALID_ARG: number: 2 is odd enough"


# --- the log --------------------------------------------------------------------------------


def test_log_records_keep_their_level() -> None:
    """Triton's own levels, and which model speaks."""
    triton = FakeTriton()
    handler = TritonLogHandler(triton, "bls")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        handler.handle(logging.makeLogRecord({"levelno": level, "msg": "hello"}))
    assert triton.lines == [(kind, "[bls] hello") for kind in ("info", "warn", "error")]


def test_a_model_that_loads_twice_logs_once() -> None:
    """The handler is replaced, not added."""
    logger = logging.getLogger("trtllm_bls")
    before = logger.handlers, logger.level, logger.propagate
    try:
        triton = FakeTriton()
        log_to_triton(triton, "bls")
        log_to_triton(triton, "bls")
        logging.getLogger("trtllm_bls.python_backend").info("once")
        assert triton.lines == [("info", "[bls] once")]
    finally:
        logger.handlers, logger.level, logger.propagate = before


def test_what_loading_made_is_never_collected_again() -> None:
    """A full collection over a tokenizer's objects would hold every stream."""
    gc.unfreeze()

    async def handle(call: Call) -> None:
        call.finish()

    with opened(FakeTriton(), handle):
        assert gc.get_freeze_count() > 0
    gc.unfreeze()
