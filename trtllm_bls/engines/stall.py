"""A timer that fires when nothing has happened for a while; cheap enough to feed per token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallTimer:
    """Calls ``on_stall`` once, when ``feed`` was not called for ``seconds``. 0 = never."""

    def __init__(self, seconds: float, on_stall: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_stall = on_stall
        self._fed = self._loop.time()
        self._handle = self._loop.call_later(seconds, self._check) if seconds else None
        self.stalled = False

    def feed(self) -> None:
        """Something happened."""
        self._fed = self._loop.time()

    def close(self) -> None:
        """Never fire again."""
        if self._handle is not None:
            self._handle.cancel()

    def _check(self) -> None:
        left = self._fed + self._seconds - self._loop.time()
        if left > 0:
            self._handle = self._loop.call_later(left, self._check)
        else:
            self.stalled = True
            self._on_stall()
