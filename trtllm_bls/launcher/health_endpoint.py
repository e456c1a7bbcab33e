"""What ``serve`` knows of its server, told over HTTP from memory.

    /health/startup   200 once the server has been ready for the first time
    /health/live      200 unless ``serve`` itself is stuck; it restarts a server by itself
    /health/ready     200 while the server can serve, 503 with the reasons otherwise

Nothing is asked of the server to answer, so a probe costs nothing and is quick under any load.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trtllm_bls.errors import SetupError
from trtllm_bls.launcher.watch import Watch

_STUCK_S = 60.0  # the watch looks twice a second
_CONNECTION_S = 5.0


class HealthState:
    """How the server is. Written by the supervisor, read by the endpoint's threads."""

    def __init__(self) -> None:
        self.started = False
        self.restarts = 0
        self.draining = False
        self._watch: Watch | None = None
        self._reason = "the server is starting"

    @contextmanager
    def serving(self, watch: Watch) -> Iterator[None]:
        """The server is up, and looked at by ``watch``."""
        self.started = True
        self._watch = watch
        try:
            yield
        finally:
            self._watch, self._reason = None, "the server has ended"

    def restarting(self, reason: str) -> None:
        """The server has failed and will be started again."""
        self.restarts += 1
        self._reason = f"restarting: {reason}"

    def answer(self, question: str) -> dict[str, Any] | None:
        """The body for ``live``, ``ready`` or ``startup``; ``None`` for anything else."""
        reasons = {"live": self._not_live, "ready": self._not_ready, "startup": self._not_started}
        if question not in reasons:
            return None
        found = reasons[question]()
        return {"ok": not found, "reasons": found, "restarts": self.restarts}

    def _not_live(self) -> list[str]:
        watch = self._watch
        if watch is not None and time.monotonic() - watch.looked_at > _STUCK_S:
            return ["the watch over the server is stuck"]
        return []

    def _not_started(self) -> list[str]:
        return [] if self.started else [self._reason]

    def _not_ready(self) -> list[str]:
        watch = self._watch
        if watch is None:
            return [self._reason]
        return [*(["the server is draining"] if self.draining else []), *watch.verdict.reasons]


class HealthEndpoint:
    """Answers on ``host:port`` until closed; a port of 0 is any free one. Raises ``SetupError``."""

    def __init__(self, host: str, port: int, state: HealthState) -> None:
        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        class Handler(_Handler):
            health = state

        try:
            self._http = Server((host, port), Handler)
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise SetupError(
                f"port {port} on {host}: {problem}; "
                "stop what uses it or choose another with --health-port (0 = any free port)"
            ) from error
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="health-endpoint", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    health: HealthState
    timeout = _CONNECTION_S  # of a client that says nothing

    def do_GET(self) -> None:
        prefix, _, question = self.path.partition("?")[0].rpartition("/")
        answer = self.health.answer(question) if prefix == "/health" else None
        if answer is None:
            self._reply(HTTPStatus.NOT_FOUND, {"error": "use /health/live, ready or startup"})
        else:
            ok = HTTPStatus.OK if answer["ok"] else HTTPStatus.SERVICE_UNAVAILABLE
            self._reply(ok, answer)

    def _reply(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds, and are not news."""
