"""Is every model ready, by the log first, then by the server's answer?

The server listens only after all models have loaded, so progress comes from the log; that it
serves is believed when it says so over HTTP and its other two ports accept connections.
"""

from __future__ import annotations

import http.client
import socket
from urllib.parse import quote

from trtllm_bls.launcher.ports import Ports

_ANSWER_S = 2.0


class Readiness:
    """What is known so far; ``ask`` finds out more."""

    def __init__(self, ports: Ports, models: tuple[str, ...]) -> None:
        self.loaded: list[str] = []
        self.missing = list(models)
        self.complete = False
        self._ports = ports
        self._host = ports.reachable_host.strip("[]")
        self._plain_host = ports.reachable_plain_host.strip("[]")

    def newly_loaded(self, log: set[str]) -> list[str]:
        """Models that the log reports loaded since the last call."""
        fresh = [model for model in self.missing if model in log and model not in self.loaded]
        self.loaded += fresh
        return fresh

    def ask(self) -> None:
        """Ask about the models that were not ready at the last call."""
        while self.missing and _model_ready(self._plain_host, self._ports.http, self.missing[0]):
            self.missing.pop(0)
        self.complete = not self.missing and all(
            _accepts(host, port)
            for host, port in (
                (self._host, self._ports.grpc),
                (self._plain_host, self._ports.metrics),
            )
        )


def _model_ready(host: str, port: int, model: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", f"/v2/models/{quote(model)}/ready")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True
