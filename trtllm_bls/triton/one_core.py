"""A pin that keeps an interpreter's threads on one core while that core has little other work.

Python's threads run one at a time. On several cores, each handover of the GIL wakes a core whose
caches hold nothing of the work, so a token costs more CPU there (docs/measurements.md, "Where its
threads run"). Threads that work without the GIL, such as a tokeniser's, run on any core.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# The share of a core's time that other programs may take. When they take more, the threads move to
# a core with less load. If there is none, they stay until the core is full, and then run on any.
_MAX_OTHER_LOAD = 0.3
_FULL_LOAD = 0.9
_CLAIM = "\0trtllm-bls core"  # an abstract socket's name, before the core's number


class OneCore:
    """Keeps ``threads`` (native ids) on one core, which ``check`` chooses.

    The core of an idle process looks free, so each process of a network namespace claims its core.
    Raises ``OSError`` if /proc/stat cannot be read.
    """

    def __init__(self, threads: Iterable[int]) -> None:
        self._threads = list(threads)
        self._all = os.sched_getaffinity(0)
        self._ticks = core_ticks()
        self._cpu_seconds = time.process_time()
        self._claim: socket.socket | None = None
        self.core: int | None = None  # None: any core

    def check(self) -> None:
        """Choose by the load since the last check; call it once a second. Raises ``OSError``."""
        ticks = core_ticks()
        cpu_seconds = time.process_time()
        loads = {}  # the share of each core's time that other programs take
        is_full = False
        for core in self._all & ticks.keys() & self._ticks.keys():
            busy = ticks[core][0] - self._ticks[core][0]
            total = ticks[core][1] - self._ticks[core][1]
            if total == 0:  # the last check was less than a tick ago (10 ms)
                return
            loads[core] = busy / total
            if core == self.core:
                is_full = loads[core] >= _FULL_LOAD
                own_ticks = (cpu_seconds - self._cpu_seconds) * os.sysconf("SC_CLK_TCK")
                loads[core] -= own_ticks / total
        self._ticks = ticks
        self._cpu_seconds = cpu_seconds
        if self.core in loads and loads[self.core] < _MAX_OTHER_LOAD:
            return
        # Low cores serve most interrupts: with 128 requests at once, TTFT is 14 ms longer there.
        for core in sorted(loads, key=lambda core: (round(loads[core], 1), -core)):
            if loads[core] < _MAX_OTHER_LOAD and self._claims(core):
                self._pin(core, {core})
                return
        if self.core is not None and (self.core not in loads or is_full):
            self.close()
            self._pin(None, self._all)

    def free_this_thread(self) -> None:
        """Let the calling thread run on any core, for good."""
        os.sched_setaffinity(0, self._all)

    def close(self) -> None:
        """Let another process have the core."""
        if self._claim is not None:
            self._claim.close()

    def _claims(self, core: int) -> bool:
        """Claim ``core`` in place of the current one. Returns False if another process has it."""
        claim = socket.socket(socket.AF_UNIX)  # the kernel releases the name with the process
        try:
            claim.bind(f"{_CLAIM} {core}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self.close()
        self._claim = claim
        return True

    def _pin(self, core: int | None, cores: set[int]) -> None:
        self.core = core
        for thread in self._threads:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cores)


def core_ticks() -> dict[int, tuple[int, int]]:
    """Return the busy and the total ticks of each core since its start.

    Time that a hypervisor stole counts as busy.
    """
    cores = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(field) for field in fields[:8]]  # the further fields are parts of these
            idle = ticks[3]
            iowait = ticks[4]
            cores[int(name[3:])] = (sum(ticks) - idle - iowait, sum(ticks))
    return cores
