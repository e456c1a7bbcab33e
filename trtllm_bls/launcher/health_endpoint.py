"""What ``serve`` knows of its server, told over HTTP.

    /health/startup   200 once the server has been ready for the first time
    /health/live      200 unless the watch over the server is stuck; ``serve`` restarts a server
    /health/ready     200 while the server can serve, 503 with the reasons otherwise
    /metrics          the same for Prometheus, with processes and restarts

``HealthState`` computes the answers from what ``Watch`` has seen last. A probe never reaches the
server, so it is fast under any load.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trtllm_bls.http.browsers import browser_problem
from trtllm_bls.launcher.watch import Watch
from trtllm_bls.settings import is_loopback, listen
from trtllm_bls.status import ENGINE_UP, ServerMetric

_STUCK_S = 60.0  # the watch looks twice a second
_CONNECTION_S = 5.0  # for a client that says nothing
_MOST_CONNECTIONS = 200  # each has a thread of ``serve``


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
    ENGINE_UP,
)


class HealthState:
    """The server's state, written by ``serve`` and read by the threads of ``HealthEndpoint``."""

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

    def problems(self) -> dict[str, list[str]]:
        """For each probe the reasons to answer no."""
        watch = self._watch
        not_ready, not_live = [self._reason], list[str]()
        if watch is not None:
            not_ready = ["the server is draining"] if self.draining or watch.draining else []
            not_ready += [*watch.verdict.reasons, *([self.api_problem] if self.api_problem else [])]
            if time.monotonic() - watch.looked_at > _STUCK_S:
                not_live = ["the watch over the server is stuck"]
        since = self._not_ready_since or time.monotonic()
        self._not_ready_since = since if not_ready else None
        startup = [] if self.started else [self._reason]
        return {"startup": startup, "live": not_live, "ready": not_ready}

    def answer(self, probe: str) -> tuple[HTTPStatus, dict[str, object]]:
        """The status and the body with which to answer a probe."""
        reasons, since, watch = self.problems()[probe], self._not_ready_since, self._watch
        told = {"ok": not reasons, "reasons": reasons, "restarts": self.restarts}
        if probe == "ready":
            told |= {} if since is None else {"not_ready_seconds": int(time.monotonic() - since)}
            if watch is not None and watch.engines:
                told["engines"] = {name: ill or "ok" for name, ill in watch.engines.items()}
        return HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK, told

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        watch = self._watch
        load, engine, engines = (0.0, 0.0), None, dict[str, str]()
        if watch is not None:
            load, engine, engines = watch.load, watch.engine_load, watch.engines
        values: tuple[Mapping[str, float], ...] = (
            {"": int(not self.problems()["ready"])},
            watch.processes if watch is not None else self._processes,
            {"": self.restarts},
            {"": self.api_restarts},
            *({"": number} for number in load),
            *({"": number} if engine else {} for number in engine or load),
            {name: int(not problem) for name, problem in engines.items()},
        )
        told = zip(SERVER_METRICS, values, strict=True)
        return "".join(metric.text(of_metric) for metric, of_metric in told)


class HealthEndpoint(ThreadingHTTPServer):
    """Answers on ``host:port`` until closed; a port of 0 is any free one. Raises ``SetupError``.

    ``hosts`` and ``origins`` may ask, too, where ``host`` is this machine alone.
    """

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        state: HealthState,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        self.state = state
        self.allowed = (hosts, origins) if is_loopback(host) else None
        listening = listen(host, port, "--health-port")
        self.port: int = listening.getsockname()[1]
        super().__init__((host, self.port), _Handler, bind_and_activate=False)
        self.socket.close()  # made by the constructor, and not bound
        self.socket = listening
        self._thread = threading.Thread(target=self.serve_forever, name="health-endpoint")
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def service_actions(self) -> None:
        """Twice a second: note since when the server is not ready, also if nobody asks."""
        self.state.problems()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return threading.active_count() < _MOST_CONNECTIONS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CONNECTION_S
    server: HealthEndpoint

    def do_GET(self) -> None:
        path, state, allowed = self.path.partition("?")[0], self.server.state, self.server.allowed
        told = (self.headers.get("Host", ""), self.headers.get("Origin", ""))
        if allowed is not None and (refused := browser_problem(*told, *allowed)):
            self._reply(HTTPStatus(refused[0]), {"error": refused[1]})
        elif path == "/metrics":
            self._reply(HTTPStatus.OK, state.metrics())
        elif path in ("/health/startup", "/health/live", "/health/ready"):
            self._reply(*state.answer(path.rpartition("/")[2]))
        else:
            words = {"error": "use /health/startup, live or ready, or /metrics"}
            self._reply(HTTPStatus.NOT_FOUND, words)

    def _reply(self, status: HTTPStatus, answer: str | dict[str, Any]) -> None:
        """Send an object as JSON, a text as Prometheus reads it."""
        kind, text = "text/plain; version=0.0.4; charset=utf-8", answer
        if not isinstance(text, str):
            kind, text = "application/json", json.dumps(answer)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""
