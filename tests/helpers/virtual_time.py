"""Time that passes only when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose timers follow ``now``, in seconds."""

    now = 0.0

    def time(self) -> float:
        return self.now


def run_by_the_clock(dialogue: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()
    try:
        clock.run_until_complete(dialogue(clock))
        clock.run_until_complete(clock.shutdown_asyncgens())
    finally:
        clock.close()


async def settle() -> None:
    """Let everything run that is due now."""
    for _ in range(5):
        await asyncio.sleep(0)
