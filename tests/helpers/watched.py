"""tritonservers that tests share: one that ends unasked says so, and is started anew once.

A fixture opens its server with ``watched``. ``conftest.py`` calls ``check`` around each test that
uses the fixture. The first test that meets an ended server fails with the server's exit status and
last lines. The next tests get a new server on the same ports. When that one ends too, the remaining
tests are errors that name the test in which it ended.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from tests.helpers import children
from tests.helpers.waiting import until
from trtllm_bls.errors import SetupError
from trtllm_bls.operate.logs import LogLine
from trtllm_bls.operate.tritonserver import Listener, ServerFailed, TritonServer
from trtllm_bls.settings.command_options import ServeSettings

_LAST_LINES = 300  # the stacks of a process have more than a hundred
_ENDING_S = 1.0  # from a client's error to the end of the process
_NOTICED_S = 20.0  # from the end of tritonserver to the end of its guard


def end_of(server: TritonServer) -> bool:
    """Wait for the end of a server, as its ``wait`` does; fail if it does not end in time."""
    until(lambda: not server.running, tells=lambda: "the server runs on")
    return server.wait()


class ServerEnded(AssertionError):
    """A server that tests share is not there."""


class RecentLines(Listener):
    """Keeps the last lines of a server's log."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)

    def log(self, line: LogLine) -> None:
        """Keep the line."""
        self.lines.append(line.raw)

    def warning(self, text: str) -> None:
        """Keep what the launcher says."""
        self.lines.append(f"launcher: {text}")


@dataclass
class Watched:
    """A running server, and the names of the fixtures whose tests need it."""

    server: TritonServer
    fixtures: frozenset[str]
    recent: RecentLines
    ends: list[str] = field(default_factory=list)  # ids of the tests that met its end

    def has_ended(self, suspected: bool) -> bool:
        """True if the server has ended.

        ``suspected``: a test has just failed. If the server ends, its launcher knows that a moment
        later.
        """
        if suspected and self.server.running:
            process = self.server.process
            try:
                if process is not None:
                    process.wait(_ENDING_S)
            except psutil.TimeoutExpired:
                return False
            until(lambda: not self.server.running, _NOTICED_S)
        return not self.server.running

    def restart(self, test: str) -> str:
        """Describe the end and start the server anew, if it is the first time."""
        self.ends.append(test)
        try:
            self.server.wait()
            how = "it was asked to stop"
        except ServerFailed as error:
            how = str(error)
        lines = "\n".join(self.recent.lines)
        self.server.discard()
        if len(self.ends) == 1:
            with children.kept():
                self.server.start()
        return f"{self.name}: {how}; its last lines:\n{lines}"

    @property
    def name(self) -> str:
        """Title of the server in messages."""
        return f"the server of the fixture {'/'.join(sorted(self.fixtures))}"


_watched: list[Watched] = []


@contextmanager
def watched(
    settings: ServeSettings, *fixtures: str, recent: RecentLines | None = None
) -> Iterator[TritonServer]:
    """Run a server for the tests that use one of ``fixtures``; the settings name all ports.

    ``recent``: a listener of the caller's, for tests that read more of the log. If a process of the
    server crashes, be it at its end, the last of the tests has an error.
    """
    recent = recent or RecentLines()
    server = TritonServer(settings, recent)
    try:
        server.start()
    except SetupError as error:
        lines = "\n".join(recent.lines)
        raise ServerEnded(f"{error}; its last lines:\n{lines}") from error
    entry = Watched(server, frozenset(fixtures), recent)
    _watched.append(entry)
    try:
        yield server
    finally:
        _watched.remove(entry)
        server.stop()
    lines = "\n".join(recent.lines)
    assert children.CRASH not in lines, f"a process of {entry.name} crashed:\n{lines}"


def check(test: str, fixtures: Collection[str], failed: bool = False) -> None:
    """Raise ``ServerEnded`` if a server of these fixtures has ended."""
    for entry in _watched:
        if entry.fixtures.isdisjoint(fixtures):
            continue
        if len(entry.ends) > 1:
            raise ServerEnded(f"{entry.name} is gone: it ended in {' and in '.join(entry.ends)}")
        if entry.has_ended(suspected=failed):
            raise ServerEnded(entry.restart(test))


def logs(fixtures: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield a title and the last lines of each server of these fixtures, and of a test's own."""
    for entry in _watched:
        if not entry.fixtures.isdisjoint(fixtures):
            yield f"log of {entry.name}", "\n".join(entry.recent.lines)
    shared = {id(entry.server) for entry in _watched}
    for server in gc.get_objects():
        if type(server) is TritonServer and id(server) not in shared:
            yield "log of a server of the test", "\n".join(server._book.tail(_LAST_LINES))
