"""Answers health probes over HTTP from memory. Run as a script, never imported.

    python -I -S health_server.py DESCRIPTOR ALLOWED

of a listening socket, and of JSON: two lists, hosts and origins that may ask besides this machine.

Standard input brings the answers, a JSON object per line:

- ``startup``, ``live``, ``ready``: the reasons to answer 503 to that probe
- ``restarts``, and ``metrics`` (the text of ``/metrics``)
- ``since``: when it was last ready, by ``time.monotonic()``; null while it is
- ``engines``: each engine elsewhere with what is wrong with it, or "ok"

This process ends at the end of its input, which is the end of ``serve``. If no line comes for a
minute, ``serve`` is stuck, and ``live`` answers 503. It is a process of its own because ``serve``
reads the server's log under the same interpreter lock; a probe must not wait for that.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

if __name__ == "__main__":  # where ``-I`` leaves the package out
    sys.path.append(str(Path(__file__).parents[2]))
from trtllm_bls.http.browsers import browser_problem

_PR_SET_PDEATHSIG = 1
SILENT_S = 60.0
_CONNECTION_S = 5.0
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Handler(BaseHTTPRequestHandler):
    told: ClassVar[dict[str, Any]] = {}
    told_at: ClassVar[float] = 0.0
    allowed: ClassVar[list[list[str]] | None] = None  # None: it listens elsewhere, too
    timeout = _CONNECTION_S  # of a client that says nothing

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        told = (self.headers.get("Host", ""), self.headers.get("Origin", ""))
        if self.allowed is not None and (refused := browser_problem(*told, *self.allowed)):
            self._reply(HTTPStatus(refused[0]), json.dumps({"error": refused[1]}))
            return
        if path == "/metrics":
            self._reply(HTTPStatus.OK, self.told["metrics"], _METRICS)
            return
        prefix, _, question = path.rpartition("/")
        reasons = self.told.get(question) if prefix == "/health" else None
        if not isinstance(reasons, list):
            words = {"error": "use /health/startup, live or ready, or /metrics"}
            self._reply(HTTPStatus.NOT_FOUND, json.dumps(words))
            return
        if question == "live" and time.monotonic() - self.told_at > SILENT_S:
            reasons = ["serve is stuck"]
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        answer = {"ok": not reasons, "reasons": reasons, "restarts": self.told["restarts"]}
        if question == "ready":
            since = self.told["since"]
            answer |= {} if since is None else {"not_ready_seconds": int(time.monotonic() - since)}
            answer |= {"engines": engines} if (engines := self.told["engines"]) else {}
        self._reply(status, json.dumps(answer))

    def _reply(self, status: HTTPStatus, text: str, kind: str = "application/json") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has closed its connection."""


def main(descriptor: int, allowed: str) -> None:
    """Answer from the first line of standard input to its end."""
    # If the parent dies while this process is stopped, it would never read the end of its input.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    listening = socket.socket(fileno=descriptor)
    if ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
        Handler.allowed = json.loads(allowed)
    server = Server(listening.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()  # made by the constructor, and not bound
    server.socket = listening
    answering = threading.Thread(target=server.serve_forever, daemon=True)
    for line in sys.stdin:
        Handler.told, Handler.told_at = json.loads(line), time.monotonic()
        if not answering.is_alive():
            answering.start()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
