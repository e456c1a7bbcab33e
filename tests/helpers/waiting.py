"""Waiting for what other processes and threads do, which cannot tell a test when it is done."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import psutil

T = TypeVar("T")
_BETWEEN_LOOKS_S = 0.01  # leaves the processor to those who are waited for


def until(
    condition: Callable[[], T], seconds: float = 60, tells: Callable[[], object] | None = None
) -> T:
    """What the condition gives as soon as it holds; an assertion fails if that never comes.

    ``tells``: what stands in its message in place of what the condition gave last.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() >= end:
            seen = found if tells is None else tells()
            raise AssertionError(f"waited {seconds} s in vain; last seen: {seen!r}")
        time.sleep(_BETWEEN_LOOKS_S)
    return found


def in_pieces(ask: Callable[[], Sequence[T]], more_than: int) -> Sequence[T]:
    """The responses of a stream, which is asked for again until there are more than so many.

    Tokens that wait for the sender share a response, so a busy machine may send fewer of them.
    """
    return until(lambda: found if len(found := ask()) > more_than else ())


async def eventually(condition: Callable[[], T | Awaitable[T]], seconds: float = 60) -> T:
    """``until`` for an event loop, which runs meanwhile; the condition may be a coroutine's."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds} s in vain; last seen: {found!r}"
        await asyncio.sleep(_BETWEEN_LOOKS_S)


def run_async(work: Coroutine[Any, Any, T], seconds: float = 240) -> T:
    """``asyncio.run`` with a limit; the traceback of work that is late shows where it waited."""
    return asyncio.run(asyncio.wait_for(work, seconds))


class Joinable(Protocol):
    """A thread or a process of ``multiprocessing``."""

    name: str

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


def join(waited_for: Joinable, seconds: float = 60) -> None:
    """Return when a thread or process has ended; an assertion names it if that takes too long."""
    waited_for.join(seconds)
    assert not waited_for.is_alive(), f"waited {seconds} s for the end of {waited_for.name}"


def until_ended(processes: Iterable[psutil.Process], seconds: float = 60) -> None:
    """Return when all processes have ended, reaped or not, and whoever their parents are."""
    for process in processes:
        if process.is_running():
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            try:
                ended, _, _ = select.select([descriptor], [], [], seconds)
            finally:
                os.close(descriptor)
            assert ended, f"{process} runs on"
