"""When a request is sent again, and when it is not; what is left of a client that is closed."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.helpers.fake_grpc_server import Abort, Fail, FakeGrpcServer, HangUp, Hold, Say, text
from tests.helpers.waiting import eventually, with_room_async
from trtllm_bls.client import Client, Stream
from trtllm_bls.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    SettingsError,
)
from trtllm_bls.types import Backoff

ASK: dict[str, Any] = {"text_input": "Hi", "max_tokens": 4}
UNAVAILABLE = [Abort(grpc.StatusCode.UNAVAILABLE, "going away")]
FULL = [Fail("UNAVAILABLE: too many requests"), Say(final=True)]
ANSWER = [text("Hi", final=True)]


@pytest.mark.parametrize("failure", [UNAVAILABLE, FULL, [Fail("UNAVAILABLE: full")]])
async def test_what_failed_before_its_first_response_is_sent_again(failure: Sequence[Any]) -> None:
    """A connection that broke, a server without room; under the same id, to one answer."""
    scripts = iter([failure, failure, ANSWER])
    server = FakeGrpcServer(lambda _: next(scripts))
    async with server, Client(server.url, retries=2) as client:
        assert (await client.generate(**ASK, request_id="7")).text == "Hi"
    assert [request.id for request in server.asked] == ["7"] * 3
    assert server.asked[0] == server.asked[2]


async def test_a_request_of_any_size_is_sent_again() -> None:
    """gRPC's own retries give up above 256 KB."""
    scripts = iter([UNAVAILABLE, ANSWER])
    server = FakeGrpcServer(lambda _: next(scripts))
    async with server, Client(server.url, retries=1) as client:
        assert (await client.generate(text_input="x" * 2_000_000, max_tokens=1)).text == "Hi"


@pytest.mark.parametrize(
    ("script", "retries", "error"),
    [
        ([text("Hel"), *UNAVAILABLE], 2, ConnectionFailed),
        ([text("Hel"), *FULL], 2, Overloaded),
        (UNAVAILABLE, 0, ConnectionFailed),
        (FULL, 0, Overloaded),
        ([Fail("INVALID_ARG: top_k: no")], 2, InvalidRequest),
        ([Fail("INTERNAL: broken")], 2, EngineError),
        ([Abort(grpc.StatusCode.INVALID_ARGUMENT, "no")], 2, EngineError),
    ],
)
async def test_what_must_not_be_sent_again(
    script: Sequence[Any], retries: int, error: type[Exception]
) -> None:
    """After the first response, without ``retries``, and where another try cannot help."""
    async with FakeGrpcServer(script) as server, Client(server.url, retries=retries) as client:
        with pytest.raises(error):
            await client.generate(**ASK)
    assert len(server.asked) == 1


async def test_the_last_failure_is_told_when_retries_end() -> None:
    """As it would be without retries."""
    async with FakeGrpcServer(FULL) as server, Client(server.url, retries=2) as client:
        with pytest.raises(Overloaded, match="too many requests"):
            await client.generate(**ASK)
    assert len(server.asked) == 3


async def test_the_deadline_bounds_all_tries() -> None:
    """What is left of it is the next try's; a pause that would outlast it is not begun."""

    async def attempt(deadline_s: float) -> bool | None:
        """``None`` if there was no time left for another try."""
        scripts = iter([FULL, [Hold()]])
        server = FakeGrpcServer(lambda _: next(scripts, FULL))
        async with server, Client(server.url, retries=10**6) as client:
            with pytest.raises((Overloaded, DeadlineExceeded)) as failure:
                await client.generate(**ASK, deadline_s=deadline_s)
            if len(server.asked) < 2:
                return None
            assert failure.type is DeadlineExceeded
            failure.match(f"within {re.escape(format(deadline_s, 'g'))} s")
            with pytest.raises((Overloaded, DeadlineExceeded)):
                await client.generate(**ASK, deadline_s=0.2)
        return True

    await with_room_async(attempt, 1.5, 15.0)


async def test_a_pause_that_would_outlast_the_deadline_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller is told at once, and what was wrong rather than that time is over."""
    monkeypatch.setattr(random, "uniform", lambda _, longest: longest)
    monkeypatch.setattr("trtllm_bls.client.client.RETRY_S", Backoff(20.0, 20.0))
    async with FakeGrpcServer(FULL) as server, Client(server.url, retries=2) as client:
        with pytest.raises(Overloaded):
            await client.generate(**ASK, deadline_s=15)


async def test_each_try_has_what_is_left_of_the_deadline() -> None:
    """So that the last try ends when the caller expects it."""
    lefts: list[float] = []

    def begin(left: float | None) -> Any:
        assert left is not None
        lefts.append(left)

        async def refuse() -> Any:
            await asyncio.sleep(0.1)
            raise Overloaded("full")

        return SimpleNamespace(next=refuse, cancel=lambda: False)

    with pytest.raises(Overloaded):
        await anext(Stream("request", begin, retries=3, deadline_s=60_000))
    gaps = [before - after for before, after in pairwise(lefts)]
    assert len(gaps) == 3 and 59_990 < lefts[0] <= 60_000
    assert all(gap >= 0.1 for gap in gaps)


async def test_a_try_waits_as_long_as_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner it would only be refused again; clients do not come back together."""
    pauses: list[float] = []

    async def wait_for(left: Any, pause: float) -> None:
        pauses.append(pause)
        left.close()

    async def refuse() -> Any:
        raise Overloaded("full", retry_after_s=7)

    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    begin: Any = lambda _: SimpleNamespace(next=refuse, cancel=lambda: False)  # noqa: E731
    with pytest.raises(Overloaded):
        await anext(Stream("request", begin, retries=3, deadline_s=60))
    assert len(pauses) == 3 and all(7 <= pause < 7 + 5 for pause in pauses)


async def test_who_leaves_in_a_pause_does_not_wait_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is the connection's slot kept until then."""
    pauses: list[float] = []

    def endless(_: float, pause: float) -> float:
        pauses.append(pause)
        return 1e6

    monkeypatch.setattr(random, "uniform", endless)
    async with FakeGrpcServer(FULL) as server, Client(server.url, retries=10**6) as client:
        stream = client.stream(**ASK)
        task = asyncio.ensure_future(anext(stream, None))
        await eventually(lambda: pauses)
        stream.cancel()
        await task


@pytest.mark.parametrize("cancelled", [False, True])
async def test_who_leaves_between_two_tries_is_not_kept(cancelled: bool) -> None:
    """Nor is his request sent again, whether he cancels the stream or the task that reads it."""
    async with FakeGrpcServer(FULL) as server, Client(server.url, retries=10**6) as client:
        stream = client.stream(**ASK)
        task = asyncio.ensure_future(anext(stream, None))
        await eventually(lambda: len(server.asked) >= 3)
        (task if cancelled else stream).cancel()
        await asyncio.wait({task})
        assert task.cancelled() if cancelled else task.result() is None
        assert stream.cancelled
        asked = len(server.asked)
        await stream.aclose()
    assert len(server.asked) == asked


async def test_who_leaves_as_a_failure_arrives_is_not_tried_again() -> None:
    """The failure is there but not yet seen: there is nothing left to cancel on the server."""
    begun: list[Any] = []

    def begin(left: float | None) -> Any:
        items: asyncio.Queue[Any] = asyncio.Queue()
        begun.append(SimpleNamespace(items=items, next=items.get, cancel=lambda: False))
        return begun[-1]

    stream = Stream("request", begin, retries=10**6)
    task = asyncio.ensure_future(anext(stream, None))
    await eventually(lambda: begun)
    begun[0].items.put_nowait(Overloaded("full"))
    stream.cancel()
    assert await task is None
    assert stream.cancelled
    assert len(begun) == 1


async def test_a_server_that_starts_late_is_reached() -> None:
    """gRPC waits a second before it connects again, unless it is told otherwise."""
    async with FakeGrpcServer(ANSWER) as gone:
        url = gone.url
    async with Client(url, retries=50) as client:
        asking = asyncio.create_task(client.generate(**ASK))
        await asyncio.sleep(0)
        async with FakeGrpcServer(ANSWER, port=int(url.rpartition(":")[2])):
            assert (await asking).text == "Hi"


async def test_many_streams_that_are_cancelled_at_once_start_no_tasks() -> None:
    """Each has its reader; cancelling and closing add none."""
    count = 200
    async with FakeGrpcServer([text("Hi"), Hold()]) as server:
        client = await Client(server.url).__aenter__()
        streams = [client.stream(**ASK) for _ in range(count)]
        for stream in streams:
            await anext(stream)
        before = asyncio.all_tasks()
        for stream in streams[: count // 2]:
            stream.cancel()
        closing = asyncio.create_task(client.close())
        made: set[asyncio.Task[Any]] = set()
        while not closing.done():
            made |= {t for t in asyncio.all_tasks() - before if "_cython" not in repr(t.get_coro())}
            await asyncio.sleep(0)
        assert made == {closing}
        await eventually(lambda: server.cancels == count)


async def test_a_channel_is_closed_whatever_happens_meanwhile() -> None:
    """Also when closing is cancelled; and no second one is opened by mistake."""
    async with FakeGrpcServer([text("Hi"), HangUp()]) as server:
        client = Client(server.url)
        async with client:
            with pytest.raises(RuntimeError, match="open already"):
                await client.__aenter__()
            channel = client._channel
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await client.__aenter__()
        stream = client.stream(**ASK)
        await anext(stream)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert client._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize("options", [{"retries": -1}, {"keepalive_s": 0}])
def test_numbers_are_checked(options: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(SettingsError, match=next(iter(options))):
        Client("127.0.0.1:8001", **options)
