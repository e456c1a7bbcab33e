"""One server with a faulty engine for all tests that need no other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from threading import Thread
from typing import Any

import pytest

from tests.helpers.waiting import join
from tests.reliability.world import World, world


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that runs beside the tests, since servers and clients outlive each of them."""
    made = asyncio.new_event_loop()
    thread = Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    join(thread)
    made.close()


def on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    """Return what the work returns, which runs on the loop beside the tests."""

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await asyncio.wait_for(work, 230), None
        except BaseException as error:
            return None, error

    result, error = asyncio.run_coroutine_threadsafe(outcome(), loop).result(240)
    if error is not None:
        raise error  # as it is: asyncio would make a new one, which says nowhere where it waited
    return result


@pytest.fixture(scope="session")
def parts(loop: asyncio.AbstractEventLoop) -> Iterator[World]:
    """A draft is waited for as long as its request may run. Nothing that is left delays the end."""
    stack = AsyncExitStack()
    yield on(loop, stack.enter_async_context(world(1, draft_deadline_seconds="60")))
    on(loop, stack.aclose())
