"""The server of these tests, which has a process for each pipeline.

It ends with the last test here: its processes take 5 GB, and a sixth of a core while they wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.watched import watched
from tests.live.conftest import echo_settings
from tests.live.pipelines import LOAD_S, Lines, with_pipelines
from trtllm_bls.operate.tritonserver import TritonServer


@pytest.fixture(scope="package")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """All pipelines on one server."""
    scratch = tmp_path_factory.mktemp("pipelines")
    settings = with_pipelines(echo_settings(scratch, ready_timeout=LOAD_S))
    with watched(settings, "pipelines", recent=Lines()) as running:
        yield running
