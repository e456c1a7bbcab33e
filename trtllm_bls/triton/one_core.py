"""The threads of one interpreter, kept on one core while that core has little other work.

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

# Share of a core's time that others may take; at more, the threads leave for a core with less. If
# there is none, they stay until the core is full, and then run on any.
_OTHERS_LOAD, _FULL = 0.3, 0.9
_CLAIM = "\0trtllm-bls core"  # an abstract socket's name, before the core's number


class OneCore:
    """Keeps ``threads`` (native ids) on one core, which ``check`` chooses.
    Each process of a network namespace claims its own, since the core of an idle one looks free.
    Raises ``OSError`` where /proc/stat cannot be read.
    """

    def __init__(self, threads: Iterable[int]) -> None:
        self._threads = list(threads)
        self._all = os.sched_getaffinity(0)
        self._before, self._own_before = core_ticks(), time.process_time()
        self._claim: socket.socket | None = None
        self.core: int | None = None  # None: any

    def check(self) -> None:
        """Choose by the load since the last check; call it once a second. Raises ``OSError``."""
        now, own = core_ticks(), time.process_time()
        shares = {}
        for core in self._all & now.keys() & self._before.keys():
            busy, all_ = now[core][0] - self._before[core][0], now[core][1] - self._before[core][1]
            if all_ == 0:  # a tick takes 10 ms
                return
            shares[core] = busy / all_
            if core == self.core:
                full = shares[core] >= _FULL
                shares[core] -= (own - self._own_before) * os.sysconf("SC_CLK_TCK") / all_
        self._before, self._own_before = now, own
        if self.core in shares and shares[self.core] < _OTHERS_LOAD:
            return
        # Low cores serve most interrupts: with 128 requests at once, TTFT is 14 ms longer there.
        for core in sorted(shares, key=lambda core: (round(shares[core], 1), -core)):
            if shares[core] < _OTHERS_LOAD and self._claims(core):
                self._pin(core, {core})
                return
        if self.core is not None and (self.core not in shares or full):
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
        """Claim ``core`` in place of the present one; false if another process has it."""
        claim = socket.socket(socket.AF_UNIX)  # the kernel removes it with its process
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
    """Time at work, and all time, of each core since its start; stolen time counts as work."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(number) for number in numbers[:8]]  # the others are contained in these
            idle, waiting = ticks[3:5]
            found[int(name[3:])] = (sum(ticks) - idle - waiting, sum(ticks))
    return found
