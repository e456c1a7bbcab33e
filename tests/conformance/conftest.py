"""The engine under test, and prompts whose greedy answer it is sure of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.conformance.deployment import Deployment, add_options, of_our_own, read_options
from tests.conformance.prompts import Story, find_stories
from tests.conformance.talk import Engine

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
        return asked
    from tests.servers import DEMO

    server: TritonServer = request.getfixturevalue("server")
    with closing(Engine(server.grpc_url, asked.model)) as engine:
        return of_our_own(asked, server.grpc_url, DEMO / "target", engine.parameters)


@pytest.fixture(scope="session")
def engine(deployment: Deployment) -> Iterator[Engine]:
    """The model under test."""
    with closing(Engine(deployment.url, deployment.model)) as engine:
        if not engine.decoupled:
            pytest.exit(f"{deployment.model} is not decoupled: it can neither stream nor batch", 1)
        yield engine


@pytest.fixture(scope="session")
def verifier(deployment: Deployment, engine: Engine) -> Iterator[Engine]:
    """The model that verifies drafts."""
    if not deployment.max_draft_len:
        pytest.skip("no --conformance-max-draft-len: this engine takes no drafts")
    engine.needs("draft_input_ids")
    if not deployment.verifier:
        yield engine
        return
    with closing(Engine(deployment.url, deployment.verifier)) as verifier:
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
