"""Two commands, ``upgrade`` and ``serve``, and clients of an old repository read what they read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.server_settings import DEMO, free_ports
from tests.live.test_llm_api import post
from tests.models.test_upgrade import opened, upgraded
from trtllm_bls.operate.tritonserver import TritonServer

ASKED = {"text_input": "The answer of the engine is", "max_tokens": 12}


@pytest.mark.slow  # its files: tests/models/test_upgrade.py
def test_an_upgraded_repository_answers(server: TritonServer, tmp_path: Path) -> None:
    """Written by 0.1.0; by each model with text."""
    repository = opened("0.1.0", "embedded", tmp_path)
    assert upgraded(repository).exit_code == 0
    with TritonServer(free_ports(model_repository=repository, model=DEMO / "target")) as running:
        for model in ("tensorrt_llm_bls", "ensemble"):
            old, new = (
                json.loads(post(each, f"{model}/generate", ASKED))["text_output"]
                for each in (running, server)
            )
            assert old == new != ""
