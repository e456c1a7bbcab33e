"""Time that passes only when a test says so, or at once when everything waits for it."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose timers follow ``now``, in seconds.

    With ``skips_waits`` time jumps to the next timer as soon as nothing else is due, and waiting
    for nothing at all is an error. Such a loop must not wait for threads or sockets.
    """

    def __init__(self, skips_waits: bool = False) -> None:
        self.now = 0.0
        super().__init__(_Skipping(self) if skips_waits else None)

    def time(self) -> float:
        return self.now


class _Skipping(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits and nothing is due: a hang")
        self._clock.now += max(0.0, timeout)
        return super().select(0)


def run_by_the_clock(scenario: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    """Run a test that moves the clock itself."""
    clock = Clock()
    _run(clock, scenario(clock))


def run_skipping_waits(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; sleeping takes no time."""
    return _run(Clock(skips_waits=True), work)


def _run(clock: Clock, work: Coroutine[Any, Any, T]) -> T:
    failed: list[dict[str, Any]] = []  # callbacks, which asyncio would only log
    clock.set_exception_handler(lambda _, context: failed.append(context))
    try:
        result = clock.run_until_complete(work)
    finally:
        clock.run_until_complete(clock.shutdown_asyncgens())
        clock.close()
    assert failed == []
    return result


async def settle() -> None:
    """Let everything run that is due now."""
    for _ in range(5):
        await asyncio.sleep(0)


def skipping_waits(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine; sleeping takes no time in it."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        run_skipping_waits(test(*arguments, **fixtures))

    return run
