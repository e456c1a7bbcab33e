"""Servers whose engine is a script: ``echo`` says the prompt back, once for each transport.

``server``, what a user gets, is in ``tests/conftest.py``, since other suites use it too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_settings import DEMO, ROOT, free_ports
from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import Override, ServeSettings

# BLS loses some errors of Triton 24.10, which then end by this timer; longer than a busy machine
# may take to a first token.
STALL_SECONDS = {"grpc": 120, "bls": 20}


@pytest.fixture(scope="session", params=["grpc", "bls"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def echo(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(echo_settings(tmp_path_factory.mktemp("echo"), transport)) as running:
        yield running


def echo_settings(scratch: Path, transport: str, **more: Any) -> ServeSettings:
    repository = scratch / "models"
    shutil.copytree(ROOT / "models", repository)
    shutil.rmtree(repository / "tensorrt_llm" / "1")
    shutil.copytree(ROOT / "tests" / "live" / "scripted" / "1", repository / "tensorrt_llm" / "1")
    return free_ports(
        model=DEMO / "target",
        model_repository=repository,
        **more,
        overrides=(
            Override("tensorrt_llm_bls", "engine_transport", transport),
            Override("tensorrt_llm_bls", "engine_stall_seconds", str(STALL_SECONDS[transport])),
            Override("tensorrt_llm", "step_ms", "5"),
        ),
    )
