"""When nothing arrives from a server although requests run: ask whether it is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_LOOKS = 4  # in the time of a stall; an arrival resets their count, which costs no clock

log = logging.getLogger(__name__)


class StallWatch:
    """Asks ``probe`` once nothing has arrived for ``seconds`` (0 = never) while ``busy``, at most a
    quarter of that time later.

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
        self._silent_looks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None

    def arrived(self) -> None:
        """Something has arrived."""
        self._silent_looks = 0

    def begin(self) -> None:
        """A request has begun."""
        if self._timer is None and self._probing is None and self._seconds:
            self.arrived()
            self._look_later()

    def close(self) -> None:
        """Watch no longer."""
        for pending in (self._timer, self._probing):
            if pending is not None:
                pending.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / _LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._busy():
            return
        self._silent_looks += 1
        if self._silent_looks <= _LOOKS:  # the first may come right after an arrival
            self._look_later()
        else:
            self._probing = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        problem = await self._probe()
        if problem is None:
            self.arrived()
        elif self._silent_looks:  # nothing has arrived meanwhile
            self._give_up(problem)
        self._probing = None
        self._silent_looks = 0
        self._look_later()
