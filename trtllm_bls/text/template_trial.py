"""A trial of a chat template, at load, in a child process with limits on CPU time and memory.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from everything but
time and memory, so one that needs too much of them for a short conversation is refused before it
meets a request. A template may still do so for some conversations alone: the operator who serves a
checkpoint trusts its author not to have written such a one.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

CPU_S = 2
MEMORY_BYTES = 256 << 20
_WAIT_S = 20.0  # for a child that uses no CPU, as after a fork of a process with many threads
_NO_MEMORY = 3  # exit code of the child

log = logging.getLogger(__name__)


def problem_of(render: Callable[[], object]) -> str | None:
    """Return the problem of a template that ``render`` runs; ``None`` without one.

    An error that ``render`` raises is no problem: a template may refuse a conversation. If the
    trial cannot be made, the log says so.
    """
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads. The child runs the template and ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except OSError as error:
        log.warning("the chat template is not tried out: %s", error)
        return None
    if not child:
        _run_and_exit(render)
    try:
        status = _wait(child)
    except OSError as error:  # This kernel has no pidfd, or signals of children are ignored.
        log.warning("the chat template is not tried out: %s", error)
        return None
    if status is None:
        log.warning("the chat template is not tried out: its trial did not end in %g s", _WAIT_S)
        return None
    if status == 0:
        return None
    memory = f"{MEMORY_BYTES >> 20} MiB"
    return f"takes more than {CPU_S} s of CPU or {memory} for a short conversation"


def _run_and_exit(render: Callable[[], object]) -> None:
    """Run ``render`` within the limits and end this process, which is the child."""
    status = 0
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        address_space = pages * resource.getpagesize() + MEMORY_BYTES
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, CPU_S)
        _limit(resource.RLIMIT_AS, address_space)
        render()
    except MemoryError:
        status = _NO_MEMORY
    except BaseException:
        status = 0
    finally:
        os._exit(status)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _wait(child: int) -> int | None:
    """Return the child's status, or kill it and return ``None`` where it does not end in time."""
    descriptor = os.pidfd_open(child)
    try:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        has_ended = end.poll(_WAIT_S * 1000)
        if not has_ended:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    _, status = os.waitpid(child, 0)
    return status if has_ended else None
