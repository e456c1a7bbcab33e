"""The addresses of a server: free ones chosen, busy ones refused before anything starts.

A port that was free can be taken before the server binds it; the server then says so and
``TritonServer`` chooses again.
"""

from __future__ import annotations

import http.client
import ssl
from contextlib import ExitStack, closing
from dataclasses import dataclass
from urllib.parse import urlsplit

from trtllm_bls.settings import ServeSettings, listen, option

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Ports:
    """Where Triton listens: HTTP and metrics at ``plain_host``, gRPC at ``host``."""

    host: str
    plain_host: str
    http: int
    grpc: int
    metrics: int

    @property
    def grpc_url(self) -> str:
        """``host:port`` to connect to from this machine."""
        return f"{reachable(self.host)}:{self.grpc}"

    @property
    def http_url(self) -> str:
        return f"http://{reachable(self.plain_host)}:{self.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://{reachable(self.plain_host)}:{self.metrics}/metrics"


def reachable(host: str) -> str:
    """The host to connect to from this machine, bracketed if it is an IPv6 address."""
    host = _EVERYWHERE.get(host, host)
    return f"[{host}]" if ":" in host else host


def ask(url: str, timeout: float, context: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """GET ``url`` on one of our ports, ignoring proxies; status and body. Raises ``OSError``."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout)
    if context is not None:
        connection = http.client.HTTPSConnection(address.netloc, timeout=timeout, context=context)
    try:
        with closing(connection):
            connection.request("GET", address.path)
            answer = connection.getresponse()
            return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error


def choose(settings: ServeSettings) -> Ports:
    """Ports as asked for, with every 0 replaced by a free one; raises ``SetupError`` if busy."""
    chosen = []
    with ExitStack() as held:  # keeps all sockets open, so that no port is chosen twice
        for field in ("http_port", "grpc_port", "metrics_port"):
            host = settings.host if field == "grpc_port" else settings.plain_host
            forwarded = field == "http_port" and settings.tls_cert is not None
            port = 0 if forwarded else getattr(settings, field)
            listening = held.enter_context(listen(host, port, option(field)))
            chosen.append(int(listening.getsockname()[1]))
    return Ports(settings.host, settings.plain_host, *chosen)
