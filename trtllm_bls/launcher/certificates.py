"""The certificates of ``serve``: TLS for its own ports, and for its own requests to them."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtllm_bls.client import Tls
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.engine_tls import trusting
from trtllm_bls.settings import ServeSettings


def own_tls(settings: ServeSettings) -> Tls | None:
    """TLS for a client that trusts exactly the server's certificate; ``None`` without TLS.

    If the server asks clients for a certificate, this client presents that of ``tensorrt_llm_bls``.
    Raises ``SettingsError`` for a certificate that no client could verify.
    """
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None or key is None:
        return None
    named = {row.parameter: row.value for row in settings.overrides}
    client_files = {
        field: Path(named[parameter])
        for field, parameter in (
            ("certificate_chain", "engine_tls_cert"),
            ("private_key", "engine_tls_key"),
        )
        if settings.tls_client_ca is not None and parameter in named
    }
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key)
        if settings.tls_client_ca is not None:
            server.load_verify_locations(settings.tls_client_ca)
        peer = _handshake(server, trusting(cert)).getpeercert() or {}
    except (OSError, ValueError) as error:  # of which ssl's own are kinds
        ca = settings.tls_client_ca
        files = f"--tls-cert {cert}, --tls-key {key}" + (f", --tls-client-ca {ca}" if ca else "")
        raise SettingsError(f"{files}: not usable: {error}") from error
    # A name in the certificate, since the address that the server listens at need not be one.
    alternatives: Any = peer.get("subjectAltName", ())
    subject: Any = peer.get("subject", ())
    names = [name for _, name in alternatives]
    names += [name for part in subject for kind, name in part if kind == "commonName"]
    named_by = names[0].replace("*", "any") if names else None
    return Tls(root_certificates=cert, server_name=named_by, **client_files)


def client_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """For requests of ``serve`` to its own HTTPS port; trusts what ``own_tls`` trusts."""
    tls = own_tls(settings)
    if tls is None or settings.tls_cert is None:
        return None
    context = trusting(settings.tls_cert)
    if tls.certificate_chain is not None:
        context.load_cert_chain(tls.certificate_chain, tls.private_key)
    return context


def curl_tls(settings: ServeSettings) -> str:
    """curl's options for a port with TLS. ``-k``: the certificate need not name the address."""
    if settings.tls_cert is None:
        return ""
    return " -k" if settings.tls_client_ca is None else ' -k --cert "$CERT" --key "$CERT_KEY"'


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """A TLS handshake in memory; returns the client's side of it.

    ``getpeercert`` decodes only a certificate that a handshake has verified.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    answering = server.wrap_bio(up, down, server_side=True)
    asking = client.wrap_bio(down, up)
    for _ in range(3):
        for side in (asking, answering):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return asking
