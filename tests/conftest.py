"""The server that ``tests/live`` and ``tests/conformance`` share, started once per session.

The package is imported only where the server is started: the conformance suite also runs where
there is nothing but a client.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

with suppress(ImportError):  # before any tokenizer, which would hide it from transformers for good
    import torch  # noqa: F401
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # How fast cases are made says how busy the machine is, and nothing about the code.
    busy = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("busy machines", **busy)
    settings.load_profile("busy machines")

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

LIVE = frozenset(Path(__file__).parent / name for name in ("live", "conformance", "reliability"))
# Fixtures of the session that start a server: tests that share one run in the same worker.
SHARED_SERVERS = ("server", "echo", "parts", "deployment")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would spread the tests of one server silently."""
    if config.getoption("dist", "no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError("pytest-xdist 3.8 needs pytest<9.2 for --dist loadgroup")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what needs a server ``live``, and spread it over the workers of ``--dist loadgroup``.

    Tests that share a server come first. Those that start servers of their own are spread one by
    one after them, so that all workers end at about the same time.
    """
    for item in items:
        if isinstance(item, pytest.Function) and not LIVE.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.live)
            if group := _shared_server(item):
                item.add_marker(pytest.mark.xdist_group(group))
    yield
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def _shared_server(item: pytest.Function) -> str:
    """The name of the server that this test shares with others, or nothing if it shares none."""
    found = {name: made[-1] for name, made in item._fixtureinfo.name2fixturedefs.items()}
    parameters = getattr(item, "callspec", None)
    which = (parameters.params if parameters else {}).get
    for name in SHARED_SERVERS:
        if name in found and found[name].scope == "session":
            kind = which("transport") or which("engine_kind") or ""
            return "server" if kind == "embedded" else f"{name} {kind}".strip()
    own = any(made.scope == "module" for made in found.values())
    return item.path.stem if own else ""


@pytest.fixture(autouse=True)
def _fresh_logger() -> None:
    """A model that was loaded in this process sends the package's log to its own Triton: what the
    next test does not find in the log would prove nothing."""
    logger = logging.getLogger("trtllm_bls")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """What a user gets: the demo model and its draft model on the embedded engine."""
    from tests.helpers.server_settings import DEMO, free_ports
    from trtllm_bls.operate.tritonserver import TritonServer
    from trtllm_bls.settings.command_options import Override

    told = Override("tensorrt_llm", "expose_kv_cache_metrics", "true")  # for the conformance suite
    # One thread: several that wait for each other are ten times slower where cores are contended.
    settings = free_ports(
        model=DEMO / "target", draft_model=DEMO / "draft", threads=1, overrides=(told,)
    )
    with TritonServer(settings) as running:
        yield running
