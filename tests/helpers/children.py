"""Programs that tests start: their output is read at once, and shown if the test fails.

``conftest.py`` asks this module which programs ran during a failed test, and which ones a test left
behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

ROOT = Path(__file__).parents[2]
LINE_S = 240.0  # a server needs this long where other tests keep the machine busy
END_S = 60.0
CRASH = "Fatal Python error: Segmentation fault"  # as a Python process says with faulthandler
SHOWN_LINES = 60
SHOWN_CHARACTERS = 8_000


class Lines:
    """Lines of a pipe, up to its end. A thread reads them, so that the program never waits."""

    def __init__(self, pipe: IO[str], name: str = "a program") -> None:
        self.name = name
        self.lines: list[str] = []
        self._pipe = pipe
        self._unread: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self.lines.append(line)
                self._unread.put(line)
        self._unread.put(None)

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        try:
            line = self._unread.get(timeout=LINE_S)
        except Empty:
            raise AssertionError(
                f"waited {LINE_S:.0f} s for a line of {self.name}; so far:\n{self.tail()}"
            ) from None
        if line is None:
            self._unread.put(None)
            raise StopIteration
        return line

    def next(self) -> str:
        """Return the next line, empty at the end, as ``readline`` does."""
        return next(self, "")

    def wait_for(self, word: str) -> str:
        """Return the first further line with ``word``."""
        for line in self:
            if word in line:
                return line
        raise AssertionError(f"{self.name} ended without {word!r}; its lines:\n{self.tail()}")

    def rest(self) -> str:
        """Return all that is still to come, up to the end."""
        return "".join(self)

    def text(self) -> str:
        """Return all lines so far, read by the test or not, without waiting."""
        return "".join(self.lines)

    def tail(self) -> str:
        """Return the last lines, read by the test or not, without waiting."""
        return "".join(self.lines[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]


class Child:
    """A program in a session of its own, with both of its outputs read.

    Used as a context manager it is killed at the end, if it still runs.
    """

    def __init__(self, words: Sequence[str | Path], name: str = "", **options: Any) -> None:
        self.words = [str(word) for word in words]
        self.name = name or " ".join(self.words)[:100]
        options = {"cwd": ROOT, "start_new_session": True} | options
        self.process = subprocess.Popen(
            self.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.output = Lines(self.process.stdout, self.name)
        self.errors = Lines(self.process.stderr, f"{self.name} (stderr)")
        _children.append(self)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
        assert CRASH not in self.errors.text(), self.report()

    @property
    def pid(self) -> int:
        """Process id, of the child alone while nobody has waited for its end."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self.process.poll() is None

    def end(self, seconds: float = END_S) -> int:
        """Return the exit code, once it has ended by itself."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"waited {seconds:.0f} s for the end of {self.name}; {self.report()}"
            ) from None

    def terminate(self, seconds: float = END_S) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        return self.end(seconds)

    def kill(self) -> None:
        """Kill it, if it still runs, and wait for that."""
        if self.running:
            self.process.kill()
            self.end()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def report(self) -> str:
        """Describe its state and its last lines."""
        code = self.process.poll()
        state = "runs" if code is None else f"ended with {code}"
        parts = [f"{self.name} {state}"]
        for title, lines in (("stdout", self.output), ("stderr", self.errors)):
            if text := lines.tail():
                parts.append(f"--- {title} ---\n{text}")
        return "\n".join(parts)


_children: list[Child] = []
remarks: list[str] = []  # said at the end of a run: failures of others' programs that cost no test


def forget_ended_children() -> None:
    """Keep only those that still run; call it before a test."""
    _children[:] = [child for child in _children if child.running]


def reports() -> Iterator[tuple[str, str]]:
    """Yield a title and the output of each program that ran during the test."""
    for child in _children:
        yield f"output of {child.name}", child.report()


# --- processes, whoever started them ----------------------------------------------------------

_kept: set[int] = set()
# Python's own helper processes, which stay until the interpreter ends.
_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pids_of_children() -> set[int]:
    """Return the ids of this process's child processes, ended or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none, as mostly; the look below takes 2 ms
        return set()
    pids: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", "rb", buffering=0) as children:
                pids.update(map(int, children.read().split()))
        except OSError:  # the thread has ended
            continue
    return pids


def _scanned_children() -> set[int]:
    """Return what ``pids_of_children`` does, by a look at all processes.

    Linux may leave children out of its own list while others of them end.
    """
    own = str(os.getpid())
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if parent == own:
            pids.add(int(stat.parent.name))
    return pids


@contextmanager
def kept() -> Iterator[None]:
    """Let the child processes that are started here outlive the test."""
    before = _scanned_children()
    yield
    _kept.update(_scanned_children() - before)


def end_leftovers(before: set[int]) -> list[str]:
    """Kill the children that are neither in ``before`` nor kept; return their command lines."""
    left = []
    for pid in pids_of_children() - before - _kept:
        if command := _kill(pid, lambda directory: True):
            left.append(command)
    return left


def end_marked(mark: str) -> list[str]:
    """Kill the processes with ``mark`` (``NAME=value``) in their environment, but this one."""
    wanted = mark.encode()
    left = []
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        if pid != os.getpid() and (command := _kill(pid, _has_variable(wanted))):
            left.append(command)
    return left


def _has_variable(variable: bytes) -> Callable[[Path], bool]:
    def has(directory: Path) -> bool:
        return variable in (directory / "environ").read_bytes().split(b"\0")

    return has


def _command_line(directory: Path) -> str:
    """Return a process's words; empty for one that has ended.

    Linux shows none for a moment in which a program takes the place of another, too: its parent
    goes on before that is over.
    """
    limit = time.monotonic() + 5
    while not (words := (directory / "cmdline").read_bytes()):
        state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        if state in "ZX" or time.monotonic() > limit:
            return ""
        time.sleep(0.001)
    return words.replace(b"\0", b" ").decode(errors="replace")


def _kill(pid: int, condition: Callable[[Path], bool]) -> str:
    """Kill a process and return its command line; empty if it had ended or is not meant.

    The descriptor belongs to this process even if another one gets its number.
    """
    directory = Path("/proc", str(pid))
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return ""
    try:
        if not condition(directory):
            return ""
        command = _command_line(directory)
        is_python_helper = any(name in command for name in _OF_PYTHON)
        if not command or is_python_helper:
            return ""
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return f"{pid}: {command.strip()}"
