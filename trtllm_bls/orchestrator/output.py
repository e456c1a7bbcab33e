"""Standard streams and log files whose readers may stop, leave, or have a full disk.

Two rules, one stream for each. A process that serves or supervises never waits for whoever reads
its output: a pipe to a pager, a terminal after Ctrl-S and a stuck log driver all stop reading, and
a thread that then writes would hang with everything that it looks after. ``QueuedStream`` writes on
a thread of its own. A command whose output is its result (``doctor``, ``configure``) waits for its
reader, and output that cannot be written is its one error: ``CheckedStream``.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from trtllm_bls.errors import TrtllmBlsError

_LIMIT = 1 << 20  # characters that wait to be written
LAST_LINES_S = 2.0  # at the end of a command, for a reader that is slow
StreamName = Literal["stdout", "stderr"]


class OutputFailed(TrtllmBlsError):
    """Standard output cannot be written: its pipe is closed, or its disk is full."""


def gap_text(lines: int) -> str:
    """Say in a stream that lines are missing at this place."""
    return f"{lines} lines dropped: whoever reads this output was too slow"


# --- output that never blocks ---------------------------------------------------------------


@dataclass
class _Gap:
    """Lines that were dropped at this place of the queue."""

    lines: int


class QueuedStream(io.TextIOBase):
    """A text stream to ``descriptor`` whose ``write`` neither waits nor raises.

    Text waits in a queue of ``limit`` characters. A write that does not fit is dropped whole; a
    line (``gap_text``) tells so at its place, and ``dropped`` counts the lines. So does text that
    the descriptor refuses. ``on_failure`` gets the error then, once until a write succeeds again;
    it is called on the writing thread.

    Each thread and signal handler may write. The writing thread runs only while text waits, so that
    a process without output has no thread when it forks.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(
        self,
        descriptor: int,
        *,
        encoding: str = "utf-8",
        limit: int = _LIMIT,
        on_failure: Callable[[OSError], object] = lambda error: None,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.gap_text = gap_text
        self.dropped = 0
        self._descriptor = descriptor
        self._limit = limit
        self._on_failure = on_failure
        self._has_failed = False
        self._begin()
        _queued_streams.add(self)

    def _begin(self) -> None:
        # A signal handler may write while the thread that it interrupts holds this lock, so the
        # lock is reentrant (``Condition`` makes an ``RLock``).
        self._changed = threading.Condition()
        self._queue: deque[str | _Gap] = deque()
        self._waiting = 0  # characters in the queue
        self._is_writing = False

    def write(self, text: str) -> int:
        """Queue ``text`` or drop it; return its length."""
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")
        with self._changed:
            if self._waiting + len(text) <= self._limit:
                self._queue.append(text)
                self._waiting += len(text)
            else:
                self._drop(text)
            if not self._is_writing:
                self._is_writing = self._start_thread()
        return len(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written, or lost; false if that takes longer than ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_writing, seconds)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def _drop(self, text: str) -> None:
        lines = text.count("\n") or 1
        self.dropped += lines
        if not self._queue or not isinstance(self._queue[-1], _Gap):
            self._queue.append(_Gap(0))
        gap = self._queue[-1]
        assert isinstance(gap, _Gap)
        gap.lines += lines

    def _start_thread(self) -> bool:
        try:
            threading.Thread(target=self._write_queue, name="output", daemon=True).start()
        except RuntimeError:  # The machine has no thread left, or the interpreter ends.
            return False
        return True

    def _write_queue(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                entry = self._queue.popleft()
            text = f"{self.gap_text(entry.lines)}\n" if isinstance(entry, _Gap) else entry
            try:
                write_all(self._descriptor, text.encode(self.encoding, self.errors))
            except OSError as error:
                if not isinstance(entry, _Gap):
                    with self._changed:
                        self.dropped += text.count("\n") or 1
                if not self._has_failed:
                    self._has_failed = True
                    self._on_failure(error)
            else:
                self._has_failed = False
            # Only now there is room again: a text that is being written takes room, too.
            if not isinstance(entry, _Gap):
                with self._changed:
                    self._waiting -= len(text)

    def _forget_thread(self) -> None:
        """Begin anew in a child process, which has a copy of the lock and not the thread."""
        self._begin()


def write_all(descriptor: int, data: bytes) -> None:
    """Write ``data``, also where another process has made the descriptor non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select((), (descriptor,), ())


_queued_streams: weakref.WeakSet[QueuedStream] = weakref.WeakSet()


def _forget_threads() -> None:
    for stream in _queued_streams:
        stream._forget_thread()


os.register_at_fork(after_in_child=_forget_threads)


@contextmanager
def queued_output(*names: StreamName) -> Iterator[None]:
    """Make ``sys.stdout``, ``sys.stderr`` or both a ``QueuedStream`` in this block.

    What waits at the end has two seconds to be written. A stream without a descriptor, as tests
    have, stays as it is. Output that fails is one line on standard error.
    """
    with ExitStack() as stack:
        for name in names:
            original = getattr(sys, name)
            descriptor = _descriptor_of(original)
            if descriptor is None or isinstance(original, QueuedStream):
                continue

            def tell(error: OSError, name: str = name) -> None:
                line = f"{name} cannot be written and misses lines: {error.strerror}\n"
                if name != "stderr" and sys.stderr is not None:
                    sys.stderr.write(line)

            with suppress(OSError):
                original.flush()
            queued = QueuedStream(descriptor, on_failure=tell)
            stack.callback(setattr, sys, name, original)
            stack.callback(queued.drain, LAST_LINES_S)
            setattr(sys, name, queued)
        yield


def drain_output(seconds: float = LAST_LINES_S) -> None:
    """Give each queued standard stream at most ``seconds`` to be written."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, QueuedStream):
            stream.drain(seconds)


def dropped_lines() -> dict[str, int]:
    """Return the number of lines that each standard stream of this process has dropped."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    counts = {}
    for name, stream in streams.items():
        counts[name] = 0
        if isinstance(stream, QueuedStream):
            counts[name] = stream.dropped
    return counts


# --- output that is a result ----------------------------------------------------------------


class CheckedStream(io.TextIOWrapper):
    """A text stream that raises ``OutputFailed`` where the system refuses what is written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputFailed(f"cannot write the output: {error.strerror}") from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputFailed(f"cannot write the output: {error.strerror}") from error


@contextmanager
def checked_output() -> Iterator[None]:
    """Make ``sys.stdout`` a ``CheckedStream`` in this block, and write all of it at the end.

    A terminal keeps the interpreter's own stream: ``input`` edits lines, and takes a pasted text as
    a whole, only while ``sys.stdout`` has descriptor 1. A terminal has no disk that may be full.

    Raises ``OutputFailed``, also where the block ends by another exception.
    """
    original = sys.stdout
    descriptor = _descriptor_of(original)
    is_replaced = isinstance(original, CheckedStream | QueuedStream)
    if descriptor is None or is_replaced or os.isatty(descriptor):
        yield
        return
    duplicate = os.dup(descriptor)
    checked = CheckedStream(
        io.BufferedWriter(io.FileIO(duplicate, "wb")),
        encoding=original.encoding,
        errors=original.errors,
    )
    sys.stdout = checked
    try:
        try:
            yield
        finally:
            checked.flush()
    except OutputFailed:
        # What the buffer still holds would be refused again when the stream is closed.
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), duplicate)
        raise
    finally:
        sys.stdout = original
        checked.close()


def _descriptor_of(stream: object) -> int | None:
    """Return the descriptor behind a standard stream; ``None`` if there is none."""
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
