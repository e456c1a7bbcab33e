"""Output whose reader stops, leaves, or has a full disk."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.packages import needs
from tests.helpers.ports import ANY_PORTS
from tests.helpers.waiting import exit_code, join, until
from trtllm_bls.orchestrator.output import (
    QueuedStream,
    checked_output,
    gap_text,
    queued_output,
    write_all,
)

ROOT = Path(__file__).parents[2]
SECONDS = 60


class Pipe:
    """A pipe whose reader reads when it is told to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def read_until(self, stream: QueuedStream) -> str:
        """Read until ``stream`` has written all."""
        parts: list[bytes] = []
        reader = threading.Thread(target=self._read, args=(parts,), daemon=True)
        reader.start()
        assert stream.drain(SECONDS)
        self.close_writing()
        join(reader)
        return b"".join(parts).decode()

    def read(self) -> str:
        """Read what was written, which must fit into the pipe."""
        self.close_writing()
        parts: list[bytes] = []
        self._read(parts)
        return b"".join(parts).decode()

    def _read(self, parts: list[bytes]) -> None:
        while part := os.read(self.reading, 65536):
            parts.append(part)

    def close_writing(self) -> None:
        with suppress(OSError):
            os.close(self.writing)
        self.writing = -1

    def close(self) -> None:
        self.close_writing()
        with suppress(OSError):
            os.close(self.reading)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_a_reader_that_stops_holds_up_nobody_and_learns_what_it_missed(pipe: Pipe) -> None:
    """Dropped lines are counted, and told at their place, once the reader goes on."""
    stream = QueuedStream(pipe.writing, limit=300_000)
    lines = [f"{number:099}\n" for number in range(20_000)]  # 2 MB: more than pipe and queue hold
    for line in lines:
        stream.write(line)
    assert stream.dropped > 10_000
    received = pipe.read_until(stream).splitlines(keepends=True)
    place = 0
    count = 0
    for line in received:
        if "dropped" in line:
            count += int(line.split()[0])
            place += int(line.split()[0])
        else:
            assert line == lines[place]
            place += 1
    assert (place, count) == (len(lines), stream.dropped)


def test_a_write_that_fits_again_comes_after_the_gap(pipe: Pipe) -> None:
    """One line tells of several writes that were dropped, however many lines each had."""
    stream = QueuedStream(pipe.writing, limit=200_000)
    stream.write("a" * 150_000 + "\n")  # The pipe takes 64 KiB of it.
    stream.write("b" * 100_000 + "\n")
    stream.write("c\n" * 100_000)
    stream.write("d\n")
    assert pipe.read_until(stream).splitlines() == ["a" * 150_000, gap_text(100_001), "d"]


def test_a_reader_that_left_is_told_of_once_and_never_raised(pipe: Pipe) -> None:
    """The lines count as dropped."""
    failures: list[OSError] = []
    stream = QueuedStream(pipe.writing, on_failure=failures.append)
    os.close(pipe.reading)
    for number in range(1, 4):
        stream.write("line\n")
        assert stream.drain(SECONDS)
        assert stream.dropped == number
    assert [type(failure) for failure in failures] == [BrokenPipeError]


def test_a_descriptor_that_another_process_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    """Terminals and pipes are shared, and so is this flag of theirs."""
    os.set_blocking(pipe.writing, False)
    stream = QueuedStream(pipe.writing)
    text = "".join(f"{number}\n" for number in range(50_000))
    stream.write(text)
    assert pipe.read_until(stream) == text
    assert stream.dropped == 0


def test_a_forked_process_writes_with_a_thread_of_its_own(pipe: Pipe) -> None:
    """The parent's thread, and what waits for it, stay with the parent."""
    stream = QueuedStream(pipe.writing)
    stream.write("p" * 100_000)  # The parent's thread is in the middle of this write.
    until(lambda: os.read(pipe.reading, 1))
    child = os.fork()
    if child == 0:
        reading, writing = os.pipe()
        os.dup2(writing, pipe.writing)
        stream.write("from the child\n")
        is_written = stream.drain(SECONDS)
        os._exit(0 if is_written and os.read(reading, 99) == b"from the child\n" else 1)
    assert exit_code(child) == 0
    assert pipe.read_until(stream) == "p" * 99_999


def test_prints_loggers_and_consoles_of_a_block_are_queued(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to a standard stream later finds the queued one."""
    import click
    from rich.console import Console

    with os.fdopen(os.dup(pipe.writing), "w") as original:
        monkeypatch.setattr(sys, "stderr", original)
        with queued_output("stderr"):
            queued = sys.stderr
            assert isinstance(queued, QueuedStream)
            print("printed", file=sys.stderr)
            click.echo("echoed", err=True)
            Console(stderr=True).print("shown")
            assert queued.drain(SECONDS)
        assert sys.stderr is original
        write_all(original.fileno(), b"")
    assert pipe.read().splitlines() == ["printed", "echoed", "shown"]


# --- commands -------------------------------------------------------------------------------


def run(words: str, redirection: str) -> tuple[int, str]:
    """Exit code and standard error of a command in a shell."""
    line = f"{sys.executable} -m trtllm_bls.cli {words} {redirection}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    return done.returncode, done.stderr


FULL = ">/dev/full"
COMMANDS = ["--help", "--version", "serve --help", "doctor --model-repository models", "health"]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_result_that_cannot_be_written_is_one_line(words: str) -> None:
    """Whatever the command found: who reads the exit code must not take nothing for a result."""
    line = "error: cannot write the output: No space left on device\n"
    assert run(words, FULL) == (1, line)


@pytest.mark.parametrize("words", COMMANDS[:2])
def test_a_result_whose_reader_has_left_is_one_line(words: str) -> None:
    """As for a full disk."""
    script = (
        "import os, subprocess, sys; reading, writing = os.pipe(); os.close(reading); "
        f"sys.exit(subprocess.run({[sys.executable, '-m', 'trtllm_bls.cli', *words.split()]!r}, "
        "stdout=writing).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: Broken pipe\n")


@needs("pytriton")
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """For instance a link that leads to itself."""
    link = tmp_path / "loop"
    link.symlink_to(link)
    code, errors = run(f"serve {shlex.join(ANY_PORTS)} --model {link}", "")
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith(f"error: --model {link}: ")


def test_a_program_in_a_terminal_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's ``input`` edits lines and takes pasted texts whole only with its own stream."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0), open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with checked_output():
            assert sys.stdout is terminal
        monkeypatch.undo()
