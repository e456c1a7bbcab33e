"""The ports of a server: free ones chosen, busy ones refused before anything starts, and their TLS.

A port that was free can be taken before the server binds it; the server then says so and
``TritonServer`` chooses again.
"""

from __future__ import annotations

import http.client
import ssl
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trtllm_bls.client.client import Tls
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.command_options import ServeSettings, listen, option
from trtllm_bls.settings.engine_tls import trusting


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
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def choose(settings: ServeSettings, behind_http: bool = False) -> Ports:
    """Ports as asked for, with every 0 replaced by a free one; raises ``SetupError`` if busy.

    ``behind_http``: a program of ours answers at ``http_port``. Triton's own HTTP is then at
    ``triton_http_port``, or at any port of this machine alone.
    """
    host, plain_host = settings.host, settings.plain_host
    http_port, http_host = "http_port", plain_host
    with ExitStack() as sockets:  # all are open at once, so that no port is chosen twice
        if behind_http:
            sockets.enter_context(listen(host, settings.http_port, "--http-port"))
            http_port = "triton_http_port"
            http_host = "127.0.0.1" if settings.triton_http_port is None else host
        chosen = []
        hosts = {http_port: http_host, "grpc_port": host, "metrics_port": plain_host}
        for field, address in hosts.items():
            listener = listen(address, getattr(settings, field) or 0, option(field))
            chosen.append(int(sockets.enter_context(listener).getsockname()[1]))
    return Ports(host, http_host, plain_host, *chosen)


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


def own_tls(settings: ServeSettings) -> Tls | None:
    """TLS for a client that trusts exactly the server's certificate; ``None`` without TLS.

    If the server asks clients for a certificate, this client presents that of ``tensorrt_llm_bls``.
    Raises ``SettingsError`` for a certificate that no client could verify.
    """
    cert, key, authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:
        return None
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key)
        if authority is not None:
            server.load_verify_locations(authority)
        # ``getpeercert`` decodes only a certificate that a handshake has verified.
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        answering = server.wrap_bio(up, down, server_side=True)
        asking = trusting(cert).wrap_bio(down, up)
        for side in (asking, answering) * 3:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        peer: dict[str, Any] = dict(asking.getpeercert() or {})
    except (OSError, ValueError) as error:  # of which ssl's own are kinds
        files = f"--tls-cert {cert}, --tls-key {key}"
        files += f", --tls-client-ca {authority}" if authority else ""
        raise SettingsError(f"{files}: not usable: {error}") from error
    # A name in the certificate, since the address that the server listens at need not be one.
    names = [name for _, name in peer.get("subjectAltName", ())]
    for part in peer.get("subject", ()):
        names += [name for kind, name in part if kind == "commonName"]
    named = {row.parameter: Path(row.value) for row in settings.overrides if authority}
    return Tls(
        root_certificates=cert,
        certificate_chain=named.get("engine_tls_cert"),
        private_key=named.get("engine_tls_key"),
        server_name=names[0].replace("*", "any") if names else None,
    )


def curl_tls(settings: ServeSettings) -> str:
    """curl's options for a port with TLS. ``-k``: the certificate need not name the address."""
    if settings.tls_cert is None:
        return ""
    return " -k" if settings.tls_client_ca is None else ' -k --cert "$CERT" --key "$CERT_KEY"'
