"""How ``serve`` reaches its own gRPC port where that has TLS."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtllm_bls.client import Tls
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings import ServeSettings


def own_tls(settings: ServeSettings) -> Tls | None:
    """Trusts exactly the server's certificate; ``None`` where the port has no TLS.

    Clients may need a certificate too: then it shows that of ``tensorrt_llm_bls``. Raises
    ``SettingsError`` for a certificate that nobody could trust.
    """
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None or key is None:
        return None
    named = {row.parameter: row.value for row in settings.overrides}
    shown = {
        field: Path(named[parameter])
        for field, parameter in (
            ("certificate_chain", "engine_tls_cert"),
            ("private_key", "engine_tls_key"),
        )
        if settings.tls_client_ca is not None and parameter in named
    }
    try:
        return Tls(root_certificates=cert, server_name=_named_by(cert, key), **shown)
    except (OSError, ValueError) as error:  # of which ssl's own are kinds
        raise SettingsError(f"--tls-cert {cert}, --tls-key {key}: not usable: {error}") from error


def _named_by(cert: Path, key: Path) -> str | None:
    """A name in the certificate, which need not be the address that the server listens at."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    text = cert.read_text(encoding="ascii")
    first, end, _ = text[text.find("-----BEGIN CERT") :].partition("-----END CERTIFICATE-----")
    client = ssl.create_default_context(cadata=first + end)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    peer: dict[str, Any] = _handshake(server, client).getpeercert() or {}
    names = [name for _, name in peer.get("subjectAltName", ())]
    names += [
        name for part in peer.get("subject", ()) for kind, name in part if kind == "commonName"
    ]
    return str(names[0]).replace("*", "any") if names else None


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """In memory; the client's side of it. Python decodes only what it has verified."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    answering = server.wrap_bio(up, down, server_side=True)
    asking = client.wrap_bio(down, up)
    for _ in range(3):
        for side in (asking, answering):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return asking
