"""The server's parent: nothing of the server outlives it. Run as a script, never imported.

    python -I -S guard.py '{"command": [...], "workdir": ..., "status": ...,
                            "shared_memory": ..., "mark": "NAME=value", "drain": 30, "grace": 40}'

Standard input is the control pipe from the launcher: ``s`` asks the server to stop (running
requests may end), ``k`` kills it, end of file means that the launcher has died and counts as ``s``.
Before the server gets SIGTERM, the processes that write into the directory ``status`` are asked to
drain. After the server's end the guard kills the server's children and removes its shared memory.

If the launcher has died, nobody else ends the other processes that it started, such as the OpenAI
API. The guard knows them by ``mark``, a variable of their environment: they have ``drain`` seconds
more, then they are killed, and the working directory is removed. The exit code is the server's
(128 + n for signal n).

The guard is a process of its own for three reasons: the launcher may be killed at any moment; the
kernel's parent-death signal reaches only direct children, and comes also when just the *thread*
that started them ends; and a stub that hangs does not notice that its server has died.
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
from typing import Any

HAND_OVER_POLL_SECONDS = OTHERS_POLL_SECONDS = 0.05
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP, KILL = b"s", b"k"
_libc = ctypes.CDLL(None, use_errno=True)


def main(
    command: list[str],
    workdir: str,
    status: str,
    shared_memory: str,
    mark: str,
    drain: float,
    grace: float,
) -> int:
    """Run the command to its end.

    After a request to stop, running requests have ``drain`` seconds, and the command is killed
    after ``grace`` seconds.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned stubs become our children
    # A guard that is stopped (SIGSTOP) would not see that the launcher has died.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    wake = _wake_on_signals()
    control, devnull = os.dup(0), os.open(os.devnull, os.O_RDWR)
    server = subprocess.Popen(
        command, stdin=devnull, start_new_session=True, preexec_fn=_die_with_parent
    )
    # Only the server and its stubs may hold the log pipe: its end is how the launcher knows.
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    code = _watch(server, control, wake, _Stop(server, Path(status), drain, grace))
    _kill_children()
    launcher = select.poll()
    launcher.register(control, 0)  # reports the end of file alone
    launcher_died = bool(launcher.poll(0))
    if launcher_died:
        _end_others(mark, time.monotonic() + drain)
    remove_traces(Path(workdir) if launcher_died else None, shared_memory)
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


class _Stop:
    """An orderly end: models hand over, then the server is told to stop, in the end it is killed.

    Once a server has been told, models cannot send it requests any more, which those that
    speculate do all the time.
    """

    def __init__(
        self, server: subprocess.Popen[bytes], status: Path, drain: float, grace: float
    ) -> None:
        self._server = server
        self._files = _status_directory(status)
        self._drain, self._grace = drain, grace
        self._begun: float | None = None
        self._told = False

    def begin(self) -> None:
        """Does nothing the second time."""
        if self._begun is not None:
            return
        self._begun = time.monotonic()
        # A little sooner than the server breaks connections off, so that requests end in words.
        cut = self._begun + max(self._drain / 2, self._drain - 1.0)
        with suppress(OSError):  # no such directory: no model of this server drains
            self._files.ask_to_drain(cut)

    def step(self) -> float | None:
        """Do what is due; seconds until there may be more to do, ``None`` if nothing will."""
        if self._begun is None:
            return None
        now = time.monotonic()
        if now >= self._begun + self._grace:
            self._server.kill()
            return None
        if not self._told:
            if not self._files.handed_over and now < self._begun + self._drain / 2:
                return HAND_OVER_POLL_SECONDS
            self._server.terminate()
            self._told = True
        return self._begun + self._grace - now


def _status_directory(path: Path) -> Any:
    """A ``StatusDirectory``; an isolated interpreter does not find this package by itself."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from trtllm_bls.status import StatusDirectory

    return StatusDirectory(path)


def _watch(server: subprocess.Popen[bytes], control: int, wake: int, stop: _Stop) -> int:
    """Wait for the server's end, passing on what the control pipe and signals ask for."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while server.poll() is None:
        left = stop.step()
        ready = dict(poll.poll(None if left is None else left * 1000))
        commands = b""
        if control in ready:
            received = os.read(control, 64)
            if not received:
                poll.unregister(control)
            commands += received or STOP
        if wake in ready and set(os.read(wake, 64)) - {signal.SIGCHLD}:
            commands += STOP
        if KILL in commands:
            server.kill()
        elif STOP in commands:
            stop.begin()
    return server.returncode


def _kill_children() -> None:
    """Kill and reap every process that the server left; orphans have become ours."""
    while True:
        for child in _children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _end_others(mark: str, deadline: float) -> None:
    """Wait until no process has ``mark`` in its environment; kill those left at ``deadline``."""
    while others := marked(mark):
        if time.monotonic() >= deadline:
            for other in others:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
        time.sleep(OTHERS_POLL_SECONDS)


def marked(mark: str) -> list[int]:
    """The processes, except this one, whose environment has ``mark`` (``NAME=value``)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if os.fsencode(mark) in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return [process for process in found if process != os.getpid()]


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            # "pid (name) state ppid ...", where the name may be any bytes
            if int(entry.read_bytes().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def remove_traces(workdir: Path | None, shared_memory: str) -> None:
    """Remove the working directory and the shared memory; ``shared_memory`` is a path prefix."""
    if workdir is not None:
        shutil.rmtree(workdir, ignore_errors=True)
    prefix = Path(shared_memory)
    for region in prefix.parent.glob(prefix.name + "*"):
        region.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
