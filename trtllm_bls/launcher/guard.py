"""The server's parent: nothing outlives it, whoever dies first. Run as a script, never imported.

    python -I -S guard.py '{"command": [...], "workdir": ..., "shared_memory": ..., "grace": 35}'

Standard input is a lifeline from the launcher: ``s`` asks the server to stop (it drains what
runs), ``k`` kills it, end of file means that the launcher is gone and counts as ``s``. After the
server, whatever it started is killed, its shared memory and the working directory are removed,
and the exit code is the server's (128 + n for signal n).

Why a process of its own: the launcher may be killed at any moment, the kernel's parent-death
signal reaches only direct children and is tied to the starting *thread*, and a stub that hangs
does not notice that its server has died.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP, KILL = b"s", b"k"
_libc = ctypes.CDLL(None, use_errno=True)


def main(command: list[str], workdir: str, shared_memory: str, grace: float) -> int:
    """Run the command to its end; ``grace`` seconds after being asked to stop it is killed."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned stubs become our children
    wake = _wake_on_signals()
    lifeline, devnull = os.dup(0), os.open(os.devnull, os.O_RDWR)
    server = subprocess.Popen(
        command, stdin=devnull, start_new_session=True, preexec_fn=_die_with_parent
    )
    # Only the server and its stubs may hold the log pipe: its end is how the launcher knows.
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    code = _watch(server, lifeline, wake, grace)
    _kill_children()
    remove_traces(Path(workdir), shared_memory)
    return code if code >= 0 else 128 - code


def _wake_on_signals() -> int:
    """A descriptor that becomes readable, with the signal's number, at SIGCHLD or a stop."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return reader


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _watch(server: subprocess.Popen[bytes], lifeline: int, wake: int, grace: float) -> int:
    """Wait for the server's end, passing on what the lifeline and signals ask for."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(wake, select.POLLIN)
    deadline: float | None = None
    while server.poll() is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = dict(poll.poll(None if left is None else left * 1000))
        wishes = b""
        if lifeline in ready:
            received = os.read(lifeline, 64)
            if not received:
                poll.unregister(lifeline)
            wishes += received or STOP
        if wake in ready and set(os.read(wake, 64)) - {signal.SIGCHLD}:
            wishes += STOP
        if KILL in wishes or not ready:
            server.kill()
            deadline = None
        elif STOP in wishes and deadline is None:
            server.terminate()
            deadline = time.monotonic() + grace
    return server.returncode


def _kill_children() -> None:
    """Kill and bury every process that the server left; orphans have become ours."""
    while True:
        for child in _children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            # "pid (name) state ppid ...", where the name may hold anything
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def remove_traces(workdir: Path, shared_memory: str) -> None:
    """Remove the working directory and the shared memory; ``shared_memory`` is a path prefix."""
    shutil.rmtree(workdir, ignore_errors=True)
    prefix = Path(shared_memory)
    for region in prefix.parent.glob(prefix.name + "*"):
        region.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
