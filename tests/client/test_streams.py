"""The client and a server that keeps Triton's rules on a real gRPC wire."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.helpers.fake_grpc_server import (
    Abort,
    Fail,
    FakeGrpcServer,
    Hold,
    Say,
    Unflagged,
    Until,
    text,
)
from tests.helpers.waiting import eventually
from trtllm_bls.client import Client, Event
from trtllm_bls.client.client import Reader, _translated
from trtllm_bls.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    TrtllmBlsError,
)

ASK = {"text_input": "Hi", "max_tokens": 4}
STATUS = grpc.StatusCode
UNAVAILABLE = [Abort(STATUS.UNAVAILABLE, "going away")]


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events]


async def test_the_final_flag_may_come_with_the_last_text() -> None:
    """Text in order, the ending on its last event, and the stream then ends on both sides."""
    ending = text("lo", final=True, finish_reason="stop", stop_reason="\n", num_output_tokens=2)
    async with FakeGrpcServer([text("Hel"), ending]) as server, Client(server.url) as client:
        events = [event async for event in client.stream(**ASK)]
        await server.ended.wait()
    assert texts(events) == ["Hel", "lo"]
    assert [event.final for event in events] == [False, True]
    assert (events[1].finish_reason, events[1].stop_reason) == ("stop", "\n")
    assert (events[0].finish_reason, events[1].num_output_tokens) == (None, 2)
    assert server.cancels == 0


async def test_the_final_flag_may_come_alone() -> None:
    """A server may end with an empty response; it is asked for and becomes an event."""
    async with (
        FakeGrpcServer([text("Hi"), Say(final=True)]) as server,
        Client(server.url) as client,
    ):
        events = [event async for event in client.stream(**ASK)]
    assert texts(events) == ["Hi", ""]
    assert events[1].final and events[1].texts == ()


async def test_a_server_without_final_flags_ends_by_ending() -> None:
    """Where no response says whether it is final, the end of the stream is the end."""
    script = [Unflagged({"text_output": "Hi"})]
    async with FakeGrpcServer(script) as server, Client(server.url) as client:
        assert (await client.generate(**ASK)).text == "Hi"


async def test_an_error_in_mid_stream_comes_after_the_text_before_it() -> None:
    """What was received is delivered; then the server's own words are raised; then nothing."""
    script = [text("Hel"), Fail("INTERNAL: the engine fell over"), Say(final=True)]
    async with FakeGrpcServer(script) as server, Client(server.url) as client:
        stream = client.stream(**ASK)
        received = []
        with pytest.raises(EngineError, match=r"^the engine fell over$"):
            async for event in stream:
                received.append(event.text)
        assert [event async for event in stream] == []
        await server.ended.wait()
    assert received == ["Hel"]
    assert server.cancels == 0


@pytest.mark.parametrize(
    ("script", "kind", "told"),
    [
        ([Fail("INVALID_ARG: max_tokens: -1 is bad")], InvalidRequest, "max_tokens: -1 is bad"),
        ([Fail("UNAVAILABLE: too many requests")], Overloaded, "too many requests"),
        ([Fail("Request for unknown model: 'x'")], EngineError, "Request for unknown model: 'x'"),
        ([Abort(STATUS.RESOURCE_EXHAUSTED, "a\nb")], EngineError, "RESOURCE_EXHAUSTED: a b"),
        ([Abort(STATUS.DEADLINE_EXCEEDED, "late")], EngineError, "DEADLINE_EXCEEDED: late"),
        ([text("Hi")], ConnectionFailed, ".* before the answer was complete"),
        ([], ConnectionFailed, ".* before the answer was complete"),
    ],
)
async def test_an_error_instead_of_an_answer_keeps_its_kind(
    script: list[Say | Fail | Abort], kind: type[TrtllmBlsError], told: str
) -> None:
    """The status that a server writes into its message decides the class that is raised; gRPC's own
    is named, on one line. A truncated answer is never taken for a whole one."""
    async with FakeGrpcServer(script) as server, Client(server.url) as client:
        with pytest.raises(kind, match=f"^{told}$"):
            await client.generate(**ASK)  # without a deadline of ours


async def test_a_response_that_cannot_be_read_is_an_error() -> None:
    """Nobody waits for ever for the rest, and the server is told to stop."""
    garbled = Say({"sequence_index": np.zeros(2, np.int8).view("S2")})  # bytes without lengths
    async with (
        FakeGrpcServer([text("Hi"), garbled, Hold()]) as server,
        Client(server.url) as client,
    ):
        stream = client.stream(**ASK)
        assert (await anext(stream)).text == "Hi"
        with pytest.raises(EngineError, match="unreadable response: "):
            await anext(stream)
        await server.cancelled.wait()


async def test_nobody_there_is_a_failed_connection() -> None:
    """A refused connection names the address."""
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ConnectionFailed, match=r"^127\.0\.0\.1:1: "):
            await client.generate(**ASK)


async def test_a_server_that_vanishes_is_a_failed_connection() -> None:
    """Also when it goes in the middle of an answer."""
    async with FakeGrpcServer([text("Hi"), Hold()]) as server, Client(server.url) as client:
        stream = client.stream(**ASK)
        assert (await anext(stream)).text == "Hi"
        await server.vanish()
        with pytest.raises(ConnectionFailed):
            await anext(stream)


async def test_a_server_that_never_answers_meets_the_deadline() -> None:
    """The deadline ends the wait, and the work on the server."""
    async with FakeGrpcServer([Hold()]) as server, Client(server.url) as client:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await client.generate(**ASK, deadline_s=0.05)
        if server.asked:  # on a busy machine the deadline may pass before the request is there
            await server.cancelled.wait()


async def test_a_deadline_that_passes_while_a_request_is_sent_is_a_deadline() -> None:
    """gRPC itself calls some of them internal errors, the sooner the more."""
    async with FakeGrpcServer([Hold()]) as server, Client(server.url) as client:
        asks = (client.generate(**ASK, deadline_s=n / 10_000) for n in range(300))
        ends = await asyncio.gather(*asks, return_exceptions=True)
    assert {type(end) for end in ends} == {DeadlineExceeded}


class Unsent:
    """A call that gRPC ended before its request was written."""

    def __aiter__(self) -> Unsent:
        return self

    async def __anext__(self) -> None:
        raise asyncio.CancelledError

    def cancel(self) -> bool:
        return False


async def test_a_call_that_grpc_cancels_by_itself_is_no_closed_client() -> None:
    """It does so where a call is over before its request is written, for whatever reason."""

    late = DeadlineExceeded("late")
    unsent, left = (Reader(Unsent(), lambda error: late) for _ in range(2))
    left.cancel()
    with pytest.raises(DeadlineExceeded, match="late"):
        await unsent.next()
    with pytest.raises(ConnectionFailed, match="the client was closed during the request"):
        await left.next()


@pytest.mark.parametrize(
    ("left_s", "kind"),
    [(0.0, DeadlineExceeded), (0.03, DeadlineExceeded), (60, ConnectionFailed)],
)
def test_a_call_that_ended_unsent_is_late_if_its_deadline_is_over(
    left_s: float, kind: type[Exception]
) -> None:
    """Or nearly over, since gRPC's clock is another. Its words are the same for either."""
    over_at = time.monotonic() + left_s
    assert type(_translated("host:1", 60, over_at, None)) is kind


async def test_a_deadline_counts_from_before_its_call_is_made() -> None:
    """gRPC counts while it makes the call, which takes long on a busy machine."""

    def made_slowly(messages: Any, timeout: float) -> Unsent:
        time.sleep(2 * timeout)
        return Unsent()

    async with Client("127.0.0.1:1") as client:
        client._stub = SimpleNamespace(ModelStreamInfer=made_slowly)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            await client.generate(**ASK, deadline_s=0.1)


async def test_text_before_the_deadline_is_delivered() -> None:
    """A deadline in mid-stream costs only what had not come, whichever side notices it."""
    script = [text("Hi"), Abort(STATUS.DEADLINE_EXCEEDED, "too late")]
    async with FakeGrpcServer(script) as server, Client(server.url) as client:
        stream = client.stream(**ASK, deadline_s=60)
        assert (await anext(stream)).text == "Hi"
        with pytest.raises(DeadlineExceeded, match="within 60 s"):
            await anext(stream)


@pytest.mark.parametrize("by_task", [False, True])
async def test_cancelling_before_the_first_token_ends_the_work(by_task: bool) -> None:
    """``cancel`` ends a wait for the first event, without an error; a task that is cancelled itself
    stays so, and so does its request, though it keeps the stream."""
    async with FakeGrpcServer([Hold()]) as server, Client(server.url) as client:
        stream = client.stream(**ASK)
        reading = asyncio.create_task(anext(stream, None))
        await server.arrived.wait()
        (reading if by_task else stream).cancel()
        await asyncio.wait({reading})
        assert reading.cancelled() if by_task else reading.result() is None
        await server.cancelled.wait()
        assert stream.cancelled


async def test_cancelling_before_sending_sends_nothing() -> None:
    """A stream cancelled before its first event was asked for never reaches the server."""
    async with FakeGrpcServer([Hold()]) as server, Client(server.url) as client:
        stream = client.stream(**ASK)
        stream.cancel()
        assert [event async for event in stream] == []
    assert server.asked == []


async def test_leaving_the_context_in_mid_stream_ends_the_work() -> None:
    """``break`` inside ``async with`` cancels on the server before the block is left."""
    async with FakeGrpcServer([text("Hi"), Hold()]) as server, Client(server.url) as client:
        async with client.stream(**ASK) as stream:
            async for _ in stream:
                break
        await server.cancelled.wait()
        assert [event async for event in stream] == []


async def test_dropping_the_iterator_ends_the_work() -> None:
    """A plain ``break`` is enough; no context is needed."""
    async with FakeGrpcServer([text("Hi"), Hold()]) as server, Client(server.url) as client:
        async for _ in client.stream(**ASK):
            break
        gc.collect()
        await server.cancelled.wait()


@pytest.mark.parametrize(
    ("ending", "failed"),
    [([text("Hi", final=True)], False), ([Fail("no"), Say(final=True)], True)],
)
async def test_nobody_cancels_after_the_end_has_arrived(
    ending: list[Say | Fail], failed: bool
) -> None:
    """Leaving right after the final response or an error reads on until the server is done; so it
    does where tries were left.
    """
    may_end = asyncio.Event()
    script = [*ending, Until(may_end)]
    async with FakeGrpcServer(script) as server, Client(server.url, retries=2) as client:
        stream = client.stream(**ASK)
        with pytest.raises(EngineError) if failed else nullcontext():
            await anext(stream)
        stream.cancel()
        assert not stream.cancelled
        closing = asyncio.create_task(stream.aclose())
        may_end.set()
        await closing
        await server.ended.wait()
    assert server.cancels == 0


async def test_closing_the_client_cancels_nothing_after_an_error() -> None:
    """The final response may follow, and Triton 24.10 leaks what is cancelled around it."""
    may_end = asyncio.Event()
    async with FakeGrpcServer([Fail("no"), Until(may_end), Say(final=True)]) as server:
        async with Client(server.url) as client:
            with pytest.raises(EngineError):
                await anext(client.stream(**ASK))
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)
            may_end.set()
            await closing
        await asyncio.wait_for(server.ended.wait(), 10)
        assert server.cancels == 0


async def test_closing_the_client_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cancels rather than waits, and a reader left waiting is told that the client is gone."""
    monkeypatch.setattr(
        "trtllm_bls.client.client.END_OF_STREAM_S", None
    )  # waiting would be for ever
    async with FakeGrpcServer([Hold()]) as server:
        client = await Client(server.url).__aenter__()
        reading = asyncio.create_task(client.generate(**ASK))
        await server.arrived.wait()
        await client.close()
        with pytest.raises(ConnectionFailed, match="closed"):
            await reading
        await server.cancelled.wait()


async def test_many_streams_leave_no_task_behind() -> None:
    """Whole, abandoned and failed streams, one after another, on one channel."""
    scripts = [[text("Hi", final=True)], [text("Hi"), Hold()], [Fail("no")]]
    server = FakeGrpcServer(lambda request: scripts[int(request.id) % 3])
    async with server, Client(server.url) as client:
        counts, failed = [], 0
        for number in range(150):
            try:
                async with client.stream(**ASK, request_id=str(number)) as stream:
                    await anext(stream)
            except EngineError:
                failed += 1
            counts.append(sum(map(is_ours, asyncio.all_tasks())))
        # Older versions of gRPC end the cancelled handlers of this test's server a little later.
        assert max(counts) < counts[0] + 10
        await eventually(lambda: sum(map(is_ours, asyncio.all_tasks())) <= counts[0])
        del stream
        gc.collect()
        assert not any(type(thing) is Reader for thing in gc.get_objects())
    assert (len(server.asked), failed) == (150, 50)


async def test_streams_share_the_channel_and_not_their_fate() -> None:
    """A cancelled stream leaves its neighbours alone."""
    go_on = asyncio.Event()
    script = [text("a"), Until(go_on), text("b", final=True)]
    async with FakeGrpcServer(script) as server, Client(server.url) as client:
        first, second = client.stream(**ASK), client.stream(**ASK)
        assert [(await anext(one)).text for one in (first, second)] == ["a", "a"]
        await first.aclose()
        await server.cancelled.wait()
        go_on.set()
        assert [event.text async for event in second] == ["b"]
        assert server.cancels == 1


def is_ours(task: asyncio.Task[object]) -> bool:
    return "_cython" not in repr(task.get_coro())


async def test_a_client_belongs_to_the_loop_that_opened_it() -> None:
    """Used before, after or in another loop, it says what to do instead; closing always works."""

    async def answer(client: Client) -> str:
        return (await client.generate(**ASK)).text

    async with FakeGrpcServer([text("Hi", final=True)]) as server:
        client = Client(server.url)
        await client.close()
        with pytest.raises(RuntimeError, match="not open: use it as 'async with"):
            await answer(client)
        async with client:
            assert await answer(client) == "Hi"
            with pytest.raises(RuntimeError, match="opened in another event loop: open one"):
                await asyncio.to_thread(asyncio.run, answer(client))
        with pytest.raises(RuntimeError, match="not open: use it as 'async with"):
            await answer(client)
        await client.close()


@pytest.mark.parametrize("reads_on", [True, False])
@pytest.mark.parametrize(("count", "size"), [(200, 2**20), (6000, 4000)])
async def test_a_reader_that_is_behind_holds_the_server_back(
    reads_on: bool, count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends what fits into the bounds and gRPC's window, and the rest when it is read:
    in bytes, and in responses, of which any number is read in the end."""
    few = 300
    monkeypatch.setattr("trtllm_bls.client.client.MOST_WAITING", few)
    monkeypatch.setattr("trtllm_bls.wire.grpc_client.MOST_WAITING", few)
    sent = 0

    def note(message: object) -> None:
        nonlocal sent
        sent += 1

    says = [Say({"text_output": "x" * size}, damage=note) for _ in range(count)]
    async with (
        FakeGrpcServer([*says, text("", final=True)]) as server,
        Client(server.url) as client,
    ):
        stream = client.stream(**ASK)
        await anext(stream)
        before = -1
        while before != sent:  # until the server sends no more, though it answers others
            before = sent
            for _ in range(20):
                assert await client.model_ready("tensorrt_llm_bls", 60)
        assert sent < count // 2
        if reads_on:
            assert len([event async for event in stream]) == count
            await server.ended.wait()
        await stream.aclose()
        assert stream.cancelled is not reads_on
        assert [event async for event in stream] == []
