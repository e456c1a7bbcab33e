"""What fails is started again, later each time; a child ends within its limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.helpers.waiting import until
from trtllm_bls.errors import SetupError
from trtllm_bls.operate import supervisor
from trtllm_bls.operate.supervisor import Child, ProcessStopped, keep_running


class Script:
    """A process that fails as ``runs`` says: after so many seconds, or at its start for ``None``.

    After the last one it ends as requested. Time is a number here.
    """

    def __init__(self, *runs: float | None) -> None:
        self.now = 1000.0
        self.runs = list(runs)
        self.starts: list[float] = []
        self.pauses: list[float] = []
        self.recoveries: list[float] = []
        self.discarded = 0
        self.failures: list[str] = []
        self.stops_after = -1

    def start(self) -> None:
        self.starts.append(round(self.now - 1000, 1))
        if self.runs and self.runs[0] is None:
            self.runs.pop(0)
            raise SetupError("no GPU")

    def wait(self) -> str:
        seconds = self.runs.pop(0) if self.runs else None
        if seconds is None:
            return "ended as requested"
        self.now += seconds
        raise SetupError(f"died after {seconds:g} s")

    def discard(self) -> None:
        self.discarded += 1

    def is_stopping(self) -> bool:
        return len(self.pauses) == self.stops_after

    def on_failure(self, error: SetupError, pause_s: float) -> None:
        self.failures.append(str(error))
        self.pauses.append(pause_s)

    def on_recovery(self, away_s: float) -> None:
        self.recoveries.append(round(away_s, 1))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def script(monkeypatch: pytest.MonkeyPatch, *runs: float | None) -> Script:
    process = Script(*runs)
    clock = SimpleNamespace(monotonic=lambda: process.now, sleep=process.sleep)
    monkeypatch.setattr(supervisor, "time", clock)
    return process


def test_restarts_come_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to half a minute; a process that was up for a while begins anew."""
    process = script(monkeypatch, *[59.9] * 7, 60, 0)
    assert keep_running(process, restarts=True) == "ended as requested"
    assert process.pauses == [1, 2, 4, 8, 16, 30, 30, 1, 2]
    assert process.discarded == 9


def test_a_process_that_does_not_start_again_is_left_more_and_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it has run. The time away counts from its first failure."""
    process = script(monkeypatch, 3600, None, None, None)
    keep_running(process, restarts=True)
    assert process.pauses == [1, 2, 4, 8]
    assert process.failures == ["died after 3600 s", *["no GPU"] * 3]
    assert process.recoveries == [15]


def test_a_stop_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not started again then, and nothing of it is left."""
    process = script(monkeypatch, 5, None)
    process.stops_after = 2
    with pytest.raises(ProcessStopped):
        keep_running(process, restarts=True)
    assert process.starts == [6]
    assert process.discarded == 3


def test_what_is_not_to_be_started_again_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure is the caller's, and nothing of it is left."""
    process = script(monkeypatch, 5)
    with pytest.raises(SetupError, match="died after 5 s"):
        keep_running(process, restarts=False)
    assert (process.starts, process.pauses, process.discarded) == ([], [], 1)


@contextmanager
def child(code: str, lines: list[str]) -> Iterator[Child]:
    command = [sys.executable, "-c", code]
    streams = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = Child("the program", command, os.environ, lines.append, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.read_to_end(60)


def test_a_child_that_ends_before_it_is_ready_says_how() -> None:
    """In words of its exit code; its last lines have been handed on."""
    lines: list[str] = []
    with child("print('no GPU'); raise SystemExit(3)", lines) as process:
        with pytest.raises(SetupError, match=r"^the program did not start \(exit code 3\)$"):
            process.wait_until(lambda: False, 60)
        process.read_to_end(60)
    assert lines == ["no GPU"]


def test_a_child_that_takes_too_long_says_so() -> None:
    """With the limit, in seconds."""
    with (
        child("import time; time.sleep(600)", []) as process,
        pytest.raises(SetupError, match=r"^the program did not answer within 0\.01 s$"),
    ):
        process.wait_until(lambda: False, 0.01)


def test_a_child_that_does_not_end_is_killed() -> None:
    """It has its limit first: one that ends by itself is not killed."""
    lines: list[str] = []
    ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)\n"
    with child(ignoring + "time.sleep(600)", lines) as process:
        until(lambda: lines)
        process.end(0.1)
        assert process.returncode == -signal.SIGKILL
    with child("import time; time.sleep(600)", lines) as process:
        process.end(60)
        assert process.returncode == -signal.SIGTERM
