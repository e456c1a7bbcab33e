"""A server whose engine recites, and the published client for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.helpers.openai_server import RunningApi, serving
from tests.helpers.scripted_text import saying
from trtllm_bls.engines.base import Engine

SAYS = "jumped over 🙂 and 你好, twice."
Connect = Callable[..., tuple[RunningApi, openai.OpenAI]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Starts servers: ``connect(engine, **settings)``; each with a client that never retries."""
    with ExitStack() as stack:

        def start(
            engine: Engine | None = None, key: str = "any", **settings: Any
        ) -> tuple[RunningApi, openai.OpenAI]:
            api = stack.enter_context(serving(engine or saying(SAYS), **settings))
            # These servers speak HTTP; to read the certificates takes 20 ms for each client.
            plain = openai.DefaultHttpxClient(verify=False)
            client = openai.OpenAI(
                base_url=f"{api.url}/v1", api_key=key, max_retries=0, http_client=plain
            )
            return api, stack.enter_context(client)

        yield start
