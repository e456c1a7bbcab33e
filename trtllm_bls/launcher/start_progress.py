"""Is a server that starts still getting anywhere?

Loading a model uses CPU, reads files or writes lines of log. A server that waits for a stub which
it has failed to notice does none of these, for ever.
"""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

STUCK_S = 90.0
# Per look: an idle server with idle stubs uses about a thousandth of a core.
LEAST_CPU_SHARE = 0.01
LEAST_BYTES = 2**20
LOOK_S = 5.0


class StartProgress:
    """Fed with looks at a server; ``stuck`` once nothing has moved for ``stuck_s`` seconds."""

    def __init__(self, stuck_s: float = STUCK_S, look_s: float = LOOK_S) -> None:
        self.stuck = False
        self.stuck_s = stuck_s
        self._look_s = look_s
        self._moved_at = self._looked_at = time.monotonic()
        self._cpu, self._bytes, self._lines = 0.0, 0, 0

    def look(self, server: psutil.Process | None, lines: int) -> None:
        """Now and then compare with the look before; ``lines`` of log have come so far."""
        now = time.monotonic()
        if now - self._looked_at >= self._look_s:
            self.take(now, *_used(server), lines)

    def take(self, now: float, cpu: float, bytes_read: int, lines: int) -> None:
        """The totals at a moment: CPU seconds and bytes read of all its processes, log lines."""
        share = (cpu - self._cpu) / max(now - self._looked_at, 1e-9)
        moved = share >= LEAST_CPU_SHARE or bytes_read - self._bytes >= LEAST_BYTES
        if moved or lines > self._lines:
            self._moved_at = now
        self._looked_at, self._cpu, self._bytes, self._lines = now, cpu, bytes_read, lines
        self.stuck = now - self._moved_at >= self.stuck_s


def _used(server: psutil.Process | None) -> tuple[float, int]:
    """CPU seconds and bytes read by a process and all that came from it."""
    cpu, bytes_read = 0.0, 0
    with suppress(psutil.Error):
        for process in [] if server is None else [server, *server.children(recursive=True)]:
            with suppress(psutil.Error):  # gone meanwhile, or not ours to ask
                times = process.cpu_times()
                cpu += times.user + times.system
                bytes_read += process.io_counters().read_chars
    return cpu, bytes_read
