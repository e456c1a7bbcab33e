"""The three addresses of a server: free ones chosen, busy ones refused before anything starts.

Owns binding and closing probe sockets. A port that was free can be taken before the server binds
it; the server then says so and ``TritonServer`` chooses again.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from trtllm_bls.errors import SetupError
from trtllm_bls.settings import ServeSettings, option

_FIELDS = ("http_port", "grpc_port", "metrics_port")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Ports:
    """Where one server listens; HTTP and metrics at ``plain_host``, if that is another."""

    host: str
    http: int
    grpc: int
    metrics: int
    plain_host: str = ""

    @property
    def reachable_host(self) -> str:
        """The host to connect to from this machine, bracketed if it is an IPv6 address."""
        return _reachable(self.host)

    @property
    def reachable_plain_host(self) -> str:
        """The same for HTTP and metrics."""
        return _reachable(self.plain_host or self.host)


def _reachable(host: str) -> str:
    host = _EVERYWHERE.get(host, host)
    return f"[{host}]" if ":" in host else host


def choose(settings: ServeSettings) -> Ports:
    """Ports as asked for, with every 0 replaced by a free one; raises ``SetupError`` if busy."""
    with ExitStack() as held:  # all at once, so that no port is chosen twice
        http, grpc, metrics = (_probe(held, settings, field) for field in _FIELDS)
    return Ports(settings.host, http, grpc, metrics, settings.plain_host)


def _probe(held: ExitStack, settings: ServeSettings, field: str) -> int:
    port: int = getattr(settings, field)
    host = settings.host if field == "grpc_port" else settings.plain_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT
    try:
        probe.bind((host, port))
        probe.listen(1)  # two REUSEADDR sockets may bind one port, only one may listen
    except OSError as error:
        problem = error.strerror or str(error)
        raise SetupError(
            f"port {port} on {host}: {problem.lower()}; "
            f"stop what uses it or choose another with {option(field)} (0 = any free port)"
        ) from error
    return int(probe.getsockname()[1])
