"""A watch that logs the line that blocks an event loop. A blocked loop holds up every request."""

from __future__ import annotations

import asyncio
import linecache
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

BLOCKED_SECONDS = 0.5  # a loop that runs no callback for this long is blocked
_CALLBACK_SECONDS = 0.2  # between two callbacks that the watch posts

log = logging.getLogger(__name__)


class LoopWatch:
    """Watches ``loop``, which ``thread`` runs, in a thread of its own from ``start`` to ``close``.

    The watch posts a callback to the loop and measures how long the loop takes to run it.
    ``request_of`` returns the id of a task's request, if it is known.
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
        self._posted_at = clock()
        self._ran_at = self._posted_at
        self._has_run = True  # the loop has run the callback that was posted last
        self._is_logged = False  # the log says that the loop is blocked
        self._closing = threading.Event()
        self._own_thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def start(self) -> None:
        self._own_thread.start()

    def close(self) -> None:
        """End the thread. Call this before the loop is closed."""
        self._closing.set()
        self._own_thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_CALLBACK_SECONDS):
            self.look()

    def look(self) -> None:
        """Log the line that blocks the loop, once, and afterwards for how long it was blocked."""
        now = self._clock()
        seconds = now - self._posted_at
        if self._has_run:
            if self._is_logged:
                self._is_logged = False
                blocked_seconds = self._ran_at - self._posted_at
                log.warning("the event loop runs again; it was blocked for %.1f s", blocked_seconds)
            self._posted_at = now
            self._has_run = False
            self._loop.call_soon_threadsafe(self._on_callback)
        elif seconds >= BLOCKED_SECONDS and not self._is_logged:
            self._log_blocked(seconds)

    def _on_callback(self) -> None:
        self._ran_at = self._clock()
        self._has_run = True

    def _log_blocked(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        # A loop that waits for events is not blocked: its process was paused, or got no CPU.
        if frame is None or frame.f_code.co_filename.endswith("selectors.py"):
            return
        self._is_logged = True
        prefix = ""
        task = asyncio.current_task(self._loop)
        if task is not None:
            request = self._request_of(task)
            if request is not None:
                prefix = f"{request}: "
        log.warning(
            "%sthe event loop is blocked for %.1f s, and every request waits, at %s; use await "
            "self.run_in_thread(function, …)",
            prefix,
            seconds,
            _location(frame),
        )


def _location(frame: FrameType) -> str:
    """Return the line that runs, and the line of a ``model.py`` that called it, if there is one."""
    location = _line(frame)
    model_frame: FrameType | None = frame
    while model_frame is not None and not model_frame.f_code.co_filename.endswith("model.py"):
        model_frame = model_frame.f_back
    if model_frame is not None and model_frame is not frame:
        location += f", called by {_line(model_frame)}"
    return location


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    source = linecache.getline(file, frame.f_lineno).strip()
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name}): {source}"
