"""The server's process as the launcher sees it: a guard, its control pipe, and lines of log.

Owns the guard's start and end, and what all processes of ``serve`` share: the umask, the back-off
between restarts, exit codes in words. Knows nothing of models or readiness.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import IO

import psutil

from trtllm_bls.errors import SettingsError
from trtllm_bls.health.processes import SHARED_MEMORY
from trtllm_bls.launcher import guard
from trtllm_bls.launcher.workdir import is_plain
from trtllm_bls.status import CANARY_ID, StatusDirectory

# The umask of our processes: prompts and answers pass through their files.
PRIVATE = 0o077

# Seconds beyond the server's own exit timeout, for unloading models.
GRACE_MARGIN = 10.0

# The longest wait for killed processes to disappear, and for the log to end.
_FOREVER_S = 1e9
LAST_LINES_S = 5.0

# Before a restart. A server that was up for _HEALTHY_S begins with the first delay again.
_FIRST_DELAY_S, _LONGEST_DELAY_S, _HEALTHY_S = 1.0, 30.0, 60.0


class Scratch:
    """The files of one run, removed after it: a directory, and regions by their prefix."""

    def __init__(self) -> None:
        parent = gettempdir() if is_plain(gettempdir()) else "/tmp"
        self.workdir = Path(mkdtemp(prefix="trtllm-bls-", dir=parent))
        self.region_prefix = f"trtllm_bls_{uuid.uuid4().hex[:12]}_"
        self.regions = str(SHARED_MEMORY / self.region_prefix)
        self.canary_id = f"health-{uuid.uuid4().hex}"
        self.status = self.workdir / "status"  # see ``trtllm_bls.status``

    def keep_status(self, directory: str) -> None:
        """Make the status directory, which may be the user's, and remove an earlier server's files
        from it. Raises ``SettingsError``."""
        if directory:
            self.status = Path(directory).absolute()
        try:
            self.status.mkdir(parents=True, exist_ok=True)
            StatusDirectory(self.status).clear()
        except OSError as error:
            raise SettingsError(f"status_dir {self.status}: {error.strerror}") from error

    def hide_regions(self) -> None:
        """Take the regions from other users. Triton's Python backend (boost) makes them 0644,
        whatever the umask is."""
        for region in SHARED_MEMORY.glob(f"{self.region_prefix}*"):
            with suppress(FileNotFoundError):
                region.chmod(0o600)

    def remove(self) -> None:
        """Remove all of it."""
        guard.remove_traces(self.workdir, self.regions)


class GuardedProcess:
    """A command run under the guard; ``on_line`` gets every line that it prints, on a thread.

    ``stop`` and ``kill`` do not wait. Both may be called from a signal handler, and after the end.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        scratch: Scratch,
        exit_timeout: float,
        on_line: Callable[[str], None],
    ) -> None:
        self._scratch, self._workdir = scratch, str(scratch.workdir)
        order = {
            "command": command,
            "workdir": self._workdir,
            "status": str(scratch.status),
            "shared_memory": scratch.regions,
            "mark": f"{CANARY_ID}={scratch.canary_id}",
            "drain": exit_timeout,
            "grace": exit_timeout + GRACE_MARGIN,
        }
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment | {"TMPDIR": self._workdir},
            start_new_session=True,  # Ctrl-C is ours to pass on
            umask=PRIVATE,
        )
        assert self._guard.stdout
        self._reader = relay_lines(self._guard.stdout, on_line, "server-log")

    @property
    def running(self) -> bool:
        return self._guard.poll() is None

    @property
    def server(self) -> psutil.Process | None:
        """The command's own process; ``None`` before it started and after it ended."""
        with suppress(psutil.Error):
            children = psutil.Process(self._guard.pid).children()
            if children:  # the first; orphans of the server would be adopted later
                return min(children, key=psutil.Process.create_time)
        return None

    def stop(self) -> None:
        """Ask for an orderly end."""
        self._say(guard.STOP)

    def kill(self) -> None:
        """Ask for the end at once."""
        self._say(guard.KILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, 128 + n for signal n, once all output has been handed on.

        Raises ``subprocess.TimeoutExpired``.
        """
        # With a limit, Popen looks 20 times a second. Without one it blocks in the kernel, and a
        # signal that came just before, or that another thread took, is not handled until the end.
        code = self._guard.wait(_FOREVER_S if timeout is None else timeout)
        self._kill_what_is_left(code)
        self._reader.join(LAST_LINES_S)
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Wait for the end, which must have been requested, and remove the run's files."""
        if self._guard.stdin:
            self._guard.stdin.close()
        self.wait()
        self._scratch.remove()

    def _kill_what_is_left(self, code: int) -> None:
        """If the guard itself was killed, kill what the server left.

        Every process of the server has inherited the run's TMPDIR.
        """
        if code >= 0:
            return
        left = []
        for pid in guard.marked(f"TMPDIR={self._workdir}"):
            with suppress(psutil.Error):
                left.append(psutil.Process(pid))
                left[-1].kill()
        psutil.wait_procs(left, timeout=LAST_LINES_S)

    def _say(self, word: bytes) -> None:
        if self._guard.stdin and not self._guard.stdin.closed:
            with suppress(OSError):  # over already
                os.write(self._guard.stdin.fileno(), word)
        if self.running:  # a guard that is stopped (SIGSTOP) would not read the control pipe
            self._guard.send_signal(signal.SIGCONT)


def relay_lines(output: IO[bytes], on_line: Callable[[str], object], name: str) -> threading.Thread:
    """Start a thread that calls ``on_line`` with each line of ``output`` until its end."""

    def read() -> None:
        with output:
            for line in output:
                # The terminal may be gone or the disk full; rich turns a broken pipe into
                # SystemExit. If this thread ended, the process would block on its next line.
                with suppress(OSError, SystemExit):
                    on_line(line.decode("utf-8", "replace").rstrip("\n"))

    reader = threading.Thread(target=read, name=name, daemon=True)
    reader.start()
    return reader


class BackOff:
    """Seconds to wait before the next start: 1, 2, 4 ... 30."""

    def __init__(self) -> None:
        self._next = _FIRST_DELAY_S

    def delay(self, up_s: float) -> float:
        """The next delay; ``up_s`` is for how many seconds the server was up."""
        if up_s >= _HEALTHY_S:
            self._next = _FIRST_DELAY_S
        delay, self._next = self._next, min(2 * self._next, _LONGEST_DELAY_S)
        return delay


def describe_exit(code: int) -> str:
    """An exit code, 128 + n or -n for signal n, in words, with the usual cause of a kill."""
    code = 128 - code if code < 0 else code
    names = {128 + number: number.name for number in signal.Signals}
    if code not in names:
        return f"exit code {code}"
    name = names[code]
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name
