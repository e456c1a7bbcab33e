"""Waiting for what other processes and threads do, which cannot tell a test when it is done."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import psutil

L = TypeVar("L", int, float)
T = TypeVar("T")
STREAM_S = 120  # of a stream of Triton's client, whose end that client waits for without a limit
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


def with_room(attempt: Callable[[L], T | None], *rooms: L) -> T:
    """Return the result of the first attempt that had enough room.

    ``rooms``: time limits or lengths of an answer, the usual one first, each further one larger.
    ``attempt`` returns ``None`` where the machine was too slow for its room, and raises where the
    claim of the test is wrong.
    """
    for room in rooms:
        found = attempt(room)
        if found is not None:
            return found
    raise AssertionError(f"the machine was too slow for each of {rooms}")


async def with_room_async(attempt: Callable[[L], Awaitable[T | None]], *rooms: L) -> T:
    """``with_room`` for coroutines."""
    for room in rooms:
        found = await attempt(room)
        if found is not None:
            return found
    raise AssertionError(f"the machine was too slow for each of {rooms}")


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


def in_time(readable: Iterable[Any], what: str, seconds: float = 60) -> None:
    """Return when a pipe, or a process's descriptor, can be read. ``what``: for the message."""
    found, _, _ = select.select([*readable], [], [], seconds)
    assert found, f"waited {seconds} s for {what}"


def exit_code(child: int, seconds: float = 60) -> int:
    """Return the exit code of a forked process, which is killed if it does not end."""
    descriptor = os.pidfd_open(child)
    try:
        in_time([descriptor], f"the end of the forked process {child}", seconds)
    except AssertionError:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        raise
    finally:
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


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
