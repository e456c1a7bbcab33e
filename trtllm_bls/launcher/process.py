"""The child processes of ``serve``: how they are started, what they print, how they end.

``GuardedProcess`` is the server's: a guard, its control pipe, and lines of log. Knows nothing of
models or readiness.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import psutil

from trtllm_bls.launcher import guard
from trtllm_bls.launcher.preparation import Scratch
from trtllm_bls.status import CANARY_ID

# Seconds beyond the server's own exit timeout, for unloading models.
GRACE_MARGIN = 10.0

# The longest wait for killed processes to disappear, and for the log to end.
_LAST_LINES_S = 5.0
_FOREVER_S = 1e9


def start_child(
    command: list[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], object],
    name: str,
    **streams: Any,
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Start a process, and a thread ``name`` that calls ``on_line`` with each line of its output.

    The output is the one of ``streams`` that is a pipe. The process is in a session of its own, for
    Ctrl-C is the launcher's to pass on. Only its owner reads its files, through which prompts and
    answers pass.
    """
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, umask=0o077, **streams
    )
    output = process.stdout or process.stderr
    assert output is not None

    def read() -> None:
        with output:
            for line in output:
                # The terminal may be gone or the disk full; rich turns a broken pipe into
                # SystemExit. If this thread ended, the process would block on its next line.
                with suppress(OSError, SystemExit):
                    on_line(line.decode("utf-8", "replace").rstrip("\n"))

    reader = threading.Thread(target=read, name=name, daemon=True)
    reader.start()
    return process, reader


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
        self._scratch = scratch
        # Every process of the server inherits the run's TMPDIR.
        self._workdir = str(scratch.workdir)
        order = {
            "command": command,
            "workdir": self._workdir,
            "status": str(scratch.status),
            "shared_memory": scratch.regions,
            "mark": f"{CANARY_ID}={scratch.canary_id}",
            "drain": exit_timeout,
            "grace": exit_timeout + GRACE_MARGIN,
        }
        self._guard, self._reader = start_child(
            [sys.executable, "-I", "-S", guard.__file__, json.dumps(order)],
            environment | {"TMPDIR": self._workdir},
            on_line,
            "server-log",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

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

        If the guard itself was killed, this kills what the server left. Raises
        ``subprocess.TimeoutExpired``.
        """
        # With a limit, Popen looks 20 times a second. Without one it blocks in the kernel, and a
        # signal that came just before, or that another thread took, is not handled until the end.
        code = self._guard.wait(_FOREVER_S if timeout is None else timeout)
        if code < 0:
            left = []
            for pid in guard.marked(f"TMPDIR={self._workdir}"):
                with suppress(psutil.Error):
                    left.append(psutil.Process(pid))
                    left[-1].kill()
            psutil.wait_procs(left, timeout=_LAST_LINES_S)
        self._reader.join(_LAST_LINES_S)
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Wait for the end, which must have been requested, and remove the run's files."""
        if self._guard.stdin:
            self._guard.stdin.close()
        self.wait()
        self._scratch.remove()

    def _say(self, word: bytes) -> None:
        if self._guard.stdin and not self._guard.stdin.closed:
            with suppress(OSError):  # over already
                os.write(self._guard.stdin.fileno(), word)
        if self.running:  # a guard that is stopped (SIGSTOP) would not read the control pipe
            self._guard.send_signal(signal.SIGCONT)


def next_delay(last: float, up_s: float) -> float:
    """Seconds to wait before the next start: 1, 2, 4 ... 30, and 1 again after a minute's work.

    ``last``: the delay before, 0 for none; ``up_s``: for how many seconds the process was up.
    """
    return 1.0 if up_s >= 60.0 else min(max(1.0, 2 * last), 30.0)


def describe_exit(code: int) -> str:
    """An exit code, 128 + n or -n for signal n, in words, with the usual cause of a kill."""
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"exit code {code}"
    name = signal.Signals(number).name
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name
