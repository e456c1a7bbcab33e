"""Every state of a request × every way to end it, as the engine sees it.

A real server; its engine is a script in this process, which stops where the test wants it. What is
asserted: the caller has the right end, the engine's work ends, and the next request is answered.
How long that took is printed (``pytest -s``).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.helpers import fake_grpc_server as wire
from tests.helpers.server_requests import metric
from tests.helpers.waiting import eventually, until, with_room_async
from tests.reliability.conftest import on
from tests.reliability.faulty_engine import DRAFT, HOLD, TARGET, Proxy, Seen, Step
from tests.reliability.world import MAX_RUNNING, TEXTS, World, world
from trtllm_bls.client import Client, Stream
from trtllm_bls.errors import ConnectionFailed, TrtllmBlsError

STATES = ("queued", "first token", "mid-stream", "drafting", "verifying", "final token")
WAYS = ("cancel", "disconnect", "deadline", "stop word")
# A queued request has said nothing that could hold a stop word.
CELLS = [cell for cell in product(STATES, WAYS) if cell != ("queued", "stop word")]
# The reason that the caller is told, and the error, of a request that is not answered.
ENDS: dict[str, Any] = {
    "cancel": (None, None),
    "disconnect": (None, ConnectionFailed),
    "deadline": ("timeout", None),
}
PROMPT, TEXT = next(iter(TEXTS.items()))
DRAFTS = {"draft_source": "model", "num_draft_tokens": 4}
PLAIN = {"draft_source": "off"}
WAITING = "trtllm_bls_num_requests_waiting"  # told once a second
BLOCKER = "blocker"  # begins the ids of requests that fill the server


def plan(state: str, go_on: asyncio.Event) -> Any:
    """Each request stops in its state, until ``go_on`` or for ever."""
    until = wire.Until(go_on)

    def spoil(seen: Seen, steps: list[Step]) -> list[Step]:
        if seen.id.startswith(BLOCKER) or state == "queued":
            return [HOLD]
        if state == "first token":
            return [until, *steps]
        if state == "mid-stream":
            return [steps[0], until, *steps[1:]]
        if state == "final token":
            return [*steps[:-2], until, *steps[-2:]]  # the last one is empty
        stops = seen.model == DRAFT if state == "drafting" else seen.verifies
        return [until, *steps] if stops else steps

    return spoil


class Cell:
    """One request brought into a state."""

    def __init__(self, parts: World, client: Client, state: str, **more: Any) -> None:
        self.engine, self.state = parts.engine, state
        self.go_on = asyncio.Event()
        self.engine.plan = plan(state, self.go_on)
        drafts = DRAFTS if state in ("drafting", "verifying") else PLAIN
        self.stream: Stream = client.stream(
            text_input=PROMPT, max_tokens=100, request_id="cell", **drafts, **more
        )
        self.said, self.reason, self.error = "", None, None  # type: ignore[var-annotated]
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.stream:
                self.said += event.text
                self.reason = event.finish_reason or self.reason
        except TrtllmBlsError as error:
            self.error = error

    def mine(self) -> list[Seen]:
        return [seen for seen in self.engine.seen if seen.id.startswith("cell")]

    async def reached(self, metrics_url: str) -> None:
        """Wait until the request is in its state, or over."""
        if self.state == "queued":
            waiting = partial(metric, metrics_url, WAITING)
            full = MAX_RUNNING  # none of those that fill the server has a token
            await asyncio.to_thread(until, lambda: waiting() > full or self.reading.done())
            return
        self.reading.add_done_callback(lambda _: self.engine.changed.set())
        await self.engine.until(lambda: self._is_there() or self.reading.done())
        begun = self.state in ("mid-stream", "final token")
        await eventually(lambda: not begun or self.said or self.reading.done())

    def check_state(self) -> None:
        """Fail where the request is over before it was in its state."""
        over = f"no {self.state}: {self.said!r}, {self.reason}, {self.error}"
        assert not self.reading.done(), over

    def _is_there(self) -> bool:
        running = [seen for seen in self.mine() if seen.end is None]
        if self.state == "drafting":
            return any(seen.model == DRAFT for seen in running)
        if self.state == "verifying":
            return any(seen.verifies for seen in running)
        return any(seen.model == TARGET for seen in running)

    async def engine_done(self) -> None:
        """Wait until nothing of it runs in the engine."""
        await self.engine.until(lambda: all(seen.end for seen in self.mine()))


async def reached_cell(parts: World, client: Client, state: str, **more: Any) -> Cell:
    """A request in its state."""
    cell = Cell(parts, client, state, **more)
    await cell.reached(parts.server.metrics_url)
    cell.check_state()
    return cell


async def fill(parts: World, stack: AsyncExitStack) -> None:
    """As many requests as may run, which never end by themselves, and none that waits."""
    parts.engine.plan = plan("queued", asyncio.Event())
    for number in range(MAX_RUNNING):
        stream = parts.client.stream(
            text_input=PROMPT, max_tokens=9, request_id=f"{BLOCKER}{number}", **PLAIN
        )
        reading = asyncio.create_task(_drain(stream))
        stack.push_async_callback(_settle, reading)
        stack.callback(stream.cancel)
    await parts.engine.until(
        lambda: sum(seen.id.startswith(BLOCKER) for seen in parts.engine.running) == MAX_RUNNING
    )
    waiting = partial(metric, parts.server.metrics_url, WAITING)
    # None that an earlier test left: only those that fill the server are without a token.
    await asyncio.to_thread(until, lambda: waiting() == MAX_RUNNING)


async def _drain(stream: Stream) -> None:
    with suppress(TrtllmBlsError):
        async for _ in stream:
            pass


async def _settle(task: asyncio.Task[None]) -> None:
    _, late = await asyncio.wait({task}, timeout=20)
    assert not late, "waited 20 s for the end of a stream"


async def run_cell(parts: World, state: str, way: str, deadline_s: float) -> bool | None:
    """Bring a request into the state, end it, and look at what everybody saw.

    ``None`` where its deadline came before the state, if it has one.
    """
    parts.engine.seen.clear()
    more: dict[str, Any] = {}
    if way == "deadline":
        more["timeout_ms"] = round(deadline_s * 1000)
    if way == "stop word":
        more["stop_words"] = [TEXT[30:33]] if state != "final token" else [TEXT[-2:]]
    async with AsyncExitStack() as stack:
        if state == "queued":
            await fill(parts, stack)
        port = int(parts.server.grpc_url.rpartition(":")[2])
        wire_to_server = await stack.enter_async_context(Proxy(port))
        client = await stack.enter_async_context(Client(wire_to_server.url))
        cell = Cell(parts, client, state, **more)
        await cell.reached(parts.server.metrics_url)
        if way == "deadline" and cell.reading.done() and cell.reason == "timeout":
            await cell.engine_done()
            return None
        cell.check_state()
        began = time.monotonic()
        if way == "cancel":
            cell.stream.cancel()
        elif way == "disconnect":
            wire_to_server.reset()
        elif way == "stop word":
            cell.go_on.set()
        await asyncio.wait({cell.reading}, timeout=20 + deadline_s)
        await cell.engine_done()
        print(f"{state}, {way}: over after {(time.monotonic() - began) * 1000:.0f} ms")
        check(cell, way)
    parts.engine.plan = lambda seen, steps: steps
    result = await parts.client.generate(text_input=PROMPT, max_tokens=100)
    assert (result.text, result.finish_reason) == (TEXT, "end_id")
    return True


def check(cell: Cell, way: str) -> None:
    """The right end for the caller, and none of the engine's work finished that was not needed."""
    assert cell.reading.done()
    targets = [seen for seen in cell.mine() if seen.model == TARGET]
    if way == "stop word":
        cut = TEXT[:30] if cell.state != "final token" else TEXT[:-2]
        assert (cell.error, cell.said, cell.reason) == (None, cut, "stop")
        return
    assert TEXT.startswith(cell.said)
    assert (cell.reason, cell.error and type(cell.error)) == ENDS[way]
    if cell.state == "queued":
        assert targets == []  # the engine never heard of it
    elif cell.state == "drafting":
        assert [seen.end for seen in cell.mine() if seen.model == DRAFT][-1] == "left"
    else:
        assert targets[-1].end == "left"


@pytest.mark.parametrize("state, way", CELLS)
def test_a_request_ends_in_every_state(
    parts: World, loop: asyncio.AbstractEventLoop, state: str, way: str
) -> None:
    """The engine's work ends with it, and the next request is answered."""
    attempt = partial(run_cell, parts, state, way)
    on(loop, with_room_async(attempt, 2.0, 8.0, 32.0))


def test_shutdown_ends_every_state(loop: asyncio.AbstractEventLoop) -> None:
    """Whoever still waits when the time to drain is over is told so; the engine has no work."""

    async def scenario() -> None:
        there = world(exit_timeout=2, draft_deadline_seconds="60")
        async with there as parts, Client(parts.server.grpc_url) as client:
            cells = []
            for state in STATES[1:]:
                parts.engine.seen.clear()
                cells.append(await reached_cell(parts, client, state))
            await asyncio.to_thread(parts.server.stop)
            await asyncio.wait({cell.reading for cell in cells}, timeout=20)
            await parts.engine.until(lambda: not parts.engine.running)
            for cell in cells:
                assert cell.reading.done(), cell.state
                assert "the server is shutting down" in str(cell.error), cell.state
                assert TEXT.startswith(cell.said)

    on(loop, asyncio.wait_for(scenario(), 110))
