"""The engine under test, and prompts whose greedy answer it is sure of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

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
    from trtllm_bls.launcher import TritonServer


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/conformance --help`` shows them."""
    add_options(parser)


@pytest.fixture(scope="session")
def deployment(request: pytest.FixtureRequest) -> Deployment:
    """Where the engine is and what it can do."""
    asked = read_options(request.config)
    if asked.url:
        with connected(asked.url, asked.verifier or asked.model) as verifier:
            return filled_in(asked, verifier.parameters)
    from tests.helpers.server_settings import DEMO

    server: TritonServer = request.getfixturevalue("server")
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
        pytest.skip("this engine takes no drafts (--conformance-max-draft-len)")
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
        pytest.skip("--conformance-no-logits: the engine does not gather them")
