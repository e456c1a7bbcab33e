"""Child processes: started, ready, ended, and started again when they fail.

``Child`` is a process: its output line by line, its readiness, its end within a limit.
``keep_running`` starts again, with back-off, whatever fails once it was ready. ``serve`` keeps its
server and all that belongs to it running so, ``HttpProcess`` the HTTP program before the server.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from trtllm_bls.errors import SetupError
from trtllm_bls.types import Backoff

# Seconds beyond a server's own exit timeout, for unloading models.
GRACE_MARGIN = 10.0

_POLL_S = 0.05
# Seconds before a process is started again. After a run of ``_GOOD_RUN_S`` the pauses begin anew.
_RESTART_S = Backoff(1.0, 30.0)
_GOOD_RUN_S = 60.0


class ProcessStopped(SetupError):
    """The process was asked to stop before it was ready."""


# --- one process ----------------------------------------------------------------------------


class Child(subprocess.Popen[bytes]):
    """A process called ``title``, and a thread that calls ``on_line`` with each line of its output.

    One of ``streams`` is a pipe, which is the output. The process has a session of its own, so that
    Ctrl-C reaches only the launcher, which passes it on. Only its owner may read the files that it
    makes, through which prompts and answers pass.
    """

    def __init__(
        self,
        title: str,
        command: list[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], object],
        **streams: Any,
    ) -> None:
        super().__init__(command, env=environment, start_new_session=True, umask=0o077, **streams)
        self._title = title
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, name=f"{title}: log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        output = self.stdout or self.stderr
        assert output is not None
        with output:
            for line in output:
                # The terminal may be gone or the disk full; rich turns a broken pipe into
                # SystemExit. If this thread ended, the process would block on its next line.
                with suppress(OSError, SystemExit):
                    self._on_line(line.decode("utf-8", "replace").rstrip("\n"))

    def read_to_end(self, limit_s: float) -> None:
        """Wait until all output has been handed on, at most ``limit_s`` seconds.

        A process that outlives the child may hold the output open.
        """
        self._reader.join(limit_s)

    def wait_until(
        self,
        is_ready: Callable[[], bool],
        limit_s: float,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when it is ready.

        Raises ``SetupError`` if it ends or takes longer than ``limit_s`` seconds, and
        ``ProcessStopped`` if it is to stop meanwhile.
        """
        deadline = time.monotonic() + limit_s
        while not is_ready():
            if is_stopping():
                raise ProcessStopped(f"stopped before {self._title} was ready")
            code = self.poll()
            if code is not None:
                raise SetupError(f"{self._title} did not start ({describe_exit(code)})")
            if time.monotonic() > deadline:
                raise SetupError(f"{self._title} did not answer within {limit_s:g} s")
            time.sleep(_POLL_S)

    def end(self, limit_s: float) -> None:
        """Ask it to end, and kill it if that takes longer than ``limit_s`` seconds."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.wait(limit_s)
        self.kill()
        self.wait()


def describe_exit(code: int) -> str:
    """Put an exit code, 128 + n or -n for signal n, into words, with the usual cause of a kill."""
    number = code - 128
    if code < 0:
        number = -code
    if number not in set(signal.Signals):
        return f"exit code {code}"
    if number == signal.SIGKILL:
        return "SIGKILL, perhaps out of memory"
    return signal.Signals(number).name


# --- started again --------------------------------------------------------------------------

Result = TypeVar("Result", covariant=True)


class Restartable(Protocol[Result]):
    """A process, or several that run together, which ``keep_running`` starts again."""

    def start(self) -> None:
        """Start the process, and return when it is ready.

        Raises ``SetupError``, as ``ProcessStopped`` if the process is to stop.
        """

    def wait(self) -> Result:
        """Return when the process has ended as requested. Raises ``SetupError`` if it failed."""

    def discard(self) -> None:
        """End the process at once, in whatever state it is."""

    def is_stopping(self) -> bool:
        """Return true once the process is to stop and not to be started again."""

    def on_failure(self, error: SetupError, pause_s: float) -> None:
        """Note that the process has failed, and starts again after a pause."""

    def on_recovery(self, away_s: float) -> None:
        """Note that the process is ready again, ``away_s`` seconds after its failure."""


def keep_running(process: Restartable[Result], restarts: bool) -> Result:
    """Start ``process``, which is ready now, again whenever it fails, with back-off.

    Return when it has ended as requested. Raises ``SetupError`` if it failed and ``restarts`` is
    false, and ``ProcessStopped`` if it is to stop before it is ready again.
    """
    ready_at = time.monotonic()
    pause_s = 0.0
    while True:
        try:
            return process.wait()
        except SetupError as error:
            failure: SetupError | None = error
        failed_at = time.monotonic()
        if failed_at - ready_at >= _GOOD_RUN_S:
            pause_s = 0.0
        while failure is not None:
            process.discard()
            if not restarts or isinstance(failure, ProcessStopped):
                raise failure
            pause_s = _RESTART_S.after(pause_s)
            process.on_failure(failure, pause_s)
            failure = _start_after(process, pause_s)
        ready_at = time.monotonic()
        process.on_recovery(ready_at - failed_at)


def _start_after(process: Restartable[Any], pause_s: float) -> SetupError | None:
    """Start the process after a pause; return the reason if it does not get ready."""
    resumes_at = time.monotonic() + pause_s
    while time.monotonic() < resumes_at:
        if process.is_stopping():
            return ProcessStopped("stopped before it was started again")
        time.sleep(_POLL_S)
    try:
        process.start()
    except SetupError as error:
        return error
    return None
