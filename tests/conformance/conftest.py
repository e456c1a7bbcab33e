"""The engine under test, and prompts whose greedy answer it is sure of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.conformance import engines
from tests.conformance.deployment import (
    Deployment,
    add_options,
    filled_in,
    of_our_own,
    read_options,
)
from tests.conformance.engine_client import Engine
from tests.conformance.prompts import Story, find_stories

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/conformance --help`` shows them."""
    add_options(parser)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once per engine: those of this machine, or the one that was named."""
    if "deployment" in metafunc.fixturenames:
        asked = read_options(metafunc.config)
        kinds = ["named"] if asked.url else asked.engines.split(",")
        metafunc.parametrize("engine_kind", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine_kind(request: pytest.FixtureRequest) -> str:
    """Which engine is tested."""
    return str(request.param)


@pytest.fixture(scope="session")
def deployment(
    engine_kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Where the engine is and what it can do."""
    asked = read_options(request.config)
    if engine_kind == "named":
        with connected(asked.url, asked.verifier or asked.model) as verifier:
            yield filled_in(asked, verifier.parameters)
    elif engine_kind == "embedded":
        yield _of_our_own(asked, request.getfixturevalue("server"))
    elif engine_kind.startswith("cpp-"):
        scratch = tmp_path_factory.mktemp("cpp")
        with engines.declared_as_cpp(engine_kind.removeprefix("cpp-"), scratch) as server:
            yield _of_our_own(asked, server)
    elif engine_kind == "trtllm":
        with engines.before_a_service() as server:
            yield _of_our_own(replace(asked, no_logits=True), server)
    else:
        release = engine_kind.removeprefix("llm_api").removeprefix("-") or "1.2.1"
        scratch = tmp_path_factory.mktemp("llm-api")
        with engines.with_the_llm_api(release, scratch) as server:
            yield _of_our_own(replace(asked, no_logits=True), server)


def _of_our_own(asked: Deployment, server: TritonServer) -> Deployment:
    from tests.helpers.server_settings import DEMO

    with connected(server.grpc_url, asked.model) as engine:
        slots = int(engine.parameters["max_batch"])
        own = of_our_own(asked, server.grpc_url, DEMO / "target", slots)
        return filled_in(own, engine.parameters)


@contextmanager
def connected(url: str, model: str) -> Iterator[Engine]:
    """A model, or the end of the run where it cannot be reached."""
    try:
        engine = Engine(url, model)
    except grpc.RpcError as error:
        pytest.exit(f"{model} at {url}: {error.details()}", returncode=4)
    with closing(engine):
        yield engine


@pytest.fixture(scope="session")
def engine(deployment: Deployment) -> Iterator[Engine]:
    """The model under test."""
    with connected(deployment.url, deployment.model) as engine:
        if not engine.decoupled:
            pytest.exit(f"{deployment.model} is not decoupled: it can neither stream nor batch", 1)
        yield engine


@pytest.fixture(scope="session")
def verifier(deployment: Deployment, engine: Engine) -> Iterator[Engine]:
    """The model that verifies drafts."""
    if not deployment.max_draft_len:
        pytest.skip("no drafts: --conformance-max-draft-len N runs it")
    if not deployment.verifier:
        engine.needs("draft_input_ids")
        yield engine
        return
    with connected(deployment.url, deployment.verifier) as verifier:
        yield verifier


@pytest.fixture(scope="session")
def stories(deployment: Deployment, engine: Engine) -> list[Story]:
    """Prompts with their greedy answers, the surest first."""
    return find_stories(engine, deployment.vocab_size, logits=not deployment.no_logits)


@pytest.fixture
def story(stories: list[Story]) -> Story:
    """The surest of them."""
    return stories[0]


@pytest.fixture
def logits(deployment: Deployment) -> None:
    """Marks a test that needs logits."""
    if deployment.no_logits:
        pytest.skip("--conformance-no-logits: an engine that gathers logits runs it")
