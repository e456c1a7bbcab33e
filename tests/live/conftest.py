"""Real tritonservers, each started once per session on free ports.

``server`` is what a user gets: the demo model on the embedded engine. ``echo`` has a scripted
engine that says the prompt back, and comes once for each transport.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import Override, ServeSettings

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets" / "demo"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.live)


def free_ports(**more: object) -> ServeSettings:
    return ServeSettings(http_port=0, grpc_port=0, metrics_port=0, **more)


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    with TritonServer(free_ports(model=DEMO / "target", draft_model=DEMO / "draft")) as running:
        yield running


@pytest.fixture(scope="session", params=["grpc", "bls"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def echo(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("echo") / "models"
    shutil.copytree(ROOT / "models", repository)
    shutil.rmtree(repository / "tensorrt_llm" / "1")
    shutil.copytree(ROOT / "tests" / "live" / "scripted" / "1", repository / "tensorrt_llm" / "1")
    settings = free_ports(
        model=DEMO / "target",
        model_repository=repository,
        overrides=(
            Override("tensorrt_llm_bls", "engine_transport", transport),
            Override("tensorrt_llm_bls", "engine_stall_seconds", "3"),
            Override("tensorrt_llm", "step_ms", "5"),
        ),
    )
    with TritonServer(settings) as running:
        yield running
