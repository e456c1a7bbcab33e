"""The TLS of the connection to an engine: which authority to trust, which certificate to show."""

from __future__ import annotations

import ssl
from pathlib import Path

from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.parameters import BlsParameters


def engine_tls(parameters: BlsParameters) -> ssl.SSLContext | None:
    """Make the context that the parameters ``engine_tls_*`` describe; ``None`` = no TLS.

    Raises ``SettingsError`` for parameters that contradict each other and for unusable files.
    """
    ca = parameters.engine_tls_ca
    pin = parameters.engine_tls_pin
    cert = parameters.engine_tls_cert
    key = parameters.engine_tls_key
    files = [path for path in (pin, ca, cert, key) if path]
    if not files:
        return None
    if ca is None and pin is None:
        raise SettingsError(
            "parameter engine_tls_ca is empty: name the authorities to trust at engine_url"
        )
    if (cert is None) != (key is None):
        raise SettingsError("parameters engine_tls_cert and engine_tls_key: set both or neither")
    try:
        context = trusting(pin) if pin is not None else ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl's own errors are among them
        paths = ", ".join(map(str, files))
        raise SettingsError(f"parameters engine_tls_*: {paths}: not usable: {error}") from error
    return context


def trusting(certificate: Path) -> ssl.SSLContext:
    """Make a context that trusts only the first certificate of the file, whatever names it has.

    Raises ``OSError`` or ``ValueError`` if the file cannot be read or holds no certificate.
    """
    text = certificate.read_text(encoding="ascii")
    text = text[text.find("-----BEGIN CERT") :]
    body, end, _ = text.partition("-----END CERTIFICATE-----")
    context = ssl.create_default_context(cadata=body + end)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
