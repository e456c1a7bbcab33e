"""Requests of Triton: each is answered exactly once, whatever its handler or its sends do."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.helpers.request_servers import (
    ONE,
    ManualSenders,
    answered,
    call_of,
    failing,
    number,
    opened,
)
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from trtllm_bls.orchestrator.log_lines import TritonLogHandler, log_to_triton
from trtllm_bls.pipeline.testing import SECONDS, Ask, FakeTriton, TritonModelError
from trtllm_bls.triton.request_server import Call, RequestServer, SenderThreads


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


def test_an_error_that_is_to_be_a_status_waits() -> None:
    """Triton 24.10 could not take it sooner; other answers and other requests wait for nothing."""
    for parameters, error, waits in (
        ({"triton_grpc_error": "true"}, EngineError("broken"), 1),
        ({"triton_grpc_error": "true"}, None, 0),
        ({"other": "true"}, EngineError("broken"), 0),
    ):
        triton, senders = FakeTriton(), ManualSenders()
        ask = triton.ask(ONE, "number")
        ask.sent_parameters = parameters
        call = call_of(ask, triton, senders)
        call.read(ask)
        call.fail(error) if error else call.send(number(1), final=True)
        senders.send()
        assert senders.delays == [None] * waits
        if waits:
            assert not ask.responses and ask.error is None
            assert not call.arrays, "what it holds meanwhile"
            senders.time_is_up()
        assert (ask.wait().error is None) == (error is None)


@pytest.mark.parametrize("known", [True, False])
async def test_an_error_as_a_status_leaves_once_tritons_thread_has_returned(known: bool) -> None:
    """No timer decides then, except where nobody can tell."""
    returned = asyncio.Event()

    async def before_error_status() -> None:
        await returned.wait()
        if not known:
            raise EngineUnavailable("no port")

    senders = SenderThreads(asyncio.get_running_loop(), 1, before_error_status)
    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.sent_parameters = {"triton_grpc_error": "true"}
    call = call_of(ask, triton, senders)
    call.read(ask)
    came = time.monotonic()
    call.fail(EngineError("broken"))
    for _ in range(5):  # all that the loop has to do
        await asyncio.sleep(0)
    assert ask.error is None
    returned.set()
    await call.ready()
    await asyncio.to_thread(ask.wait)
    assert ask.error is not None
    assert known or time.monotonic() - came > 0.9
    await senders.close()
    assert triton.broken == []


async def test_an_end_in_place_of_a_failed_response_leaves_when_the_server_closes() -> None:
    """Also where the caller wants errors as gRPC status: nothing is held any longer."""
    senders = SenderThreads(asyncio.get_running_loop(), 1)
    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.sent_parameters, ask.on_send = {"triton_grpc_error": "true"}, failing(3)
    call = call_of(ask, triton, senders)
    call.read(ask)
    call.send(number(1), final=True)
    while call not in senders._delayed:
        await asyncio.sleep(0.001)
    await senders.close()
    assert ask.wait().error is not None and triton.broken == []


async def test_a_held_error_leaves_when_the_server_closes() -> None:
    before = asyncio.all_tasks()
    senders = SenderThreads(asyncio.get_running_loop(), 1, asyncio.Event().wait)  # type: ignore[arg-type]
    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    ask.sent_parameters = {"triton_grpc_error": "true"}
    call = call_of(ask, triton, senders)
    call.read(ask)
    call.fail(EngineError("broken"))
    await senders.close()
    assert ask.wait().error is not None and triton.broken == []
    assert asyncio.all_tasks() == before


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

    cancelled: list[str] = []

    async def handle(call: Call) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(call.client_id)

    triton = FakeTriton()
    odd, gone = Odd(triton, ONE, ["number"], "odd"), triton.ask(ONE, "number", id="gone")
    with opened(triton, handle) as server:
        server.accept([odd, gone])
        gone.leave()
        gone.wait()
        assert cancelled == ["gone"]


def test_a_send_that_fails_is_answered_with_an_error() -> None:
    """As when shared memory is full: the caller gets an error instead of waiting for ever."""

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
        assert await asyncio.to_thread(may_read.wait, SECONDS)
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


# --- models that are not decoupled ----------------------------------------------------------


def test_each_request_of_a_batch_has_its_own_answer() -> None:
    """A failing request fails alone, and only requested outputs are sent."""

    def answer(arrays: Any) -> dict[str, Any]:
        if arrays["number"][0, 0] == 2:
            raise InvalidRequest("number", "2 is odd enough")
        return {"number": arrays["number"] + 1, "more": arrays["number"]}

    async def handle(call: Call) -> None:
        call.send(answer(call.arrays), final=True)

    triton = FakeTriton()
    asks = [triton.ask(number(value), "number") for value in (1, 2, 3)]
    with opened(triton, handle, decoupled=False) as server:
        server.accept(asks)
        first, second, third = (ask.wait() for ask in asks)
    assert first.said("number") == [[2]] and third.said("number") == [[4]]
    assert second.error is not None
    assert second.error.message() == "INVALID_ARG: number: 2 is odd enough"


# --- the log --------------------------------------------------------------------------------


def test_a_call_that_somebody_keeps_holds_no_sender() -> None:
    """As the traceback of an error may; Triton wants its senders back before ``finalize``."""
    calls = []

    async def answer(call: Call) -> None:
        calls.append(call)
        call.send(number(1), final=True)

    triton = FakeTriton()
    ask = triton.ask(ONE, "number")
    with opened(triton, answer) as server:
        server.accept([ask])
        assert ask.wait().said("number") == [[1]]
    assert ask not in vars(calls[0]).values()


def test_threads_end_whatever_the_end_of_a_model_raises() -> None:
    """Triton ends the process later, and frees what it has shared with it."""

    async def answer(call: Call) -> None:
        call.send(number(1), final=True)

    async def finish() -> None:
        raise ValueError("a user's own end")

    before = threading.active_count()
    server = RequestServer(FakeTriton(), answer)
    with pytest.raises(ValueError, match="own end"):
        server.close(finish)
    assert threading.active_count() == before and server.loop.is_closed()


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
    before = gc.get_freeze_count()  # what the tests froze, which would be walked from here on

    async def handle(call: Call) -> None:
        call.finish()

    with opened(FakeTriton(), handle):
        assert gc.get_freeze_count() > before


def test_a_log_record_is_one_whatever_a_caller_wrote() -> None:
    """No line of it begins like another record, and no terminal obeys it."""
    triton = FakeTriton()
    handler = TritonLogHandler(triton, "bls")
    try:
        raise ValueError("I1121 forged\nI1121 \x1b[31mforged")
    except ValueError:
        found = sys.exc_info()
    message = "id\nI1121 forged \x1b[2J %s"
    handler.emit(
        logging.LogRecord("trtllm_bls", logging.ERROR, "", 0, message, ("x" * 9999,), found)
    )
    ((_, text),) = triton.lines
    first, *more = text.split("\n")
    assert first.startswith("[bls] id") and len(first) < 2100
    assert more and all(line.startswith("    ") for line in more)
    assert "\x1b" not in text and r"\x1b[31m" in text


def test_an_id_of_a_caller_is_short_and_plain_in_errors_and_logs() -> None:
    """The call keeps what it needs to be told from others."""
    triton = FakeTriton()
    ask = triton.ask(ONE, "number", id="\x1b[2J\n" + "x" * 5_000_000)
    call = call_of(ask, triton)
    assert call.id.startswith(r"\x1b[2J xxx") and len(call.id) < 200
    assert call.client_id == ask.request_id()
