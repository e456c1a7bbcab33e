"""``serve``: a server in the foreground, watched, and restarted with back-off when it fails.

Owns signals, restarts and the exit code. ``terminal`` owns the output.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import FrameType

from rich.console import Console
from rich.text import Text

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.launcher import http_process
from trtllm_bls.launcher.health_endpoint import HealthEndpoint, HealthState
from trtllm_bls.launcher.http_process import HttpProcess
from trtllm_bls.launcher.logs import parse
from trtllm_bls.launcher.process import BackOff
from trtllm_bls.launcher.server import Stopped, TritonServer
from trtllm_bls.launcher.terminal import Terminal, announcement
from trtllm_bls.launcher.watch import Watch
from trtllm_bls.launcher.workdir import BLS
from trtllm_bls.settings import ServeSettings, listen

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1


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
