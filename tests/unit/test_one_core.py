"""Threads on one core, chosen by what the cores do; the threads and their affinity are real."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import pytest

from tests.helpers.children import Child
from tests.helpers.waiting import join
from trtllm_bls.triton import one_core as module
from trtllm_bls.triton.one_core import OneCore, core_ticks

CORES = sorted(os.sched_getaffinity(0))
SECOND = os.sysconf("SC_CLK_TCK")
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="one core: a machine with two cores runs it")


class Machine:
    """Cores whose work is told second by second, and a process's part of it."""

    def __init__(self) -> None:
        self.ticks = dict.fromkeys(CORES, (0, 0))
        self.own = 0.0

    def second(self, work: dict[int, float], own: float = 0.0) -> None:
        """``work``: the share of this second that each core works; others do all the time."""
        for core, (busy, all_) in self.ticks.items():
            done = round(work.get(core, 1.0) * SECOND)
            self.ticks[core] = (busy + done, all_ + SECOND)
        self.own += own


class Sleeper:
    """A thread that waits."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._over.wait, daemon=True)
        self.thread.start()

    @property
    def id(self) -> int:
        assert self.thread.native_id is not None
        return self.thread.native_id

    @property
    def cores(self) -> set[int]:
        return os.sched_getaffinity(self.id)

    def end(self) -> None:
        self._over.set()
        join(self.thread)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(module, "core_ticks", lambda: dict(made.ticks))
    monkeypatch.setattr(time, "process_time", lambda: made.own)
    return made


@pytest.fixture
def sleepers() -> Iterator[list[Sleeper]]:
    with ExitStack() as stack:
        made = [Sleeper() for _ in range(2)]
        for each in made:
            stack.callback(each.end)
        yield made


class Processes:
    """Makes what each process of a test would have; no other test's is in their way."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing

    def start(self, threads: Iterable[int] = ()) -> OneCore:
        made = OneCore(threads)
        self._closing.callback(made.close)
        return made


@pytest.fixture
def processes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setattr(module, "_CLAIM", f"\0test {uuid.uuid4()}")
    with ExitStack() as closing:
        yield Processes(closing)


@pytest.fixture
def one_core(processes: Processes, sleepers: list[Sleeper]) -> OneCore:
    return processes.start([each.id for each in sleepers])


@needs_two
def test_threads_run_on_the_core_with_least_work(
    machine: Machine, one_core: OneCore, sleepers: list[Sleeper]
) -> None:
    assert [each.cores for each in sleepers] == [set(CORES)] * 2  # until the first check
    machine.second({CORES[0]: 0.25, CORES[1]: 0.1})
    one_core.check()
    assert one_core.core == CORES[1]
    assert [each.cores for each in sleepers] == [{CORES[1]}] * 2
    assert os.sched_getaffinity(0) == set(CORES)  # a thread that was not named


@needs_two
@pytest.mark.parametrize(
    ("share", "own", "elsewhere", "then"),
    [
        (1.0, 0.75, 0.0, CORES[0]),  # full, nearly all of it ours
        (0.6, 0.1, 0.2, CORES[-1]),  # half of it others', who leave another core alone
        (1.0, 0.0, 0.2, CORES[-1]),
        (0.8, 0.1, 0.4, CORES[0]),  # others are everywhere, and here is room
        (1.0, 0.1, 0.4, None),
    ],
)
def test_a_core_is_left_where_much_of_it_is_work_of_others(
    machine: Machine,
    one_core: OneCore,
    share: float,
    own: float,
    elsewhere: float,
    then: int | None,
) -> None:
    machine.second({CORES[0]: 0.0})
    one_core.check()
    assert one_core.core == CORES[0]
    machine.second({CORES[0]: share, CORES[-1]: elsewhere}, own)
    one_core.check()
    assert one_core.core == then


@needs_two
def test_where_no_core_is_free_threads_run_on_any_until_one_is(
    machine: Machine, one_core: OneCore, sleepers: list[Sleeper]
) -> None:
    machine.second({CORES[0]: 0.0})
    one_core.check()
    machine.second({})
    one_core.check()
    assert one_core.core is None
    assert sleepers[0].cores == set(CORES)
    machine.second({CORES[0]: 0.3})
    one_core.check()
    assert one_core.core is None
    machine.second({CORES[0]: 0.2})
    one_core.check()
    assert sleepers[0].cores == {CORES[0]}


@needs_two
def test_a_thread_that_frees_itself_stays_free(
    machine: Machine, one_core: OneCore, sleepers: list[Sleeper]
) -> None:
    seen: list[set[int]] = []

    def tokenise() -> None:
        os.sched_setaffinity(0, {CORES[0]})  # as inherited from its starter
        one_core.free_this_thread()
        machine.second({CORES[0]: 0.0})
        one_core.check()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=tokenise, daemon=True)
    thread.start()
    join(thread)
    assert sleepers[0].cores == {CORES[0]}
    assert seen == [set(CORES)]


@needs_two
def test_processes_that_check_at_the_same_time_take_different_cores(
    machine: Machine, processes: Processes
) -> None:
    """All cores are free when a server starts, so the load alone would give all the same one."""
    several = [processes.start() for _ in CORES]
    machine.second(dict.fromkeys(CORES, 0.02) | {CORES[0]: 0.0})
    for process in several:
        process.check()
    assert {process.core for process in several} == set(CORES)


@needs_two
def test_a_core_is_kept_by_one_process_until_that_leaves(
    machine: Machine, processes: Processes
) -> None:
    """Idle processes see each other's cores as free; under load they would share one."""
    idle = dict.fromkeys(CORES, 0.0)
    several = [processes.start() for _ in range(len(CORES) + 1)]
    machine.second(idle)
    for process in several:
        process.check()
    first, waiting = several[0], several[-1]
    kept = first.core
    assert kept is not None
    assert {process.core for process in several[:-1]} == set(CORES)
    assert waiting.core is None
    machine.second(idle | {kept: 1.0})
    for process in (first, waiting):
        process.check()
    assert (first.core, waiting.core) == (None, None)  # all other cores are taken
    machine.second(idle)
    waiting.check()
    assert waiting.core == kept
    waiting.close()
    machine.second(idle)
    first.check()
    assert first.core == kept


def test_a_process_that_is_killed_leaves_its_core(machine: Machine, processes: Processes) -> None:
    """Nothing of it stays on the disk, so nobody has to clean up."""
    idle = dict.fromkeys(CORES, 0.0)
    code = (
        "import sys, time; from trtllm_bls.triton import one_core\n"
        "ticks = iter([{core: (0, all_) for core in eval(sys.argv[1])} for all_ in (0, 100)])\n"
        "one_core.core_ticks = lambda: next(ticks); one_core._CLAIM = '\\0' + sys.argv[2]\n"
        "taken = one_core.OneCore([]); taken.check()\n"
        "print(taken.core, flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(CORES), module._CLAIM[1:]]
    with Child(words) as other:
        taken = int(other.output.next())
        late = [processes.start() for _ in CORES]
        machine.second(idle)
        for process in late:
            process.check()
        assert {process.core for process in late} == {*CORES, None} - {taken}
    machine.second(idle)
    for process in late:
        process.check()
    assert {process.core for process in late} == set(CORES)


def test_threads_that_have_ended_do_no_harm(machine: Machine, processes: Processes) -> None:
    ended = Sleeper()
    ended.end()
    machine.second({CORES[0]: 0.0})
    one_core = processes.start([ended.id])
    machine.second({CORES[0]: 0.0})
    one_core.check()
    assert one_core.core == CORES[0]


def test_two_checks_within_a_tick_change_nothing(machine: Machine, one_core: OneCore) -> None:
    machine.second({CORES[0]: 0.0})
    one_core.check()
    one_core.check()
    assert one_core.core == CORES[0]


def test_the_systems_own_figures() -> None:
    """Every core that we may use is told, and no core works longer than it runs."""
    ticks = core_ticks()
    assert set(CORES) <= ticks.keys()
    assert all(0 <= busy <= all_ for busy, all_ in ticks.values())
