"""A server that starts: is every model ready, and if not, is it still getting anywhere?

The server listens only after all models have loaded, so progress comes from the log; that it
serves is believed when it says so over HTTP and its other two ports accept connections. Loading a
model uses CPU, reads files or writes lines of log; a server that waits for a stub which it has
failed to notice does none of these, for ever.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import quote

import psutil

from trtllm_bls.launcher.ports import Ports, ask

_ANSWER_S = 2.0
STUCK_S = 90.0
# Per look: an idle server with idle stubs uses about a thousandth of a core.
LEAST_CPU_SHARE = 0.01
LEAST_BYTES = 2**20
LOOK_S = 5.0


class Readiness:
    """``missing``: models that were not ready when last asked."""

    def __init__(self, ports: Ports, models: tuple[str, ...]) -> None:
        self.missing = list(models)
        self._ports = ports

    def complete(self) -> bool:
        """Ask about what is missing; whether nothing is, and every port takes connections."""
        ports = self._ports
        with suppress(OSError):
            while self.missing:
                url = f"{ports.http_url}/v2/models/{quote(self.missing[0])}/ready"
                if ask(url, _ANSWER_S)[0] != HTTPStatus.OK:
                    return False
                self.missing.pop(0)
            for address in ((ports.host, ports.grpc), (ports.plain_host, ports.metrics)):
                socket.create_connection(address, timeout=_ANSWER_S).close()
            return True
        return False


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
