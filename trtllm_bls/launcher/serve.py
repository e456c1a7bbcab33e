"""A server in the foreground: start, announce, wait for a signal, drain.

Owns signals and the exit code. What is shown is ``terminal``'s.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from rich.console import Console
from rich.text import Text

from trtllm_bls.errors import SettingsError
from trtllm_bls.launcher import openai_process
from trtllm_bls.launcher.health_endpoint import HealthEndpoint, HealthState
from trtllm_bls.launcher.logs import parse
from trtllm_bls.launcher.openai_process import OpenAIProcess
from trtllm_bls.launcher.server import Stopped, TritonServer
from trtllm_bls.launcher.supervise import Supervisor
from trtllm_bls.launcher.terminal import Terminal, announcement
from trtllm_bls.settings import ServeSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(settings: ServeSettings, *, verbose: bool = False) -> int:
    """Serve until SIGINT or SIGTERM; the first drains, the second forces.

    Returns the exit code: 0 after draining, 128 + n if signal n forced the end or came before
    the server was ready. Raises ``SetupError`` if it does not start, or ends by itself and is not
    to be started again.
    """
    with ExitStack() as stack:
        log_file = None
        if settings.log_file is not None:
            try:
                # Unbuffered: what a full disk did not take is gone, and not in the way.
                log_file = stack.enter_context(settings.log_file.open("ab", buffering=0))
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
        api: list[OpenAIProcess] = []  # one, while it runs

        def on_problem(problem: str | None) -> None:
            state.api_problem = problem
            if problem is None:
                terminal.say("the OpenAI API answers again")
            else:
                state.api_restarts += 1
                terminal.problem(f"{problem}; starting it again")

        def start_api() -> OpenAIProcess:
            return OpenAIProcess(server, on_problem, lambda raw: terminal.log(parse(raw)))

        last_signal = stack.enter_context(_stopping_on_signals(server, state, api))
        try:
            with terminal.lines_of_failure():
                supervisor = Supervisor(server, terminal, state)
                forced = supervisor.run(
                    lambda: _announce(server, endpoint.port, api),
                    lambda: _beside(server, api, start_api, wanted=with_api),
                )
            if forced:
                terminal.say("running requests were cut off")
        except Stopped:
            forced = True
        return 128 + last_signal() if forced else 0


def _announce(server: TritonServer, health_port: int, api: list[OpenAIProcess]) -> None:
    beside = (api[0].url, api[0].curl) if api else None
    Console().print(Text(announcement(server, health_port, beside)), soft_wrap=True)


@contextmanager
def _beside(
    server: TritonServer,
    api: list[OpenAIProcess],
    start: Callable[[], OpenAIProcess],
    *,
    wanted: bool,
) -> Iterator[None]:
    """The OpenAI API as long as this start of the server lasts."""
    if not wanted or openai_process.MODEL not in server.models:
        yield
        return
    process = start()
    api.append(process)
    try:
        process.wait_until_ready()
        process.keep()
        yield
    finally:
        api.clear()
        process.close()


@contextmanager
def _stopping_on_signals(
    server: TritonServer, state: HealthState, api: list[OpenAIProcess]
) -> Iterator[Callable[[], int]]:
    """Signals become stop requests; yields a function that returns the last signal's number."""
    received = [0]

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        state.draining = True
        forced = server.request_stop()
        if forced:  # otherwise it drains with the server
            for process in api:
                process.kill()
            say = "killing the server\n"
        else:
            say = (
                f"stopping: running requests have {server.settings.exit_timeout} s to end; "
                "signal again to end at once\n"
            )
        os.write(sys.stderr.fileno(), say.encode())  # print is not safe inside a handler

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield lambda: received[-1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
