"""Can the server serve? Observations of it, and the verdict on them.

``evaluate`` judges, ``Probe`` asks a server over gRPC, ``ServerProcesses`` looks at its processes
on this machine. ``serve`` does so continuously, ``trtllm-bls health`` once.

Load alone must never make a server unready, so a late answer does not count while anything makes
progress. Each door has a progress of its own, so that traffic through one does not hide that
another is stuck. Triton's door makes progress by a response of ``tensorrt_llm_bls``, by an answered
canary (a request for one token that the probe sends), or by a step of the engine while requests of
this door wait for it: requests that do not stream send nothing until they end. The HTTP program's
door makes progress by a response of a worker, or by an answer to a GET. A door is stuck only if it
has made no progress for the stall limit.

Some observations count at once, because load does not cause them: a dead or stopped process, a
model that is not loaded, a canary that fails twice, no shared memory or file descriptors left, and
an event loop that had no turn while another thread of its process had 60. Both threads wait for the
same cores, so the loop must be blocked.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import psutil

from trtllm_bls import errors
from trtllm_bls.client.client import BLS, Client, Tls
from trtllm_bls.settings.command_options import (
    GrpcAddress,
    TlsConnection,
    is_loopback,
    options_of,
)

SHARED_MEMORY = Path("/dev/shm")
# A process that waits for its parent to take its exit status, and what is left for a moment then.
ENDED_STATES = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_MIN_SHARED_MEMORY = 4 * 2**20  # bytes free
_CANARY_FAILURES = 2  # in a row; one may be an accident
_MISSED_TURNS = 60  # three seconds, or longer where there is load

# Children that the server needs and never restarts: the stubs of Python models, and the ranks of
# TensorRT-LLM's executor. Other processes that a model starts may come and go.
_NEEDED = re.compile(r"triton_python_backend_stub|trtllmExecutorWorker")

_WAIT4 = ("61", "260")  # the system call wait4, on x86-64 and on AArch64


# --- the verdict ----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Observed:
    """Observations of a server; ``None`` means not observed. Times are seconds of one clock.

    ``processes``: lines about dead or stopped processes. ``descriptors``: lines about processes
    without file descriptors; ``descriptors_at``: when every process last had some.
    ``progress_at``: the last sign that Triton's requests are answered: ``tensorrt_llm_bls`` sent a
    response or took a token, a canary was answered, or the engine made a step for such a request.
    ``http_at``: the last sign that the HTTP program answers: a response of it, or to a probe.
    ``loop_at``: the oldest last turn of any process's event loop; ``server_loop_at``: of those that
    only a restart of the server replaces. ``missed_turns``: the most turns that an event loop has
    missed (``status``). ``engine``: the problem that an engine reported
    about itself; ``engine_elsewhere``: no engine is in this server. ``canary_failures``: failures
    in a row.
    """

    processes: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()
    descriptors_at: float | None = None
    models: tuple[str, ...] = ()
    engine: str | None = None
    engine_elsewhere: bool = False
    progress_at: float | None = None
    http_at: float | None = None
    loop_at: float | None = None
    server_loop_at: float | None = None
    missed_turns: int = 0
    canary_failures: int = 0
    canary_error: str = ""
    shared_memory: int | None = None


@dataclass(frozen=True)
class Verdict:
    """``reasons`` why it is not ready, one line each; ``failed``: it will not recover by itself."""

    reasons: tuple[str, ...] = ()
    failed: bool = False

    @property
    def ready(self) -> bool:
        return not self.reasons


def evaluate(observed: Observed, now: float, stall_s: float = 30.0) -> Verdict:
    """Judge a server by observations of it; no I/O and no clock.

    A server without progress for ``stall_s`` is not ready. After twice as long it has failed,
    unless its engine is elsewhere, because a restart of the server would not restart the engine.
    One without file descriptors has also failed after twice ``stall_s``: it neither accepts nor
    refuses connections.
    """

    def since(moment: float | None) -> float:
        if moment is None:
            return 0.0
        return now - moment

    silent = since(observed.progress_at)
    http_silent = since(observed.http_at)
    stuck = since(observed.loop_at)
    reasons = [*observed.processes, *observed.descriptors]
    for model in observed.models:
        reasons.append(f"model {model} is not ready")
    if observed.engine:
        reasons.append(observed.engine)
    if observed.canary_failures >= _CANARY_FAILURES:
        reasons.append(f"a request for one token fails: {observed.canary_error}")
    if silent > stall_s:
        reasons.append(f"no response has left for {silent:.0f} s")
    if http_silent > stall_s:
        reasons.append(f"the HTTP program has answered nothing for {http_silent:.0f} s")
    if stuck > stall_s or observed.missed_turns >= _MISSED_TURNS:
        reasons.append(f"an event loop has been stuck for {stuck:.0f} s")
    free = observed.shared_memory
    if free is not None and free < _MIN_SHARED_MEMORY:
        reasons.append(f"/dev/shm is full: {free // 1024} KiB are free")
    # The longest standstill that a restart of the server would end.
    standstill = max(since(observed.server_loop_at), since(observed.descriptors_at))
    if not observed.engine_elsewhere:
        standstill = max(standstill, silent)
    failed = bool(observed.processes) or standstill > 2 * stall_s
    return Verdict(tuple(reasons), failed)


# --- observations ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Canary:
    """The result of a request for one token.

    ``answered``: a token, or a refusal that only a working server gives. ``full``: a refusal
    because the server has as many requests as it may, which does not show that they progress.
    ``late``: no answer in time. ``failed``: an error.
    """

    outcome: Literal["answered", "full", "late", "failed"]
    error: str = ""


class Probe(Client):
    """A client for health checks; ``canary_id`` is the id of its requests for a token.

    ``local``: the server is on this machine, so proxies in the environment are ignored.
    """

    def __init__(
        self,
        url: str,
        canary_id: str = "trtllm-bls-health",
        tls: Tls | None = None,
        *,
        local: bool = False,
    ) -> None:
        super().__init__(url, tls=tls)
        self._canary_id = canary_id
        if local:
            self._options.append(("grpc.enable_http_proxy", 0))

    async def models_not_ready(self, models: Iterable[str], timeout: float) -> tuple[str, ...]:
        """Return the ``models`` that are not ready.

        Raises ``ConnectionFailed`` without an answer.
        """
        names = list(models)
        try:
            answers = await asyncio.gather(*(self.model_ready(name, timeout) for name in names))
        except errors.DeadlineExceeded as error:
            raise errors.ConnectionFailed(f"{self.url}: {error}") from error
        return tuple(name for name, ready in zip(names, answers, strict=True) if not ready)

    async def canary(self, timeout: float) -> Canary:
        """Ask for one token; raises nothing."""
        try:
            await self.generate(
                BLS,
                text_input="Hello",
                max_tokens=1,
                stream=False,
                request_id=self._canary_id,
                deadline_s=timeout,
            )
        except errors.InvalidRequest:
            return Canary("answered")
        except (errors.ConnectionFailed, errors.DeadlineExceeded) as error:
            return Canary("late", str(error))
        except errors.Overloaded as error:  # or an engine that cannot be reached
            if error.retry_after_s is None:
                return Canary("failed", str(error))
            return Canary("full", str(error))
        except errors.TrtllmBlsError as error:
            return Canary("failed", str(error))
        return Canary("answered")


class ServerProcesses:
    """tritonserver and the children that it needs, as they are when this is constructed."""

    def __init__(self, server: psutil.Process) -> None:
        self._names = {server: "tritonserver"}
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # It has just ended, which ``problems`` reports.
            children = server.children()
        for child in children:
            with suppress(psutil.Error):
                words = child.cmdline()
                if not _NEEDED.search(" ".join(words[:1])):
                    continue
                self._names[child] = child.name()
                # A stub's first argument is its model's file, .../<model>/<version>/model.py.
                if len(words) > 1 and len(Path(words[1]).parts) > 2:
                    self._names[child] = f"model {Path(words[1]).parts[-3]}"
        self._stopped: set[psutil.Process] = set()  # by a SIGSTOP, as of the last look
        self.running = {name: 0 for name in self._names.values()}
        """The number of running processes by name, as of the last ``problems()``."""

    def problems(self) -> tuple[str, ...]:
        """Return a line for each process that is dead or stopped.

        A process counts as stopped when two calls in a row find it so: a single look may fall into
        the moment between a SIGSTOP and the SIGCONT that follows it.
        """
        problems = []
        running = dict.fromkeys(self.running, 0)
        stopped = set()
        for process, name in self._names.items():
            state = psutil.STATUS_DEAD
            with suppress(psutil.NoSuchProcess):
                if process.is_running():
                    state = process.status()
            if state in ENDED_STATES:
                problems.append(f"the process of {name} is dead")
            elif state != psutil.STATUS_STOPPED:
                running[name] += 1
            else:
                stopped.add(process)
                if process in self._stopped:
                    problems.append(f"the process of {name} is stopped")
        self.running = running
        self._stopped = stopped
        return tuple(problems)

    @property
    def pids(self) -> dict[int, str]:
        """The name of each process by its pid."""
        return {process.pid: name for process, name in self._names.items()}

    def waits(self) -> set[str]:
        """Return the names of the processes for whose end tritonserver waits.

        While a model loads, Triton 24.10 takes a lock that it shares with the model's process. A
        process that holds it and gets no core for a second is given up: Triton waits for its end,
        which never comes, since the process goes on. Nothing is found where ``/proc`` shows no
        system calls.
        """
        server, *_ = self._names
        pids = set()
        with suppress(OSError):  # it has just ended
            for thread in Path(f"/proc/{server.pid}/task").iterdir():
                with suppress(OSError, ValueError):  # a thread that runs has no system call
                    number, argument, *_ = (thread / "syscall").read_text().split()
                    if number in _WAIT4:
                        pids.add(int(argument, 16))
        return {name for pid, name in self.pids.items() if pid in pids}

    def end_with_stacks(self, models: Collection[str]) -> int:
        """End the processes of these models, and return their number.

        Each writes the Python stacks of its threads to the log first, by Python's fault handler.
        """
        wanted = {f"model {model}" for model in models}
        count = 0
        for process, name in self._names.items():
            if name in wanted:
                with suppress(psutil.Error):
                    process.rlimit(psutil.RLIMIT_CORE, (0, 0))
                    process.send_signal(signal.SIGABRT)
                    count += 1
        return count

    def without_descriptors(self) -> tuple[str, ...]:
        """Return a line for each process that can open no further file or connection."""
        problems = []
        for process, name in self._names.items():
            with suppress(psutil.Error):
                limit, _ = process.rlimit(psutil.RLIMIT_NOFILE)
                if process.num_fds() >= limit >= 0:  # -1: without a limit
                    problems.append(f"the process of {name} has used its {limit} file descriptors")
        return tuple(problems)


def server_process(port: int) -> psutil.Process | None:
    """Find the tritonserver of this machine that listens on ``port``, if we may see it."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] != "tritonserver":
            continue
        with suppress(psutil.Error):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process
    return None


def free_shared_memory(directory: Path = SHARED_MEMORY) -> int | None:
    """Return the free bytes; ``None`` if the directory does not exist."""
    try:
        file_system = os.statvfs(directory)
    except OSError:
        return None
    return file_system.f_bavail * file_system.f_frsize


# --- trtllm-bls health ----------------------------------------------------------------------


@click.command()
@click.option(
    "--url",
    type=GrpcAddress(),
    default="127.0.0.1:8001",
    show_default=True,
    metavar="HOST:PORT",
    help="gRPC port of the server.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=(BLS.name,),
    show_default=True,
    help="A model that must be ready; may be repeated.",
)
@click.option(
    "--canary/--no-canary", default=True, help=f"Ask {BLS.name} for a token.", show_default=True
)
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that an answer may take.")
@options_of(TlsConnection)
@click.option("--json", "as_json", is_flag=True, help="Print an object instead of lines.")
def command(
    url: str,
    models: tuple[str, ...],
    canary: bool,
    timeout: float,
    as_json: bool,
    **connection: Any,
) -> None:
    """Check whether a server can serve: exit code 0 if so, else 1 and a line for each reason.

    Asks whether the models are ready, and for one token. For a server on this machine, also checks
    its processes and the shared memory.

    \b
    Examples:
      trtllm-bls health
      trtllm-bls health --url gpu-host:8001 --timeout 30 --json
      trtllm-bls health --url gpu-host:8001 --tls
    """
    tls = Tls.of_options(connection)
    verdict = asyncio.run(look(url, models, timeout, canary=canary, tls=tls))
    if as_json:
        click.echo(json.dumps({"ready": verdict.ready, "reasons": verdict.reasons}))
    else:
        for line in verdict.reasons or ("ready",):
            click.echo(line)
    sys.exit(not verdict.ready)


async def look(
    url: str, models: tuple[str, ...], timeout: float, *, canary: bool, tls: Tls | None = None
) -> Verdict:
    """Check the server at ``url`` once. Raises ``SettingsError`` for an invalid address."""
    host, _, port = url.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise errors.SettingsError(f"--url {url}: write host:port, where gRPC is served")
    observed = Observed()
    if is_loopback(host.strip("[]")):
        observed.shared_memory = free_shared_memory()
        if (process := server_process(int(port))) is not None:
            server = ServerProcesses(process)
            observed.processes = server.problems()
            observed.descriptors = server.without_descriptors()
    async with Probe(url, tls=tls) as probe:
        problem = None
        try:
            observed.models = await probe.models_not_ready(models, timeout)
        except errors.ConnectionFailed as error:
            problem = str(error)
        else:
            if canary and not observed.models and not observed.processes:
                answer = await probe.canary(timeout)
                if answer.outcome in ("late", "failed"):  # a full server is at work
                    problem = answer.error
    if problem is not None:
        # One look sends one canary, so that a single failure counts as enough of them.
        observed.canary_failures = _CANARY_FAILURES
        observed.canary_error = problem
    return evaluate(observed, time.monotonic())
