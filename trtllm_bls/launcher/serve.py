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
from types import FrameType

from rich.console import Console
from rich.text import Text

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.health import Bounds
from trtllm_bls.launcher import openai_process
from trtllm_bls.launcher.health_endpoint import HealthEndpoint, HealthState
from trtllm_bls.launcher.logs import parse
from trtllm_bls.launcher.openai_process import OpenAIProcess
from trtllm_bls.launcher.process import PRIVATE, BackOff
from trtllm_bls.launcher.server import Stopped, TritonServer
from trtllm_bls.launcher.terminal import Terminal, announcement
from trtllm_bls.launcher.watch import Watch
from trtllm_bls.launcher.workdir import BLS
from trtllm_bls.settings import ServeSettings

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
                log_file = stack.enter_context(
                    open(settings.log_file, "ab", buffering=0, opener=_private)
                )
            except OSError as error:
                raise SettingsError(f"--log-file {settings.log_file}: {error.strerror}") from error
        terminal = Terminal(Console(stderr=True), verbose=verbose, log_file=log_file)
        with_api = openai_process.check(settings)
        if settings.openai_port and not with_api:
            terminal.say("no OpenAI API: pip install 'trtllm-bls[openai]' for it")
        state = HealthState()
        endpoint = HealthEndpoint(settings.host, settings.health_port, state)
        stack.callback(endpoint.close)
        server = TritonServer(settings, terminal)
        stack.callback(server.stop)
        service = _Service(server, terminal, state, endpoint, with_api=with_api)
        stack.enter_context(service.stopping_on_signals())
        try:
            with terminal.lines_of_failure():
                forced = service.run()
            if forced:
                terminal.say("running requests were cut off")
        except Stopped:
            forced = True
        return 128 + service.last_signal if forced else 0


def _private(path: str, flags: int) -> int:
    """An ``opener`` whose new files only their owner may read."""
    return os.open(path, flags, 0o666 & ~PRIVATE)


class _Service:
    """The server and, with ``with_api``, the OpenAI API beside it.

    Keeps ``state``, from which ``endpoint`` answers probes, up to date.
    """

    def __init__(
        self,
        server: TritonServer,
        terminal: Terminal,
        state: HealthState,
        endpoint: HealthEndpoint,
        *,
        with_api: bool,
    ) -> None:
        self.last_signal = 0
        self._server, self._terminal, self._state = server, terminal, state
        self._endpoint, self._with_api = endpoint, with_api
        self._api: OpenAIProcess | None = None  # while it runs
        self._back_off = BackOff()

    def run(self) -> bool:
        """Serve until a stop is requested; returns whether requests were cut off.

        Raises ``Stopped`` if the request came during a start, ``SetupError`` if the first start
        fails, and ``ServerFailed`` after a failure with ``--on-failure exit``.
        """
        with self._terminal.progress():
            self._server.start()
        self._server.keep_ports()
        failed_at: float | None = None
        while True:
            ready_at = time.monotonic()
            try:
                with self._openai_api():
                    return self._serve(failed_at)
            except SetupError as error:
                self._server.discard()
                if not self._state.started:
                    raise
                failed_at = time.monotonic()
                self._start_again(error, failed_at - ready_at)

    def _serve(self, failed_at: float | None) -> bool:
        """From ready to the end. ``failed_at``: when the server failed before this start."""
        server, terminal = self._server, self._terminal
        bounds = Bounds(stall_s=server.settings.stall_timeout)
        watch = Watch(server, bounds, server.fail, terminal.warning)
        with closing(watch), self._state.serving(watch):
            self._endpoint.tell()  # a script may probe as soon as it reads the line below
            if failed_at is not None:
                terminal.say(f"serving again, {time.monotonic() - failed_at:.1f} s later")
            else:
                beside = (self._api.url, self._api.curl) if self._api else None
                text = announcement(server, self._endpoint.port, beside)
                Console().print(Text(text), soft_wrap=True)
            return server.wait()

    def _start_again(self, error: SetupError, up_s: float) -> None:
        """Restart until a start succeeds. ``up_s``: how long the server was up before ``error``."""
        while True:
            if isinstance(error, Stopped) or self._server.settings.on_failure == "exit":
                raise error
            delay = self._back_off.delay(up_s)
            self._state.restarting(str(error))
            self._terminal.problem(f"{error}; starting again in {delay:.0f} s")
            until = time.monotonic() + delay
            while time.monotonic() < until:
                if self._server.stop_requested:
                    raise Stopped("stopped before the server was started again")
                time.sleep(_POLL_S)
            up_s = 0.0
            try:
                self._server.start()
            except SetupError as following:
                error = following
            else:
                return

    @contextmanager
    def _openai_api(self) -> Iterator[None]:
        """Run the API within this block, which lasts as long as this start of the server."""
        if not self._with_api or BLS not in self._server.models:
            yield
            return
        log = self._terminal.log
        self._api = api = OpenAIProcess(
            self._server,
            self._on_api_problem,
            lambda raw: log(parse(raw)),
            self._terminal.warning,
        )
        try:
            api.wait_until_ready()
            api.keep()
            yield
        finally:
            self._api = None
            api.close()

    def _on_api_problem(self, problem: str | None) -> None:
        self._state.api_problem = problem
        if problem is None:
            self._terminal.say("the OpenAI API answers again")
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
            if self._api is not None:  # after the first signal it drains with the server
                self._api.kill()
            say = "killing the server\n"
        else:
            say = (
                f"stopping: running requests have {self._server.settings.exit_timeout} s to end; "
                "signal again to end at once\n"
            )
        os.write(sys.stderr.fileno(), say.encode())  # print is not safe inside a handler
