"""The addresses of a server: free ones chosen, busy ones refused before anything starts.

A port that was free can be taken before the server binds
it; the server then says so and ``TritonServer`` chooses again.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from trtllm_bls.settings import ServeSettings, listen, option

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Ports:
    """Where Triton listens; for HTTP and metrics at ``plain_host``, if that is another."""

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
    chosen = []
    with ExitStack() as held:  # all at once, so that no port is chosen twice
        for field in ("http_port", "grpc_port", "metrics_port"):
            host = settings.host if field == "grpc_port" else settings.plain_host
            forwarded = field == "http_port" and settings.tls_cert is not None
            port = 0 if forwarded else getattr(settings, field)
            listening = held.enter_context(listen(host, port, option(field)))
            chosen.append(int(listening.getsockname()[1]))
    http, grpc, metrics = chosen
    return Ports(settings.host, http, grpc, metrics, settings.plain_host)
