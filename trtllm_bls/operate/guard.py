"""The server's parent: nothing of the server outlives it. Run as a script.

    python -I -S guard.py '{"workdir": ..., "shared_memory": ..., "mark": "NAME=value",
                            "drain": 30, "grace": 40}'

Standard input is the control pipe from the launcher. Its first line is the server to run, as JSON:
``{"command": [...], "environment": {...}, "status": ...}``. Then ``s`` asks the server to stop
(running requests may end), ``k`` kills it, end of file means that the launcher has died and counts
as ``s``.
Before the server gets SIGTERM, the processes that write into the directory ``status`` are asked to
drain. After the server's end the guard kills the server's children and removes its shared memory.

If the launcher has died, nobody else ends the other processes that it started, such as the OpenAI
API. The guard knows them by ``mark``, a variable of their environment: they have ``drain`` seconds
more, then they are killed, and the working directory is removed. The exit code is the server's
(128 + n for signal n).

The guard is there before the working directory is, so that a launcher may die while it prepares the
server. It also passes on the server's output, so that a launcher that is stopped holds up no server
that logs. It is a process of its own for three reasons: the launcher may be killed at any moment;
the kernel's parent-death signal reaches only direct children, and comes also when just the *thread*
that started them ends; and a stub that hangs does not notice that its server has died.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_bls.orchestrator.output import QueuedStream
    from trtllm_bls.orchestrator.status import StatusDirectory

POLL_SECONDS = 0.05
_WAITING_OUTPUT = 8 << 20  # bytes that the launcher has not read
_GUARD_LINES_S = 5.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP = b"s"
KILL = b"k"
_libc = ctypes.CDLL(None, use_errno=True)


def main(workdir: str, shared_memory: str, mark: str, drain: float, grace: float) -> int:
    """Run the server to its end.

    After a request to stop, running requests have ``drain`` seconds, and the server is killed after
    ``grace`` seconds.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned stubs become our children
    # A guard that is stopped (SIGSTOP) would not see that the launcher has died.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    # Becomes readable, with the signal's number, at SIGCHLD or a request to stop.
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    control = os.dup(0)
    with open(control, "rb", buffering=0, closefd=False) as pipe:  # no byte after the line
        order = pipe.readline()
    if not order.endswith(b"\n"):  # the launcher has died, or needs no server
        remove_traces(Path(workdir), shared_memory)
        return 0
    job = json.loads(order)
    devnull = os.open(os.devnull, os.O_RDWR)
    # The launcher may be stopped, and the server must not wait for it when it logs. So the guard
    # reads the server's output. It ends when the server and its stubs have, which alone hold it.
    output_read_end, output_write_end = os.pipe()
    server = subprocess.Popen(
        job["command"],
        env=job["environment"],
        stdin=devnull,
        stdout=output_write_end,
        stderr=output_write_end,
        start_new_session=True,
        preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    os.close(output_write_end)
    launcher_output = os.dup(1)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    # An isolated interpreter does not find this package by itself.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from trtllm_bls.orchestrator.output import QueuedStream
    from trtllm_bls.orchestrator.status import StatusDirectory

    output = QueuedStream(launcher_output, encoding="latin-1", limit=_WAITING_OUTPUT)
    forwarder = threading.Thread(target=_forward, args=(output_read_end, output))
    forwarder.start()
    status = StatusDirectory(job["status"])
    code = _watch(server, control, wake, status, drain, grace)
    _kill_children()
    forwarder.join()
    launcher = select.poll()
    launcher.register(control, 0)  # reports the end of file alone
    if launcher.poll(0):  # the launcher has died
        deadline = time.monotonic() + drain
        while any(marked(mark)):
            if time.monotonic() >= deadline:
                _kill_each(marked(mark))
            time.sleep(POLL_SECONDS)
        remove_traces(Path(workdir), shared_memory)
    else:
        remove_traces(None, shared_memory)
    if code < 0:
        return 128 - code
    return code


def _watch(
    server: subprocess.Popen[bytes],
    control: int,
    wake: int,
    files: StatusDirectory,
    drain: float,
    grace: float,
) -> int:
    """Wait for the server's end, and end it when the control pipe or a signal asks for that.

    In an orderly end the models hand over first. Once a server has been told to stop, its models
    cannot send it requests any more, which those that speculate do all the time.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    stop_at = math.inf  # the time of the request to stop
    is_terminated = False
    while server.poll() is None:
        now = time.monotonic()
        timeout_ms: float | None = None
        if now >= stop_at + grace:
            server.kill()
        elif now >= stop_at:
            if not is_terminated and (files.handed_over or now >= stop_at + drain / 2):
                server.terminate()
                is_terminated = True
            timeout_ms = POLL_SECONDS * 1000
            if is_terminated:
                timeout_ms = (stop_at + grace - now) * 1000
        ready = dict(poll.poll(timeout_ms))
        commands = b""
        if control in ready:
            commands = os.read(control, 64)
            if not commands:
                poll.unregister(control)
                commands = STOP
        if wake in ready and set(os.read(wake, 64)) - {signal.SIGCHLD}:
            commands += STOP
        if KILL in commands:
            server.kill()
        elif STOP in commands and stop_at == math.inf:
            stop_at = time.monotonic()
            # Requests are cut a little sooner than the server breaks connections off, so that they
            # end in words. Without the directory no model of this server drains.
            with suppress(OSError):
                files.ask_to_drain(stop_at + max(drain / 2, drain - 1.0))
    return server.returncode


def _forward(descriptor: int, output: QueuedStream) -> None:
    """Forward the server's lines until its end. Lines that the launcher does not read are lost."""
    with open(descriptor, "rb") as lines:
        for line in lines:
            output.write(line.decode("latin-1"))  # Each byte stays what it is.
    output.drain(_GUARD_LINES_S)


def _kill_children() -> None:
    """Kill and reap every process that the server left; orphans have become ours."""
    own_pid = b"%d" % os.getpid()

    def is_child(stat: bytes) -> bool:
        # "pid (name) state ppid ...", where the name may be any bytes
        _, _, fields = stat.rpartition(b")")
        return fields.split()[1] == own_pid

    while True:
        _kill_each(_processes("stat", is_child))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_each(pids: Iterable[int]) -> None:
    """Kill each process as soon as its id is yielded."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> Iterator[int]:
    """Yield the processes, except this one, whose environment has ``mark`` (``NAME=value``)."""
    variable = os.fsencode(mark)
    for pid in _processes("environ", lambda content: variable in content.split(b"\0")):
        if pid != os.getpid():
            yield pid


def _processes(file: str, matches: Callable[[bytes], bool]) -> Iterator[int]:
    """Yield the processes whose ``file`` in /proc has such content, each right after a look at it.

    Ids are given again within minutes on a busy machine, and a list of them would be old when its
    last one is used.
    """
    for entry in Path("/proc").glob(f"[0-9]*/{file}"):
        try:
            content = entry.read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if matches(content):
            yield int(entry.parent.name)


def remove_traces(workdir: Path | None, shared_memory: str) -> None:
    """Remove the working directory and the shared memory; ``shared_memory`` is a path prefix."""
    if workdir is not None:
        shutil.rmtree(workdir, ignore_errors=True)
    prefix = Path(shared_memory)
    for region in prefix.parent.glob(prefix.name + "*"):
        with suppress(OSError):  # it has gone, or another user has put it there
            region.unlink()


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
