"""One tritonserver: started, ready, drained, ended.

    with TritonServer(ServeSettings(http_port=0, grpc_port=0, metrics_port=0)) as server:
        ...  # server.grpc_url

Owns the order of the steps: look at the machine, prepare, start, wait until every model is ready,
stop, clean up; and the process under its guard. The other files of this package do each step, and
``serve`` restarts the server and has the OpenAI API and the health endpoint beside it. Knows
nothing of tensors or tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from trtllm_bls.errors import SetupError
from trtllm_bls.operate import checks, guard, preflight, preparation
from trtllm_bls.operate.checks import Installation, find_server
from trtllm_bls.operate.findings import Subject
from trtllm_bls.operate.health import ENDED_STATES, Probe, ServerProcesses
from trtllm_bls.operate.logs import LogBook, LogLine
from trtllm_bls.operate.ports import Ports, ask, choose, own_tls, reachable
from trtllm_bls.operate.preparation import TMPDIR, Scratch
from trtllm_bls.operate.supervisor import GRACE_MARGIN, Child, ProcessStopped, describe_exit
from trtllm_bls.orchestrator.status import CANARY_ID
from trtllm_bls.settings.command_options import ServeSettings
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.settings.parameters import (
    DRAFT_MODEL_DIR,
    ENGINE_TRANSPORT,
    MODEL_DIR,
    SESSION_DIR,
    STATUS_DIR,
)
from trtllm_bls.wire.call_context import RUN_SECRET

# Another program may take a port between its choice and the server's start, seconds later, and
# Triton's Python backend now and then dies of a race between its stubs.
START_ATTEMPTS = 3

# Seconds between checks of readiness while the log has no new line.
POLL_S = 0.1

# The longest wait for killed processes to disappear, and for the log to end.
_LAST_LINES_S = 5.0
_FOREVER_S = 1e9
# Seconds between looks for models that Triton has given up. A process that is just ending is found
# once; what two looks in a row find does not end.
_WAITS_LOOK_S = 5.0

# The report of a start that took too long has so many lines of the log, with the Python stacks of
# the models' processes among them.
_STACK_LINES = 250  # a process has up to twenty threads
_STACKS_S = 5.0  # the longest wait for these stacks


class ServerFailed(SetupError):
    """The server did not get ready, or ended by itself. ``log_lines`` are its last ones."""

    def __init__(self, problem: str, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.log_lines = log_lines


class _StartAgain(ServerFailed):
    """The start failed by an accident of timing; another one may not."""


class Listener:
    """Receives a server's events; override the methods of interest.

    ``log`` is called on another thread than the other methods.
    """

    def log(self, line: LogLine) -> None:
        """The server or a model printed a line."""

    def say(self, text: str) -> None:
        """A choice that the launcher made."""

    def warning(self, text: str) -> None:
        """Something is wrong, and the server goes on."""

    def starting(self, models: tuple[str, ...]) -> None:
        """The server process runs and loads these models."""

    def model_ready(self, model: str, ready: int) -> None:
        """Another model is ready; ``ready`` counts them."""


class TritonServer:
    """A server process. ``start`` returns when every model is ready; ``stop`` drains.

    With ``behind_http`` a program of ours answers HTTP at ``http_port``, and Triton's own HTTP port
    is for that program. ``request_stop`` may be called from a signal handler; all other methods
    belong to one thread. The fields below are those of the latest start.
    """

    ports: Ports
    http_url: str  # Triton's own HTTP port, reachable from this machine
    grpc_url: str  # host:port
    metrics_url: str
    repository: Path  # the model repository as it is served
    environment: dict[str, str]  # the models', whose variables may override their parameters
    models: tuple[str, ...]
    workdir: Path  # files of this run, which the guard removes
    status_dir: Path  # the models write their status there; see ``trtllm_bls.orchestrator.status``
    region_prefix: str  # the beginning of the names of all its files in /dev/shm
    unloaded: set[str]  # the models that a stopping server has unloaded

    def __init__(
        self,
        settings: ServeSettings,
        listener: Listener | None = None,
        *,
        behind_http: bool = False,
    ) -> None:
        self.settings = settings
        self.behind_http = behind_http
        self.host = reachable(settings.host)
        self._listener = listener or Listener()
        self._logged = threading.Event()  # set by every log line
        self._scratch: Scratch
        self._book: LogBook
        self._process: GuardedProcess | None = None
        self._stop_requests = 0
        self._failure: str | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    @property
    def public_http_url(self) -> str:
        """The address at which clients reach Triton's HTTP API."""
        if not self.behind_http:
            return self.http_url
        scheme = "https"
        if self.settings.tls_cert is None:
            scheme = "http"
        return f"{scheme}://{self.host}:{self.settings.http_port}"

    @property
    def process(self) -> psutil.Process | None:
        """tritonserver's own process; ``None`` when it has ended."""
        process = self._process  # another thread may discard it between two looks
        if process is None:
            return None
        return process.server

    @property
    def running(self) -> bool:
        """True if it has been started and has not ended. Any thread may ask."""
        process = self._process
        return process is not None and process.running

    @property
    def stop_requested(self) -> bool:
        return self._stop_requests > 0

    def probe(self) -> Probe | None:
        """Make a client for health checks.

        ``None`` if the server asks for a certificate and there is none for the launcher.
        """
        tls = own_tls(self.settings)
        if self.settings.tls_client_ca is not None and not (tls and tls.private_key):
            return None
        return Probe(self.grpc_url, self._scratch.canary_id, tls, local=True)

    def start(self) -> None:
        """Start and return when every model is ready.

        Raises ``SetupError``: ``ServerFailed`` with the last log lines if it started but
        did not get ready, ``ProcessStopped`` if it was asked to stop meanwhile.
        """
        own_tls(self.settings)
        self._preflight(preflight.PREPARING)
        server = find_server(self.settings.server)
        for attempt in itertools.count(1):
            try:
                self._launch(server)
                self._wait_until_ready()
                return
            except BaseException as error:
                self.discard()
                if not isinstance(error, _StartAgain) or attempt >= START_ATTEMPTS:
                    raise
                self._listener.warning(f"{error}; starting again")

    def request_stop(self) -> bool:
        """Ask the server to stop, without waiting; the second request kills it.

        Returns True if it was killed. Before ``start`` has launched anything, ``start`` ends.
        """
        self._stop_requests += 1
        is_forced = self._stop_requests > 1
        if self._process is not None:
            if is_forced:
                self._process.kill()
            else:
                self._process.stop()
        return is_forced

    def keep_ports(self) -> None:
        """Keep the ports for the next start, also those that were free to choose."""
        ports: dict[str, Any] = {"grpc_port": self.ports.grpc, "metrics_port": self.ports.metrics}
        if not self.behind_http:
            ports["http_port"] = self.ports.http
        elif self.settings.triton_http_port is not None:
            ports["triton_http_port"] = self.ports.http
        self.settings = replace(self.settings, **ports)

    def fail(self, problem: str) -> None:
        """Kill the server, which ends all its requests; ``wait`` raises. Any thread may call it."""
        process = self._process
        server = self.process
        with suppress(psutil.Error):
            if process and server and server.status() not in ENDED_STATES:
                self._failure = problem  # otherwise it has ended by itself
                process.kill()

    def wake_guard(self) -> None:
        """Continue a guard that was stopped (SIGSTOP), which passes on the server's output."""
        process = self._process
        if process is not None:
            process.wake()

    def end_unloading(self) -> None:
        """Kill a server that is stopping and has no requests left; ``wait`` then returns."""
        process = self._process
        if process is not None:
            process.kill()

    def wait(self) -> bool:
        """Return when the server has ended as requested; True if requests were cut off.

        Raises ``ServerFailed`` if it ended by itself or failed. Its files stay until it is stopped
        or discarded: other processes may use them.
        """
        assert self._process is not None, "the server has not been started"
        code = self._process.wait()
        book = self._book
        if not self._stop_requests:
            cause = describe_exit(code)
            if book.lock_exception:
                cause += "; boost's lock_exception, as when a model's process is killed"
            problem = self._failure or f"the server ended by itself ({cause})"
            self._failure = None
            raise ServerFailed(problem, book.tail())
        if code and book.drained and self._stop_requests == 1:
            # Triton keeps a refused request whose client disconnected, and the model with it: it is
            # killed then, or ends with exit code 1. It may also crash while it unloads.
            problem = "tritonserver crashed as it ended"
            if code in (1, 128 + signal.SIGKILL):
                problem = "a model did not unload in time"
            self._listener.warning(f"all requests had ended; {problem} ({describe_exit(code)})")
            return False
        return code != 0

    def stop(self) -> None:
        """Let running requests end, at most ``exit_timeout`` seconds, and clean up."""
        if self._process is not None:
            if not self._stop_requests:
                self.request_stop()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self.settings.exit_timeout + 2 * GRACE_MARGIN)
            self.discard()
            self._stop_requests = 0

    def _launch(self, server: Installation) -> None:
        settings = self.settings
        ports = choose(settings, self.behind_http)
        repository = preparation.model_repository(settings)
        book = LogBook()
        self._book = book

        def on_line(raw: str) -> None:
            self._listener.log(book.add(raw))
            self._logged.set()

        scratch = Scratch()
        process = GuardedProcess(scratch, settings.exit_timeout, on_line)
        try:
            scratch.make()
            directory = scratch.workdir
            libraries = preparation.links(directory / "lib", [checks.libpython()])
            environment = preparation.server_environment(settings, ports, libraries, os.environ)
            environment[CANARY_ID] = scratch.canary_id
            environment.setdefault(RUN_SECRET, secrets.token_hex(32))
            environment.setdefault(SESSION_DIR, str(directory / "sessions"))
            for variable in (MODEL_DIR, DRAFT_MODEL_DIR):
                if variable in environment:
                    checkpoint = environment[variable]
                    checkpoint_link = preparation.link_checkpoint(directory, variable, checkpoint)
                    environment[variable] = str(checkpoint_link)
            backends = preparation.link_backends(directory, server)
            served_repository = preparation.prepare_models(
                directory, repository, settings, with_draft=DRAFT_MODEL_DIR in environment
            )
            status_dir = environment.get(STATUS_DIR)
            if not status_dir:
                status_dir = preparation.parameter(served_repository, BLS_NAME, "status_dir")
            scratch.keep_status(status_dir)
            environment[STATUS_DIR] = str(scratch.status)
            self._preflight(
                preflight.LOADING,
                repository=served_repository,
                source=repository,
                environment=environment,
            )
            _, reason = preparation.instances_of(repository, settings)
            if reason:
                self._listener.say(f"{BLS_NAME}: {reason}")
            self.models = preparation.model_names(served_repository)
            sends_only = preparation.sends_only(served_repository)
            if sends_only:
                environment[ENGINE_TRANSPORT] = "grpc"
            command = preparation.server_command(
                server,
                settings,
                ports,
                served_repository,
                backends,
                scratch.region_prefix,
                sends_only,
            )
            process.run(command, environment)
        except BaseException as error:
            process.kill()
            process.close()
            if isinstance(error, OSError):
                raise SetupError(f"{scratch.workdir.parent}: {error.strerror}; {TMPDIR}") from error
            raise
        self._process = process
        self._scratch = scratch
        self.ports = ports
        self.http_url = ports.http_url
        self.grpc_url = ports.grpc_url
        self.metrics_url = ports.metrics_url
        self.repository = served_repository
        self.environment = environment
        self.workdir = directory
        self.status_dir = scratch.status
        self.region_prefix = scratch.region_prefix
        self.unloaded = book.unloaded

    def _preflight(self, stage: str, **fields: Any) -> None:
        settings = self.settings
        subject = Subject(
            server=settings.server,
            max_streams=settings.max_streams,
            store_dir=settings.store_dir,
            ports={},
            **fields,
        )
        preflight.preflight(stage, subject, self._listener.warning, refuses=not settings.no_checks)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.settings.ready_timeout
        book = self._book
        process = self._process
        missing = list(self.models)
        announced = 0
        waits: set[str] = set()
        look_at = time.monotonic() + _WAITS_LOOK_S
        self._listener.starting(self.models)
        while True:
            self._logged.wait(POLL_S)
            self._logged.clear()
            if self._stop_requests:
                raise ProcessStopped("stopped before the models were ready")
            has_ended = process is None or not process.running
            code = 0
            if process and has_ended:
                code = process.wait()  # also reads the log to its end
            if book.lock_exception and (has_ended or book.failures):
                problem = "tritonserver's Python backend died of boost's lock_exception"
                raise _StartAgain(f"{problem} while starting", book.tail())
            if book.failures:
                raise ServerFailed(book.failure_summary(), book.failure_details())
            if book.port_taken:
                problem = f"the {book.port_taken} port was taken meanwhile, try again"
                settings = self.settings
                ports = (settings.http_port, settings.grpc_port, settings.metrics_port)
                if 0 in ports or self.behind_http:
                    raise _StartAgain(problem)
                raise ServerFailed(problem)
            if has_ended:
                problem = f"the server did not start ({describe_exit(code)})"
                raise ServerFailed(problem, book.tail())
            # Before a port is open: a region exists from the start of its model's process on.
            self._scratch.hide_regions()
            for model in book.loaded[announced:]:
                announced += 1
                self._listener.model_ready(model, announced)
            if is_ready(self.ports, missing):
                return
            if time.monotonic() > look_at:
                look_at = time.monotonic() + _WAITS_LOOK_S
                server = self.process
                before = waits
                waits = ServerProcesses(server).waits() if server else set()
                if before & waits:
                    names = ", ".join(sorted(before & waits))
                    problem = f"Triton waits for ever for {names}, which got no core for a second"
                    raise _StartAgain(f"{problem}; this machine has too much to do at once")
            if time.monotonic() > deadline:
                loading = [model for model in missing if model not in book.loaded] or missing
                self._print_stacks(loading)
                raise ServerFailed(
                    f"not ready after {self.settings.ready_timeout} s, still loading: "
                    f"{', '.join(loading)}; allow more with --ready-timeout",
                    book.tail(_STACK_LINES),
                )

    def _print_stacks(self, models: Sequence[str]) -> None:
        """Have the processes of models that do not load write their stacks, which ends them."""
        server = self.process
        if server is None or not ServerProcesses(server).end_with_stacks(models):
            return
        end = time.monotonic() + _STACKS_S
        while time.monotonic() < end:
            time.sleep(POLL_S)  # also for the rest of the lines
            if any("Fatal Python error" in line for line in self._book.tail(_STACK_LINES)):
                break

    def discard(self) -> None:
        """Kill the server in whatever state it is; no process and no file of it remains."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.close()


_SERVER_ANSWER_S = 2.0


def is_ready(ports: Ports, missing: list[str]) -> bool:
    """Return True if a starting server serves. Removes ready models from ``missing``.

    Models are asked for over HTTP; then the gRPC and the metrics port must accept a connection. The
    server listens only after all models have loaded.
    """
    with suppress(OSError):
        while missing:
            url = f"{ports.http_url}/v2/models/{quote(missing[0])}/ready"
            if ask(url, _SERVER_ANSWER_S)[0] != HTTPStatus.OK:
                return False
            missing.pop(0)
        for address in ((ports.host, ports.grpc), (ports.plain_host, ports.metrics)):
            socket.create_connection(address, timeout=_SERVER_ANSWER_S).close()
        return True
    return False


# --- the process under its guard ------------------------------------------------------------


class GuardedProcess:
    """A guard, and the command that it runs; ``on_line`` gets every line printed, on a thread.

    Start it before the files of ``scratch`` are made: it removes them if this process dies.
    ``stop`` and ``kill`` do not wait. Both may be called from a signal handler, and after the end.
    """

    def __init__(
        self, scratch: Scratch, exit_timeout: float, on_line: Callable[[str], None]
    ) -> None:
        self._scratch = scratch
        self._server: psutil.Process | None = None
        # Every process of the server inherits the run's TMPDIR.
        self._variables = {"TMPDIR": str(scratch.workdir)}
        order = {
            "workdir": str(scratch.workdir),
            "shared_memory": scratch.regions,
            "mark": f"{CANARY_ID}={scratch.canary_id}",
            "drain": exit_timeout,
            "grace": exit_timeout + GRACE_MARGIN,
        }
        self._guard = Child(
            "the guard",
            [sys.executable, "-I", "-S", guard.__file__, json.dumps(order)],
            os.environ | self._variables,
            on_line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start the command."""
        order = {
            "command": command,
            "environment": {**environment, **self._variables},
            "status": str(self._scratch.status),
        }
        assert self._guard.stdin is not None
        with suppress(OSError):  # a guard that has ended is noticed by ``wait``
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()

    @property
    def running(self) -> bool:
        return self._guard.poll() is None

    @property
    def server(self) -> psutil.Process | None:
        """The command's own process; ``None`` before it started and after it ended."""
        with suppress(psutil.Error):
            if self._server is None:
                # The first child; the guard adopts orphans of the server when that has ended.
                children = psutil.Process(self._guard.pid).children()
                self._server = min(children, key=psutil.Process.create_time, default=None)
            if self._server is not None and self._server.is_running():
                return self._server
        return None

    def stop(self) -> None:
        """Ask for an orderly end."""
        self._send(guard.STOP)

    def kill(self) -> None:
        """Ask for the end at once."""
        self._send(guard.KILL)

    def wait(self, timeout: float = _FOREVER_S) -> int:
        """Return the exit code, 128 + n for signal n, once all output has been handed on.

        If the guard itself was killed, this kills the processes that the server left. Raises
        ``subprocess.TimeoutExpired``.
        """
        # With a limit, Popen looks 20 times a second. Without one it blocks in the kernel, and a
        # signal that came just before, or that another thread took, is not handled until the end.
        code = self._guard.wait(timeout)
        if code < 0:
            code = 128 - code
            self._kill_orphans()
        self._guard.read_to_end(_LAST_LINES_S)
        return code

    def _kill_orphans(self) -> None:
        orphans = []
        for pid in guard.marked(f"TMPDIR={self._scratch.workdir}"):
            with suppress(psutil.Error):
                orphan = psutil.Process(pid)
                orphans.append(orphan)
                orphan.kill()
        psutil.wait_procs(orphans, timeout=_LAST_LINES_S)

    def close(self) -> None:
        """Wait for the end, which must have been requested, and remove the run's files."""
        if self._guard.stdin:
            self._guard.stdin.close()
        self.wait()
        self._scratch.remove()

    def wake(self) -> None:
        """Continue the guard if it was stopped (SIGSTOP)."""
        with suppress(psutil.Error, OSError):
            if psutil.Process(self._guard.pid).status() == psutil.STATUS_STOPPED:
                self._guard.send_signal(signal.SIGCONT)

    def _send(self, word: bytes) -> None:
        if self._guard.stdin and not self._guard.stdin.closed:
            with suppress(OSError):  # over already
                os.write(self._guard.stdin.fileno(), word)
        if self.running:  # a guard that is stopped (SIGSTOP) would not read the control pipe
            self._guard.send_signal(signal.SIGCONT)
