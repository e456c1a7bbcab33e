"""CPU, memory and shared memory of a server's processes, from /proc while it works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

SAMPLE_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SERVER = "tritonserver"


def child_ids() -> set[int]:
    """Of all processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def cpu_seconds(ids: Iterable[int]) -> float:
    """User and system time of these processes so far, in ticks of the system."""
    return sum(_ticks(pid) for pid in ids) * _TICK_S


class Processes:
    """Processes by role, sampled until closed: the server below this process and its stubs by
    model, and those of ``others``."""

    def __init__(self, region_prefix: str, others: dict[str, list[int]] | None = None) -> None:
        self._prefix = region_prefix
        self.ids: dict[str, list[int]] = dict(others or {})
        for process in psutil.Process().children(recursive=True):
            role = _role(process)
            if role is not None:
                self.ids.setdefault(role, []).append(process.pid)
        self._times: list[int] = []
        self._ticks: dict[str, list[int]] = {role: [] for role in self.ids}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def cpu_seconds(self, roles: tuple[str, ...], begin: int, end: int) -> float:
        """CPU time of all processes of ``roles`` between two times in ns since the epoch."""
        times, total = list(self._times), 0.0
        for role in roles:
            ticks = self._ticks[role][: len(times)]
            at_end, at_begin = np.interp([end, begin], times, ticks)
            total += float(at_end - at_begin) * _TICK_S
        return total

    def largest_mb(self, roles: tuple[str, ...]) -> float:
        """Resident memory of the largest process of ``roles``."""
        ids = [pid for role in roles for pid in self.ids[role] if psutil.pid_exists(pid)]
        return max((psutil.Process(pid).memory_info().rss / 1e6 for pid in ids), default=0.0)

    def together_mb(self, role: str) -> float:
        """Memory of all processes of ``role``, of which what they share counts once."""
        ids = [pid for pid in self.ids[role] if psutil.pid_exists(pid)]
        return sum(psutil.Process(pid).memory_full_info().pss / 1e6 for pid in ids)

    def shared_mb(self) -> float:
        """What the server's regions take of /dev/shm."""
        regions = Path("/dev/shm").glob(f"{self._prefix}*")
        return sum(region.stat().st_blocks * 512 for region in regions) / 1e6

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._closing.wait(SAMPLE_S):
            for role, ids in self.ids.items():
                self._ticks[role].append(sum(_ticks(pid) for pid in ids))
            self._times.append(time.time_ns())


def _role(process: psutil.Process) -> str | None:
    """``tritonserver``, a model's name for its stubs, or nothing of ours."""
    command = process.cmdline()
    if not command:
        return None
    if Path(command[0]).name == "triton_python_backend_stub":
        return Path(command[1]).parents[1].name  # .../MODEL/1/model.py
    return _SERVER if Path(command[0]).name == _SERVER else None


def _ticks(pid: int) -> int:
    """User and system time; none once the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
