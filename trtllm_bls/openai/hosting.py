"""The OpenAI API as an application that another server hosts (docs/openai.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from trtllm_bls.openai.api_settings import ApiSettings


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
    from trtllm_bls.http.keys import read_keys
    from trtllm_bls.openai.api_settings import ApiSettings
    from trtllm_bls.openai.app import create_app
    from trtllm_bls.openai.openai_command import read_parameters
    from trtllm_bls.orchestrator.deployment import Deployment
    from trtllm_bls.orchestrator.log_lines import log_to_stderr
    from trtllm_bls.orchestrator.status import StatusDirectory
    from trtllm_bls.settings.model_config import served_pipelines

    log_to_stderr("openai")
    texts = {name: str(value) for name, value in parameters.items()}
    read = read_parameters(model_repository, texts)
    settings = settings or ApiSettings()
    settings = replace(
        settings,
        model_names=settings.model_names or (read.tokenizer_dir.name,),
        keys=settings.keys or read_keys(api_keys_file),
        status_dir=read.status_dir,
        pipelines=settings.pipelines
        or (served_pipelines(model_repository) if model_repository else ()),
    )
    if read.status_dir:
        StatusDirectory(read.status_dir).forget_drain()
    return create_app(Deployment(read, model_name=settings.model_names[0]), settings)
