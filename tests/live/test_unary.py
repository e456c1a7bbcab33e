"""``serve --decoupled false``: what is announced works, one answer to a request."""

from __future__ import annotations

import json
import subprocess

from tests.live.conftest import DEMO, free_ports
from trtllm_bls.launcher import TritonServer
from trtllm_bls.launcher.terminal import announcement


def test_the_announced_request_is_answered_in_one_piece() -> None:
    """Several processes of the orchestrator, none of which streams."""
    settings = free_ports(model=DEMO / "target", threads=1, bls_instances=2, decoupled=False)
    with TritonServer(settings) as server:
        curl = announcement(server, health_port=0).splitlines()[-1]
        assert "/generate " in curl
        told = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["text_output"].strip()
