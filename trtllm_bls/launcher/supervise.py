"""Keeping one server up: a server that fails is ended and started again, later each time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial

from trtllm_bls.errors import SetupError
from trtllm_bls.health import Bounds
from trtllm_bls.launcher.health_endpoint import HealthState
from trtllm_bls.launcher.server import Stopped, TritonServer
from trtllm_bls.launcher.terminal import Terminal
from trtllm_bls.launcher.watch import Watch

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
HEALTHY_S = 60.0  # a server that was up for so long begins with the first delay again
_POLL_S = 0.1


class BackOff:
    """Seconds to wait before the next start: 1, 2, 4 ... 30."""

    def __init__(self) -> None:
        self._next = FIRST_DELAY_S

    def delay(self, up_s: float) -> float:
        """After a server that was up for ``up_s`` seconds."""
        if up_s >= HEALTHY_S:
            self._next = FIRST_DELAY_S
        delay, self._next = self._next, min(2 * self._next, LONGEST_DELAY_S)
        return delay


class Supervisor:
    """Runs ``server`` until it is asked to stop; ``state`` tells how it is."""

    def __init__(self, server: TritonServer, terminal: Terminal, state: HealthState) -> None:
        self._server = server
        self._terminal = terminal
        self._state = state
        self._back_off = BackOff()
        self._bounds = Bounds(stall_s=server.settings.stall_timeout)

    def run(
        self, on_ready: Callable[[], object], beside: Callable[[], AbstractContextManager[None]]
    ) -> bool:
        """Serve until asked to stop; whether requests were cut off.

        ``on_ready`` is called when the server is ready for the first time; ``beside`` is entered
        whenever it has been started, and left when it has ended.

        Raises ``Stopped`` if it was asked while it started, ``SetupError`` if the first start
        fails, and ``ServerFailed`` where a failure is to end it.
        """
        with self._terminal.progress():
            self._server.start()
        self._server.keep_ports()
        say_so = on_ready
        while True:
            ready_at = time.monotonic()
            try:
                return self._serve(say_so, beside())
            except SetupError as error:
                self._server.discard()
                if not self._state.started:
                    raise
                failed_at = time.monotonic()
                self._start_again(error, failed_at - ready_at)
                say_so = partial(self._say_again, failed_at)

    def _serve(self, say_so: Callable[[], object], beside: AbstractContextManager[None]) -> bool:
        """From ready to the end."""
        with beside:
            watch = Watch(self._server, self._bounds, self._server.fail, self._terminal.warning)
            return self._watched(watch, say_so)

    def _watched(self, watch: Watch, say_so: Callable[[], object]) -> bool:
        with closing(watch), self._state.serving(watch):
            say_so()
            return self._server.wait()

    def _say_again(self, failed_at: float) -> None:
        self._terminal.say(f"serving again, {time.monotonic() - failed_at:.1f} s later")

    def _start_again(self, error: SetupError, up_s: float) -> None:
        """Until that succeeds; ``up_s``: for how long the server was up before ``error``."""
        while True:
            if isinstance(error, Stopped) or self._server.settings.on_failure == "exit":
                raise error
            delay = self._back_off.delay(up_s)
            self._state.restarting(str(error))
            self._terminal.problem(f"{error}; starting again in {delay:.0f} s")
            self._pause(delay)
            up_s = 0.0
            try:
                self._server.start()
            except SetupError as following:
                error = following
            else:
                return

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._server.stop_requested:
                raise Stopped("stopped before the server was started again")
            time.sleep(_POLL_S)
