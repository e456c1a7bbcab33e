"""A server's processes and shared memory on this machine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")

# Children that the server needs and never restarts: the stubs of Python models, and the ranks of
# TensorRT-LLM's executor. Other processes that a model starts may come and go.
_NEEDED = re.compile(r"triton_python_backend_stub|trtllmExecutorWorker")


class ServerProcesses:
    """tritonserver and the children that it needs. Construct this once the models have loaded."""

    def __init__(self, server: psutil.Process) -> None:
        self._names = {server: "tritonserver"}
        for child in server.children():
            with suppress(psutil.Error):
                words = child.cmdline()
                if _NEEDED.search(" ".join(words[:1])):
                    # A stub's first argument is its model's file, .../<model>/<version>/model.py.
                    parts = Path(words[1]).parts if len(words) > 1 else ()
                    self._names[child] = f"model {parts[-3]}" if len(parts) > 2 else child.name()
        self._stopped: set[psutil.Process] = set()  # by a SIGSTOP, as of the last look
        self.running = {name: 0 for name in self._names.values()}
        """The number of running processes by name, as of the last ``problems()``."""

    def problems(self) -> tuple[str, ...]:
        """One line for each process that is dead or stopped.

        A process counts as stopped when two calls in a row find it so: a single look may fall into
        the moment between a SIGSTOP and the SIGCONT that follows it.
        """
        found, running = [], dict.fromkeys(self.running, 0)
        before, self._stopped = self._stopped, set()
        for process, name in self._names.items():
            state = _state(process)
            if state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
                found.append(f"the process of {name} is dead")
            elif state != psutil.STATUS_STOPPED:
                running[name] += 1
            else:
                self._stopped.add(process)
                if process in before:
                    found.append(f"the process of {name} is stopped")
        self.running = running
        return tuple(found)

    def without_descriptors(self) -> tuple[str, ...]:
        """One line for each process that can open no further file or connection."""
        found = []
        for process, name in self._names.items():
            with suppress(psutil.Error):
                used, limit = process.num_fds(), process.rlimit(psutil.RLIMIT_NOFILE)[0]
                if used >= limit >= 0:  # -1: without a limit
                    found.append(f"the process of {name} has used its {limit} file descriptors")
        return tuple(found)


def find_server(port: int) -> psutil.Process | None:
    """The tritonserver of this machine that listens on ``port``, if we may see it."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] != "tritonserver":
            continue
        with suppress(psutil.Error):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process
    return None


def free_shared_memory(directory: Path = SHARED_MEMORY) -> int | None:
    """Free bytes; ``None`` if the directory does not exist."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _state(process: psutil.Process) -> str:
    try:
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
