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
    """Return the OpenAI API as an ASGI application, for uvicorn, gunicorn, Ray Serve or a test.

    ``parameters`` are the parameters of ``tensorrt_llm_bls`` (docs/parameters.md), such as
    ``engine="trtllm://host:50051"``, ``tokenizer_dir`` and ``max_streams``. Others come from the
    environment (``TRTLLM_BLS_…``), then from ``model_repository``. ``settings`` are the settings of
    the API. By default its ``model_names`` is the name of the tokenizer's directory, and its
    ``keys`` come from ``api_keys_file`` and ``TRTLLM_BLS_API_KEYS``. Its ``status_dir`` is always
    the parameter's.

    Each process needs an application of its own, and with ``status_dir`` a directory of its own.
    The drain of an earlier process is removed from that directory. The server that hosts the
    application limits connections and decides who reaches it. It must run the lifespan: that closes
    the engine's connections. Raises ``SetupError`` for settings that cannot be used.
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
    bls_parameters = read_parameters(model_repository, texts)
    settings = settings or ApiSettings()
    pipelines = settings.pipelines
    if not pipelines and model_repository:
        pipelines = served_pipelines(model_repository)
    settings = replace(
        settings,
        model_names=settings.model_names or (bls_parameters.tokenizer_dir.name,),
        keys=settings.keys or read_keys(api_keys_file),
        status_dir=bls_parameters.status_dir,
        pipelines=pipelines,
    )
    if bls_parameters.status_dir:
        StatusDirectory(bls_parameters.status_dir).forget_drain()
    return create_app(Deployment(bls_parameters, model_name=settings.model_names[0]), settings)
