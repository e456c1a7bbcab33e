"""When nothing arrives from a server although requests run: ask whether it is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class StallWatch:
    """Asks ``probe`` once nothing has arrived for ``seconds`` (0 = never) while ``busy``.

    ``probe`` gives what is wrong with the server, or ``None``; ``give_up`` is then told. So no
    answer ends for being long or queued.
    """

    def __init__(
        self,
        seconds: float,
        busy: Callable[[], bool],
        probe: Callable[[], Awaitable[str | None]],
        give_up: Callable[[str], None],
    ) -> None:
        self._seconds = seconds
        self._busy, self._probe, self._give_up = busy, probe, give_up
        self._last_arrival = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None

    def arrived(self) -> None:
        """Something has arrived."""
        self._last_arrival = asyncio.get_running_loop().time()

    def begin(self) -> None:
        """A request has begun."""
        if self._timer is None and self._probing is None and self._seconds:
            self.arrived()
            self._look_in(self._seconds)

    def close(self) -> None:
        """Watch no longer."""
        for pending in (self._timer, self._probing):
            if pending is not None:
                pending.cancel()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._busy():
            return
        left = self._last_arrival + self._seconds - asyncio.get_running_loop().time()
        if left > 0:
            self._look_in(left)
        else:
            self._probing = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        silent_since = self._last_arrival
        problem = await self._probe()
        if problem is None:
            self.arrived()
        elif self._last_arrival == silent_since:
            self._give_up(problem)
        self._probing = None
        self._look_in(self._seconds)
