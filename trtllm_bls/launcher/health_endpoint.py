"""What ``serve`` knows of its server, told over HTTP.

    /health/startup   200 once the server has been ready for the first time
    /health/live      200 unless ``serve`` itself is stuck; it restarts a server by itself
    /health/ready     200 while the server can serve, 503 with the reasons otherwise
    /metrics          the same for Prometheus, with processes and restarts

``HealthState`` computes the answers from what ``Watch`` has seen last, and ``health_server``, a
process of its own, sends them. A probe never reaches the server, so it is fast under any load.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import psutil

from trtllm_bls.health import StoppedProcesses
from trtllm_bls.launcher import health_server
from trtllm_bls.launcher.ports import ask, reachable
from trtllm_bls.launcher.watch import Watch
from trtllm_bls.settings import listen
from trtllm_bls.status import ENGINE_UP

TELL_S = 0.2
_TOLD_S = 2.0  # the longest that ``tell`` waits for the health server to answer with the new state
REPEAT_S = 5.0  # unchanged answers are repeated, so that the health server knows ``serve`` is alive
_STUCK_S = 60.0  # the watch looks twice a second


@dataclass(frozen=True)
class ServerMetric:
    """A metric on ``/metrics`` of the health port; docs/metrics.md lists them. ``kind`` is
    Prometheus's type, ``labels`` the names of its labels."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"


_counter = partial(ServerMetric, kind="counter")
_RESTARTED = "Times that {} was started again"
_RUN, _WAIT = "Requests that have a token and are not over", "Requests that have no token yet"
SERVER_METRICS = (
    ServerMetric("trtllm_bls_server_ready", "1 while /health/ready says so, else 0"),
    ServerMetric("trtllm_bls_server_processes", "Processes that run, by name", ("process",)),
    _counter("trtllm_bls_server_restarts_total", _RESTARTED.format("the server")),
    _counter("trtllm_bls_openai_restarts_total", _RESTARTED.format("the OpenAI API")),
    ServerMetric("trtllm_bls_server_num_requests_running", f"{_RUN}, of all APIs"),
    ServerMetric("trtllm_bls_server_num_requests_waiting", f"{_WAIT}, of all APIs"),
    ServerMetric("trtllm_bls_engine_num_requests_running", f"{_RUN}, as the engine says"),
    ServerMetric("trtllm_bls_engine_num_requests_waiting", f"{_WAIT}, as the engine says"),
    ServerMetric(*ENGINE_UP, ("engine",)),
)


def _written(*samples: Mapping[str, float]) -> str:
    """The text of ``/metrics``; ``samples`` has each metric's values, by its labels as text."""
    lines = []
    for metric, values in zip(SERVER_METRICS, samples, strict=True):
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{labels} {value}" for labels, value in values.items()]
    return "\n".join([*lines, ""])


class HealthState:
    """The server's state, written by ``serve`` and read by the thread of ``HealthEndpoint``."""

    def __init__(self) -> None:
        self.started = False
        self.restarts = 0
        self.draining = False
        self.api_problem: str | None = None  # why the OpenAI API does not answer
        self.api_restarts = 0
        self._watch: Watch | None = None
        self._processes = {"tritonserver": 0}  # while there is no watch; by name
        self._reason = "the server is starting"
        self._not_ready_since: float | None = None

    @contextmanager
    def serving(self, watch: Watch) -> Iterator[None]:
        """Within this block the server is up, and ``watch`` observes it."""
        self.started = True
        self._watch = watch
        try:
            yield
        finally:
            self._processes = dict.fromkeys(watch.processes, 0)
            self._watch, self._reason = None, "the server has ended"

    def restarting(self, reason: str) -> None:
        """The server has failed and will be started again, and the OpenAI API with it."""
        self.restarts += 1
        self.api_problem = None
        self._reason = f"restarting: {reason}"

    def answers(self) -> dict[str, object]:
        """For each probe the reasons to answer no; the number of restarts; the text of /metrics."""
        watch = self._watch
        not_ready, not_live = [self._reason], list[str]()
        if watch is not None:
            not_ready = ["the server is draining"] if self.draining or watch.draining else []
            not_ready += [*watch.verdict.reasons, *([self.api_problem] if self.api_problem else [])]
            if time.monotonic() - watch.looked_at > _STUCK_S:
                not_live = ["the watch over the server is stuck"]
        processes = watch.processes if watch is not None else self._processes
        since = self._not_ready_since or time.monotonic()
        self._not_ready_since = since if not_ready else None
        load, engine, engines = ((0, 0), None, {}) if watch is None else watch.told
        metrics = _written(
            {"": int(not not_ready)},
            {f'{{process="{name}"}}': count for name, count in processes.items()},
            {"": self.restarts},
            {"": self.api_restarts},
            *({"": number} for number in load),
            *({"": number} if engine else {} for number in engine or load),
            {f"{{engine={json.dumps(name)}}}": int(not ill) for name, ill in engines.items()},
        )
        return {
            "startup": [] if self.started else [self._reason],
            "live": not_live,
            "ready": not_ready,
            "since": self._not_ready_since,
            "engines": {name: ill or "ok" for name, ill in engines.items()},
            "restarts": self.restarts,
            "metrics": metrics,
        }


class HealthEndpoint:
    """Answers on ``host:port`` until closed; a port of 0 is any free one. Raises ``SetupError``.

    ``allowed``: hosts and origins that may ask where ``host`` is this machine alone.
    """

    def __init__(
        self, host: str, port: int, state: HealthState, allowed: Sequence[Sequence[str]] = ((), ())
    ) -> None:
        self._state = state
        self._allowed = json.dumps(allowed)
        self._listening = listen(host, port, "--health-port")
        self.port: int = self._listening.getsockname()[1]
        self._url = f"http://{reachable(host)}:{self.port}/health/ready"
        self._server = self._start()
        self._closing, self._now = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tell, name="health-endpoint", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Return when probes are answered with the present state, or after 2 seconds."""
        self._now.set()
        until = time.monotonic() + _TOLD_S
        while (left := until - time.monotonic()) > 0:
            with suppress(OSError, ValueError):
                answer = json.loads(ask(self._url, left)[1])
                if answer["reasons"] == self._state.answers()["ready"]:
                    return
            time.sleep(0.005)

    def close(self) -> None:
        self._closing.set()
        self._now.set()
        self._server.kill()  # it may be stopped, with a full pipe that blocks the thread
        self._thread.join()
        self._server.kill()  # the thread may have started another one
        self._server.communicate()
        self._listening.close()

    def _start(self) -> subprocess.Popen[str]:
        descriptor = self._listening.fileno()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", health_server.__file__, str(descriptor), self._allowed],
            stdin=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for serve, which drains
            text=True,
            bufsize=1,  # a line
        )

    def _tell(self) -> None:
        before, told_at = "", 0.0
        stopped = StoppedProcesses()
        while True:
            with suppress(psutil.Error):
                if stopped.look([psutil.Process(self._server.pid)]):
                    self._server.kill()
                    self._server.wait()
            answers, now = json.dumps(self._state.answers()), time.monotonic()
            if self._server.poll() is not None:
                self._server.communicate()
                self._server, before = self._start(), ""
            if answers != before or now - told_at > REPEAT_S:
                before, told_at = answers, now
                assert self._server.stdin
                with suppress(OSError):  # the health server has just been killed
                    self._server.stdin.write(answers + "\n")
            self._now.wait(TELL_S)
            self._now.clear()
            if self._closing.is_set():
                return
