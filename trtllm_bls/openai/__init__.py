"""OpenAI's HTTP API in front of the orchestrator: ``trtllm-bls openai``.

``asgi_app`` makes the API for another server to host (docs/openai.md). ``schema`` says what a
request may hold; ``chat`` and ``completions`` make text requests of it and answers of text chunks;
``exchange`` runs them while the client is there; ``app`` has the routes. Nothing here knows Triton:
tokens come from whatever engine the orchestrator has. The keys of the API are read here, since
``serve`` does so without the packages that an API needs.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_bls.errors import SettingsError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from trtllm_bls.openai.app import ApiSettings

KEYS_VARIABLE = "TRTLLM_BLS_API_KEYS"


def asgi_app(
    settings: ApiSettings | None = None,
    *,
    model_repository: Path | None = None,
    api_keys_file: Path | None = None,
    **parameters: str | float | Path,
) -> Starlette:
    """The OpenAI API as an ASGI application, for uvicorn, gunicorn, Ray Serve or a test client.

    ``parameters`` are those of ``tensorrt_llm_bls`` (docs/parameters.md), such as
    ``engine="trtllm://host:50051"``, ``tokenizer_dir`` and ``max_streams``. What is not given comes
    from the environment (``TRTLLM_BLS_…``), then from ``model_repository``. ``settings`` are those
    of the API; its ``model_names`` are the name of the tokenizer's directory unless given, its
    ``keys`` those of ``api_keys_file`` and of ``TRTLLM_BLS_API_KEYS``, and its ``status_dir`` is
    always the parameter's.

    Each process needs an application of its own, and with ``status_dir`` a directory of its own,
    from which an earlier process's drain is removed. The server that hosts the application limits
    connections and decides who reaches it. It must run the lifespan: that closes the engine's
    connections. Raises ``SetupError`` for settings that cannot be used.
    """
    from trtllm_bls.openai.app import ApiSettings, create_app
    from trtllm_bls.openai.command import read_parameters
    from trtllm_bls.services.deployment import Deployment
    from trtllm_bls.services.triton_log import log_to_stderr
    from trtllm_bls.status import StatusDirectory

    log_to_stderr("openai")
    given = {key: str(value) for key, value in parameters.items()}
    read = read_parameters(model_repository, given)
    settings = settings or ApiSettings()
    settings = replace(
        settings,
        model_names=settings.model_names or (read.tokenizer_dir.name,),
        keys=settings.keys or read_keys(api_keys_file),
        status_dir=read.status_dir,
    )
    if read.status_dir:
        StatusDirectory(read.status_dir).forget_drain()
    return create_app(Deployment(read, model_name=settings.model_names[0]), settings)


def read_keys(file: Path | None) -> tuple[bytes, ...]:
    """Digests of the keys in ``file``, one a line, and of those in the variable, with commas.

    Blank lines and lines that begin with ``#`` are skipped. Raises ``SettingsError``.
    """
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--api-keys-file {file}: cannot be read: {error}") from error
        found = [line for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise SettingsError(f"--api-keys-file {file}: holds no key; write one on each line")
        keys += found
    return tuple(sha256(key.strip().encode()).digest() for key in keys if key.strip())


def key_of(keys: tuple[bytes, ...], authorization: bytes) -> bytes | None:
    """Which of ``keys`` the header's value has, compared in constant time."""
    scheme, _, key = authorization.partition(b" ")
    given = sha256(key.strip()).digest()
    matches = [hmac.compare_digest(given, known) for known in keys]
    return given if scheme.lower() == b"bearer" and any(matches) else None
