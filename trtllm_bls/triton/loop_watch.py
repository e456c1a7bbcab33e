"""Says which line blocks an event loop: while it does, no request of the process goes on."""

from __future__ import annotations

import asyncio
import linecache
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

BLOCKED_SECONDS = 0.5  # from which on a loop counts as blocked
_TURN_SECONDS = 0.2  # between two callbacks that the loop is to run

log = logging.getLogger(__name__)


class LoopWatch:
    """Watches ``loop``, which ``thread`` runs, in a thread of its own from ``start`` to ``close``.

    ``request_of`` returns the id of the request whose task runs, if it is known.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        request_of: Callable[[asyncio.Task[object]], str | None] = lambda task: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._thread = thread
        self._request_of = request_of
        self._clock = clock
        self._asked_at = clock()
        self._turned_at = self._asked_at
        self._has_turned = True  # since it was asked
        self._is_told = False
        self._closing = threading.Event()
        self._own_thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def start(self) -> None:
        self._own_thread.start()

    def close(self) -> None:
        """End the thread. Call this before the loop is closed."""
        self._closing.set()
        self._own_thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_TURN_SECONDS):
            self.look()

    def look(self) -> None:
        """Log the line at which the loop is blocked, once, and afterwards for how long it was."""
        now = self._clock()
        waited = now - self._asked_at
        if self._has_turned:
            if self._is_told:
                self._is_told = False
                blocked = self._turned_at - self._asked_at
                log.warning("the event loop runs again; it was blocked for %.1f s", blocked)
            self._asked_at = now
            self._has_turned = False
            self._loop.call_soon_threadsafe(self._turn)
        elif waited >= BLOCKED_SECONDS and not self._is_told:
            self._tell(waited)

    def _turn(self) -> None:
        self._turned_at = self._clock()
        self._has_turned = True

    def _tell(self, waited: float) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        # A loop that waits for events has no processor, or its process was stopped.
        if frame is None or frame.f_code.co_filename.endswith("selectors.py"):
            return
        self._is_told = True
        task = asyncio.current_task(self._loop)
        request = None if task is None else self._request_of(task)
        log.warning(
            "%sthe event loop is blocked for %.1f s, and every request waits, at %s; use await "
            "self.run_in_thread(function, …)",
            "" if request is None else f"{request}: ",
            waited,
            _place(frame),
        )


def _place(frame: FrameType) -> str:
    """The line that runs, and where a library runs it, the line of a model that called it."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.endswith("model.py"):
        caller = caller.f_back
    place = _line(frame)
    return place if caller is None or caller is frame else f"{place}, called by {_line(caller)}"


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    source = linecache.getline(file, frame.f_lineno).strip()
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name}): {source}"
