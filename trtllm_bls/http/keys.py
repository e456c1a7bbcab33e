"""The API keys of HTTP clients.

``serve`` reads them, too, without the packages that the OpenAI API needs.
"""

from __future__ import annotations

import hmac
import os
from hashlib import sha256
from pathlib import Path

from trtllm_bls.errors import SettingsError

KEYS_VARIABLE = "TRTLLM_BLS_API_KEYS"


def read_keys(file: Path | None) -> tuple[bytes, ...]:
    """Return digests of the keys in ``file``, one a line, and in the variable, between commas.

    Blank lines and lines that begin with ``#`` are skipped. Raises ``SettingsError``.
    """
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--api-keys-file {file}: cannot be read: {error}") from error
        file_keys = [line for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise SettingsError(f"--api-keys-file {file}: holds no key; write one on each line")
        keys += file_keys
    return tuple(sha256(key.strip().encode()).digest() for key in keys if key.strip())


def salt_of(key: str, cache_salt: str = "") -> str:
    """Return the KV cache's salt of one key. No other key has it, and it does not reveal the key.

    ``cache_salt``: the salt that the request named.
    """
    return sha256(f"{key} {cache_salt}".encode()).hexdigest()


def key_of(keys: tuple[bytes, ...], authorization: bytes) -> bytes | None:
    """Return the digest of the header's key if it is one of ``keys``; compares in constant time."""
    scheme, _, key = authorization.partition(b" ")
    digest = sha256(key.strip()).digest()
    matches = [hmac.compare_digest(digest, key_digest) for key_digest in keys]
    if scheme.lower() == b"bearer" and any(matches):
        return digest
    return None
