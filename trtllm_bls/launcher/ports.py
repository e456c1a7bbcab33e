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
    """Where Triton listens: gRPC at ``host``, HTTP at ``http_host``, metrics at ``plain_host``."""

    host: str
    http_host: str
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
        return f"http://{reachable(self.http_host)}:{self.http}"

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


def choose(settings: ServeSettings, behind_http: bool = False) -> Ports:
    """Ports as asked for, with every 0 replaced by a free one; raises ``SetupError`` if busy.

    ``behind_http``: a program of ours answers at ``http_port``. Triton's own HTTP is then at
    ``triton_http_port``, or at any port of this machine alone.
    """
    hosts = {"grpc_port": settings.host, "metrics_port": settings.plain_host}
    if behind_http:
        is_open = settings.triton_http_port is not None
        hosts = {"triton_http_port": settings.host if is_open else "127.0.0.1", **hosts}
    else:
        hosts = {"http_port": settings.plain_host, **hosts}
    chosen = []
    with ExitStack() as held:  # keeps all sockets open, so that no port is chosen twice
        if behind_http:
            held.enter_context(listen(settings.host, settings.http_port, "--http-port"))
        for field, host in hosts.items():
            port = getattr(settings, field) or 0
            listening = held.enter_context(listen(host, port, option(field)))
            chosen.append(int(listening.getsockname()[1]))
    return Ports(settings.host, next(iter(hosts.values())), settings.plain_host, *chosen)
