"""The threads of one interpreter, kept on one core while that core has little other work.

Python's threads run one at a time. On several cores each handover of the interpreter's lock wakes
another core, whose caches hold nothing of the work: it then takes a seventh to a third more CPU
(docs/performance.md). What works without the lock, as a tokeniser's threads, stays free.
"""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

# A core is left where other work than ours takes so large a share of its time, for one where it
# takes less, or for any core if there is none and this one is full.
_OTHERS, _FULL = 0.3, 0.9

# Of each core since the machine's start, in ticks: its time at work, and all its time.
Ticks = dict[int, tuple[int, int]]


class OneCore:
    """Keeps ``threads`` (native ids) and what they start on one core at a time, by ``look``.

    ``first``: the number of the core to begin with where several are equally free; processes that
    start together should each have their own. ``ticks`` and ``own_seconds`` are read at each
    look: what the cores have done, and what this process has. Each core is kept by one process at
    most of those that give the same name for ``claims`` and share a network namespace. Raises
    ``OSError`` where the system tells neither.
    """

    def __init__(
        self,
        threads: Iterable[int],
        first: int = 0,
        ticks: Callable[[], Ticks] | None = None,
        own_seconds: Callable[[], float] = time.process_time,
        claims: str = "trtllm-bls",
    ) -> None:
        self._threads = list(threads)
        self._all = os.sched_getaffinity(0)
        # Memory that has been touched is near the cores of the package that we run on.
        here = _topology(_current_core(), "physical_package_id")
        near = [c for c in self._all if _topology(c, "physical_package_id") == here]
        near.sort(key=lambda c: (_is_second_half(c), c))  # two halves of one core are far apart
        first %= len(near)
        self._near = near[first:] + near[:first]
        self._ticks, self._own_seconds = ticks or core_ticks, own_seconds
        self._before, self._own_before = self._ticks(), own_seconds()
        self._claims = claims
        self._claim: socket.socket | None = None
        self.core: int | None = None  # None: any

    def look(self) -> None:
        """Choose again by the work since the last look; to be called about once a second.

        Raises ``OSError``.
        """
        shares, others = self._work()
        if not shares:  # no tick has passed
            return
        if others.get(self.core, 1.0) < _OTHERS:
            return
        free = [core for core in self._near if others.get(core, 1.0) < _OTHERS]
        free.sort(key=lambda core: round(others[core], 1))
        if free and self.core is not None and random.random() < 0.5:
            return  # a process of another container may leave now, and for the same core
        if any(map(self._keep_on, free)) or self.core is None:
            return
        if shares.get(self.core, 1.0) >= _FULL:
            self._keep_on(None)

    def close(self) -> None:
        """Let another process have the core."""
        if self._claim is not None:
            self._claim.close()

    def _work(self) -> tuple[dict[int | None, float], dict[int | None, float]]:
        """The share of its time that each core has worked since the last look, and what of it is
        not ours where we stay on that core."""
        now, own = self._ticks(), self._own_seconds()
        shares: dict[int | None, float] = {}
        lengths: dict[int | None, float] = {}
        for core, (busy, all_) in now.items():
            busy_before, before = self._before.get(core, (busy, all_))
            if all_ > before:
                shares[core] = (busy - busy_before) / (all_ - before)
                lengths[core] = (all_ - before) / os.sysconf("SC_CLK_TCK")
        others = dict(shares)
        if self.core in shares:
            ours = (own - self._own_before) / lengths[self.core]
            others[self.core] = max(0.0, shares[self.core] - ours)
        self._before, self._own_before = now, own
        return shares, others

    def free_this_thread(self) -> None:
        """Let the calling thread run on any core, for good."""
        os.sched_setaffinity(0, self._all)

    def _keep_on(self, core: int | None) -> bool:
        """Whether it is done: a core that another process keeps is not taken. ``None``: any core.

        Looks alone do not tell who has a core: an idle process's seems free, and both would find
        out under load. The claim is a socket's address without a file: it is given up with the
        process, however that ends.
        """
        claim = socket.socket(socket.AF_UNIX)
        try:
            if core is not None:
                claim.bind(f"\0{self._claims} core {core}")
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        self.close()
        followers = () if self.core is None else _threads_on(self.core)
        self.core, self._claim = core, claim
        for thread in {*self._threads, *followers}:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, self._all if core is None else {core})
        return True


def _threads_on(core: int) -> list[int]:
    """Threads of this process that may only run there, as those do that were started by others."""
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            if os.sched_getaffinity(thread) == {core}:
                found.append(thread)
    return found


def core_ticks() -> Ticks:
    """From /proc/stat, where a virtual machine's stolen time is work of others."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(number) for number in numbers[:8]]  # what follows is in them already
            found[int(name[3:])] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))  # idle, waiting
    return found


def _current_core() -> int:
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[36])


def _is_second_half(core: int) -> bool:
    """Whether it shares its execution units with another one of a lower number."""
    halves = re.match(r"\d+", _topology(core, "thread_siblings_list"))
    return halves is not None and int(halves[0]) < core


def _topology(core: int, name: str) -> str:
    """What the system tells of a core; nothing where it does not."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/{name}").read_text().strip()
    except OSError:
        return ""
