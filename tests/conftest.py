"""The server that ``tests/live`` and ``tests/conformance`` share, started once per session.

The package is imported only where the server is started: the conformance suite also runs where
there is nothing but a client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

with suppress(ImportError):  # before any tokenizer, which would hide it from transformers for good
    import torch  # noqa: F401

if TYPE_CHECKING:
    from trtllm_bls.launcher import TritonServer

LIVE = frozenset(Path(__file__).parent / name for name in ("live", "conformance", "reliability"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in the directories that need a server is marked ``live``."""
    for item in items:
        if not LIVE.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.live)


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """What a user gets: the demo model and its draft model on the embedded engine."""
    from tests.helpers.server_settings import DEMO, free_ports
    from trtllm_bls.launcher import TritonServer
    from trtllm_bls.settings import Override

    told = Override("tensorrt_llm", "expose_kv_cache_metrics", "true")  # for the conformance suite
    # One thread: several that wait for each other are ten times slower where cores are contended.
    settings = free_ports(
        model=DEMO / "target", draft_model=DEMO / "draft", threads=1, overrides=(told,)
    )
    with TritonServer(settings) as running:
        yield running
