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
    """What the work returns that runs on the loop beside the tests."""
    return asyncio.run_coroutine_threadsafe(work, loop).result(240)


@pytest.fixture(scope="session")
def parts(loop: asyncio.AbstractEventLoop) -> Iterator[World]:
    """A draft is waited for as long as its request may run. Nothing that is left delays the end."""
    stack = AsyncExitStack()
    yield on(loop, stack.enter_async_context(world(1, draft_deadline_seconds="60")))
    on(loop, stack.aclose())
