"""What all tests against real tritonservers share: where things are, and settings on free ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.ports import unused_ports
from trtllm_bls.settings.command_options import ServeSettings

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets" / "demo"


def free_ports(**more: Any) -> ServeSettings:
    """Return settings of a server on ports of its own.

    One that hangs at its start says which model still loads before the test's own limit ends it.
    """
    http, grpc, metrics = unused_ports(3)
    own = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "ready_timeout": 200}
    return ServeSettings(**own | more)
