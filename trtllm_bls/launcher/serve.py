"""``serve``: a server in the foreground, watched, and restarted with back-off when it fails.

Owns signals, restarts and the exit code, and what ``serve`` and ``demo`` show: progress and
readable logs on standard error, addresses on standard output.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import FrameType
from typing import BinaryIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.launcher import http_process
from trtllm_bls.launcher.http_process import HttpProcess
from trtllm_bls.launcher.logs import TAIL_LINES, LogLine, parse
from trtllm_bls.launcher.ports import curl_tls
from trtllm_bls.launcher.preparation import BLS
from trtllm_bls.launcher.process import BackOff
from trtllm_bls.launcher.server import Listener, ServerFailed, Stopped, TritonServer
from trtllm_bls.launcher.watch import HealthEndpoint, HealthState, Watch
from trtllm_bls.settings import ServeSettings, listen

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1
_STYLES = {"warning": "yellow", "error": "red", "fatal": "bold red"}


def serve(settings: ServeSettings, *, verbose: bool = False) -> int:
    """Serve until SIGINT or SIGTERM; the first signal drains, the second kills.

    Returns the exit code: 0 after draining, 128 + n if signal n killed the server or came before
    it was ready. Raises ``SetupError`` if the server does not start, or if it ends by itself and
    ``--on-failure`` is ``exit``.
    """
    with ExitStack() as stack:
        log_file = None
        if settings.log_file is not None:
            try:
                # Unbuffered: a line that a full disk refuses is lost; it does not delay the next.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                log_file = stack.enter_context(
                    open(os.open(settings.log_file, flags, 0o600), "ab", buffering=0)
                )
            except OSError as error:
                raise SettingsError(f"--log-file {settings.log_file}: {error.strerror}") from error
        terminal = Terminal(Console(stderr=True), verbose=verbose, log_file=log_file)
        with_http = http_process.check(settings)
        if with_http and not settings.http_port:
            with listen(settings.host, 0, "--http-port") as chosen:
                settings = replace(settings, http_port=chosen.getsockname()[1])
        if not with_http:
            terminal.say(
                "no OpenAI API, and Triton's own HTTP port without limits: "
                "pip install 'trtllm-bls[openai]' for both"
            )
        state = HealthState()
        allowed = (settings.allowed_hosts, settings.allowed_origins)
        endpoint = HealthEndpoint(settings.host, settings.health_port, state, *allowed)
        stack.callback(endpoint.close)
        server = TritonServer(settings, terminal, behind_http=with_http)
        stack.callback(server.stop)
        service = _Service(server, terminal, state, endpoint)
        stack.enter_context(service.stopping_on_signals())
        try:
            with terminal.lines_of_failure():
                forced = service.run()
            if forced:
                terminal.say("running requests were cut off")
        except Stopped:
            forced = True
        return 128 + service.last_signal if forced else 0


class _Service:
    """The server and the program that answers HTTP in front of it.

    Keeps ``state``, from which ``endpoint`` answers probes, up to date.
    """

    def __init__(
        self,
        server: TritonServer,
        terminal: Terminal,
        state: HealthState,
        endpoint: HealthEndpoint,
    ) -> None:
        self.last_signal = 0
        self._server, self._terminal, self._state = server, terminal, state
        self._endpoint = endpoint
        self._http: HttpProcess | None = None  # while it runs

    def run(self) -> bool:
        """Serve until a stop is requested; returns whether requests were cut off.

        Raises ``Stopped`` if the request came during a start, ``SetupError`` if the first start
        fails, and ``ServerFailed`` after a failure with ``--on-failure exit``.
        """
        server, back_off = self._server, BackOff()
        failed_at: float | None = None
        while True:
            ready_at: float | None = None
            try:
                with self._terminal.progress():
                    server.start()
                server.keep_ports()
                ready_at = time.monotonic()
                with self._answering_http():
                    return self._serve(failed_at)
            except SetupError as error:
                server.discard()
                once = not self._state.started or server.settings.on_failure == "exit"
                if once or isinstance(error, Stopped):
                    raise
                now = time.monotonic()
                failed_at = failed_at if ready_at is None else now
                delay = back_off.delay(0.0 if ready_at is None else now - ready_at)
                self._state.restarting(str(error))
                self._terminal.problem(f"{error}; starting again in {delay:.0f} s")
            while time.monotonic() < now + delay:
                if server.stop_requested:
                    raise Stopped("stopped before the server was started again")
                time.sleep(_POLL_S)

    def _serve(self, failed_at: float | None) -> bool:
        """From ready to the end. ``failed_at``: when the server failed before this start."""
        server, terminal = self._server, self._terminal
        watch = Watch(server, server.settings.stall_timeout, server.fail, terminal.warning)
        with closing(watch), self._state.serving(watch):
            if failed_at is not None:
                terminal.say(f"serving again, {time.monotonic() - failed_at:.1f} s later")
            else:
                beside = (
                    (self._http.url, self._http.curl) if self._http and self._http.url else None
                )
                text = announcement(server, self._endpoint.port, beside)
                Console().print(Text(text), soft_wrap=True)
            return server.wait()

    @contextmanager
    def _answering_http(self) -> Iterator[None]:
        """Answer HTTP within this block, which lasts as long as this start of the server."""
        if not self._server.behind_http:
            yield
            return
        log = self._terminal.log
        self._http = http = HttpProcess(
            self._server,
            bool(self._server.settings.openai_port) and BLS in self._server.models,
            self._on_api_problem,
            lambda raw: log(parse(raw)),
        )
        try:
            http.wait_until_ready()
            http.keep()
            yield
        finally:
            self._http = None
            http.close()

    def _on_api_problem(self, problem: str | None) -> None:
        self._state.api_problem = problem
        if problem is None:
            self._terminal.say("the HTTP program answers again")
        else:
            self._state.api_restarts += 1
            self._terminal.problem(f"{problem}; starting it again")

    @contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """Within this block SIGINT and SIGTERM become stop requests."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.last_signal = number
        self._state.draining = True
        if self._server.request_stop():
            if self._http is not None:  # after the first signal it drains with the server
                self._http.kill()
            say = "killing the server\n"
        else:
            say = (
                f"stopping: running requests have {self._server.settings.exit_timeout} s to end; "
                "signal again to end at once\n"
            )
        os.write(sys.stderr.fileno(), say.encode())  # print is not safe inside a handler


# --- output ---------------------------------------------------------------------------------


class Terminal(Listener):
    """Shows one server's start, log and end; ``log_file`` gets every line of the log unchanged.

    With ``problems_only`` set, only warnings and errors of the log are shown.
    """

    def __init__(
        self, console: Console, *, verbose: bool = False, log_file: BinaryIO | None = None
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._log_file = log_file
        self._status: Status | None = None
        self._log_file_failed = False
        self.problems_only = False
        self._printed: deque[str] = deque(maxlen=TAIL_LINES)
        self._models: tuple[str, ...] = ()
        self._started_at = time.monotonic()

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show a spinner, where there is a terminal, while the server starts."""
        with self._console.status("starting tritonserver") as self._status:
            yield
        self._status = None

    @contextmanager
    def lines_of_failure(self) -> Iterator[None]:
        """If the server fails, show those of its last lines that were not shown before."""
        try:
            yield
        except ServerFailed as failed:
            for line in failed.log_lines:
                if line not in self._printed:
                    self._print(Text("\n".join(f"  | {part}" for part in line.splitlines())))
            raise

    def problem(self, text: str) -> None:
        """A line of ``serve``'s own about an error."""
        self._own("error", text)

    def say(self, text: str) -> None:
        """A line of ``serve``'s own."""
        self._own("info", text)

    def warning(self, text: str) -> None:
        self._own("warning", f"warning: {text}")

    def _own(self, severity: str, text: str) -> None:
        """Show the line with its time, and write it to the log file in the form of Triton's."""
        date, now = time.strftime("%m%d %H:%M:%S").split()
        self._keep(f"{severity[0].upper()}{date} {now} {os.getpid()} serve:0] {text}")
        self._print(Text(f"{now} {text}", style=_STYLES.get(severity, "")))

    def log(self, line: LogLine) -> None:
        self._keep(line.raw)
        if self._verbose:
            self._print(Text(line.raw))
        elif line.noteworthy and (line.problem or not self.problems_only):
            self._printed.append(line.readable)
            self._print(Text(line.readable, style=_STYLES.get(line.severity, "")))

    def _keep(self, line: str) -> None:
        """Write a line to the log file; if that fails, warn once and go on."""
        if self._log_file is None:
            return
        try:
            self._log_file.write(line.encode() + b"\n")
        except OSError as error:
            told, self._log_file_failed = self._log_file_failed, True
            if not told:
                self.warning(f"the log file cannot be written and misses lines: {error.strerror}")
        else:
            self._log_file_failed = False

    def starting(self, models: tuple[str, ...]) -> None:
        self._models = models
        self._started_at = time.monotonic()
        self._print(Text(f"loading {len(models)} models: {', '.join(models)}"))
        self._show_progress(0)

    def model_ready(self, model: str, ready: int) -> None:
        seconds = time.monotonic() - self._started_at
        line = f"  ready {ready}/{len(self._models)}  {model}  ({seconds:.1f} s)"
        self._print(Text(line, style="green"))
        self._show_progress(ready)

    def _show_progress(self, ready: int) -> None:
        if self._status is not None:
            self._status.update(f"loading models, {ready} of {len(self._models)} ready")

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def announcement(server: TritonServer, health_port: int, api: tuple[str, str] | None = None) -> str:
    """The server's addresses, and a curl command to try it.

    ``api``: the URL of the OpenAI API, and a curl command for that.
    """
    health = f"http://{server.host}:{health_port}/health/ready"
    return "\n".join(
        (
            *([] if api is None else [f"OpenAI   {api[0]}/v1"]),
            f"HTTP     {server.public_http_url}",
            f"gRPC     {server.grpc_url}",
            f"metrics  {server.metrics_url}",
            f"health   {health}",
            "",
            _curl(server) if api is None else api[1],
        )
    )


def _curl(server: TritonServer) -> str:
    if BLS not in server.models:
        return f"curl -i{curl_tls(server.settings)} {server.public_http_url}/v2/health/ready"
    url = f"{server.public_http_url}/v2/models/{BLS}/generate"
    request = '"text_input": "Once upon a time", "max_tokens": 32'
    if server.settings.decoupled is not False:  # else there are no streams
        url, request = url + "_stream", request + ', "stream": true'
    url = f"{curl_tls(server.settings)} {url}"
    return f"curl -sN{url} -H 'Content-Type: application/json' -d '{{{request}}}'"
