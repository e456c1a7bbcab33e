"""A trial of a chat template, at load, in a child process with limits on CPU time and memory.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from everything but
time and memory, so one that needs too much of them for a short conversation is refused before it
meets a request. A template may still do so for some conversations alone: the operator who serves a
checkpoint trusts its author not to have written such a one.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CPU_S = 2
MEMORY_BYTES = 256 << 20
_WAIT_S = 20.0  # in which a child uses no CPU, as after a fork of a process with many threads
_NO_MEMORY = 3  # exit code of the child
_PARALLELISM = "TOKENIZERS_PARALLELISM"
# gRPC's own handlers of a fork disturb the connections of the process that forks: 14 of 11,500 new
# ones failed or hung while it forked at 70 Hz, and none of 12,500 without the handlers (1.85). The
# child makes no calls, so our programs switch them off, which counts before the first channel.
NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}

log = logging.getLogger(__name__)


def problem_of(render: Callable[[], object]) -> str | None:
    """Return the problem of a template that ``render`` runs; ``None`` without one.

    An error that ``render`` raises is no problem: a template may refuse a conversation. If the
    trial cannot be made, the log says so.
    """
    status = _status_of(render)
    if status == -signal.SIGXCPU:
        return f"takes more than {CPU_S} s of CPU for a short conversation"
    if status == _NO_MEMORY:
        return f"takes more than {MEMORY_BYTES >> 20} MiB for a short conversation"
    if status:
        return f"crashes by {signal.Signals(-status).name} for a short conversation"
    return None


def _status_of(render: Callable[[], object]) -> int:
    """Return the exit code of a child that runs ``render``, or minus the signal that ended it.

    Zero also stands for a trial that could not be made.
    """
    try:
        with warnings.catch_warnings(), _no_warning_of_tokenizers():
            # Python 3.12 warns of a fork beside threads. The child runs the template and ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except OSError as error:
        log.warning("the chat template is not tried out: %s", error)
        return 0
    if not child:
        _run_and_exit(render)
    try:
        status = _wait(child)
    except OSError as error:  # This kernel has no pidfd, or signals of children are ignored.
        log.warning("the chat template is not tried out: %s", error)
        return 0
    if status is None:
        log.warning("the chat template is not tried out: its trial stood still for %g s", _WAIT_S)
        return 0
    return os.waitstatus_to_exitcode(status)


@contextmanager
def _no_warning_of_tokenizers() -> Iterator[None]:
    """Keep the ``tokenizers`` of transformers 4.51 and before from warning of a fork beside their
    threads. They are silent if the environment has the setting, whose default this is."""
    is_set = _PARALLELISM in os.environ
    os.environ.setdefault(_PARALLELISM, "true")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_PARALLELISM]


def _run_and_exit(render: Callable[[], object]) -> None:
    """Run ``render`` within the limits and end this process, which is the child."""
    # Garbage of the parent may need threads that this copy lacks: gRPC's channels wait for them.
    gc.disable()
    status = 0
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        address_space = pages * resource.getpagesize() + MEMORY_BYTES
        _limit(resource.RLIMIT_CORE, 0)
        # SIGXCPU comes at the first bound and says what it was; SIGKILL comes at the second.
        _limit(resource.RLIMIT_CPU, CPU_S, CPU_S + 1)
        _limit(resource.RLIMIT_AS, address_space)
        render()
    except MemoryError:
        status = _NO_MEMORY
    except BaseException:
        status = 0
    finally:
        os._exit(status)


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set both bounds, or lower ones where the process may have no more."""
    hard = soft if hard is None else hard
    highest = resource.getrlimit(kind)[1]
    if highest != resource.RLIM_INFINITY:
        hard = min(hard, highest)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _wait(child: int) -> int | None:
    """Return the child's status, or kill it and return ``None`` where it stands still."""
    descriptor = os.pidfd_open(child)
    try:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        ticks = 0
        has_ended = end.poll(_WAIT_S * 1000)
        while not has_ended and _cpu_ticks(child) > ticks:
            ticks = _cpu_ticks(child)
            has_ended = end.poll(_WAIT_S * 1000)
        if not has_ended:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    _, status = os.waitpid(child, 0)
    return status if has_ended else None


def _cpu_ticks(child: int) -> int:
    """Return the CPU time that a child has used, in ticks of the kernel's clock (10 ms)."""
    words = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])
