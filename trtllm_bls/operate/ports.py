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
    """Triton's ports: gRPC's at ``host``, HTTP's at ``http_host``, metrics' at ``plain_host``."""

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
    """Return the host to connect to from this machine, bracketed if it is an IPv6 address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in host:
        return f"[{host}]"
    return host


def choose(settings: ServeSettings, behind_http: bool = False) -> Ports:
    """Choose the ports of the settings, and a free one for every 0.

    Raises ``SetupError`` for a busy port. With ``behind_http`` a program of ours answers at
    ``http_port``. Triton's own HTTP is then at ``triton_http_port``, or at any port of this machine
    alone.
    """
    host = settings.host
    plain_host = settings.plain_host
    http_host = plain_host
    http_field = "http_port"
    with ExitStack() as sockets:  # all are open at once, so that no port is chosen twice
        if behind_http:
            sockets.enter_context(listen(host, settings.http_port, "--http-port"))
            http_field = "triton_http_port"
            http_host = host
            if settings.triton_http_port is None:
                http_host = "127.0.0.1"
        ports = []
        hosts = {http_field: http_host, "grpc_port": host, "metrics_port": plain_host}
        for field, address in hosts.items():
            listener = listen(address, getattr(settings, field) or 0, option(field))
            ports.append(int(sockets.enter_context(listener).getsockname()[1]))
    return Ports(host, http_host, plain_host, *ports)


def ask(url: str, timeout: float, context: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """GET ``url`` on one of our ports, past any proxy; return status and body.

    Raises ``OSError``.
    """
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
    """Make the TLS of a client that trusts exactly the server's certificate; ``None`` without TLS.

    If the server asks clients for a certificate, this client presents that of ``tensorrt_llm_bls``.
    Raises ``SettingsError`` for a certificate that no client could verify.
    """
    cert = settings.tls_cert
    key = settings.tls_key
    authority = settings.tls_client_ca
    if cert is None or key is None:
        return None
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key)
        if authority is not None:
            server.load_verify_locations(authority)
        # ``getpeercert`` decodes only a certificate that a handshake has verified.
        to_server = ssl.MemoryBIO()
        to_client = ssl.MemoryBIO()
        server_side = server.wrap_bio(to_server, to_client, server_side=True)
        client_side = trusting(cert).wrap_bio(to_client, to_server)
        for side in (client_side, server_side) * 3:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        peer: dict[str, Any] = dict(client_side.getpeercert() or {})
    except (OSError, ValueError) as error:  # ssl's own errors are among them
        files = f"--tls-cert {cert}, --tls-key {key}"
        if authority:
            files += f", --tls-client-ca {authority}"
        raise SettingsError(f"{files}: not usable: {error}") from error
    # A name in the certificate, since the address that the server listens at need not be one.
    names = [name for _, name in peer.get("subjectAltName", ())]
    for part in peer.get("subject", ()):
        names += [name for kind, name in part if kind == "commonName"]
    server_name = None
    if names:
        server_name = names[0].replace("*", "any")
    client_files: dict[str, Path] = {}
    if authority:
        client_files = {row.parameter: Path(row.value) for row in settings.overrides}
    return Tls(
        root_certificates=cert,
        certificate_chain=client_files.get("engine_tls_cert"),
        private_key=client_files.get("engine_tls_key"),
        server_name=server_name,
    )


def curl_tls(settings: ServeSettings) -> str:
    """Return curl's options for a port with TLS.

    ``-k`` is among them, since the certificate need not name the address.
    """
    if settings.tls_cert is None:
        return ""
    if settings.tls_client_ca is None:
        return " -k"
    return ' -k --cert "$CERT" --key "$CERT_KEY"'
