"""``serve --decoupled false``: what is announced works, one answer to a request."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.live.conftest import echo_settings
from trtllm_bls.launcher import TritonServer
from trtllm_bls.launcher.terminal import announcement


def test_the_announced_request_is_answered_in_one_piece(tmp_path: Path) -> None:
    """Several processes of the orchestrator, none of which streams."""
    settings = echo_settings(tmp_path, "grpc", bls_instances=2, decoupled=False)
    with TritonServer(settings) as server:
        curl = announcement(server, health_port=0).splitlines()[-1]
        assert "/generate " in curl
        told = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["text_output"].strip()
