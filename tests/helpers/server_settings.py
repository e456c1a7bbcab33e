"""What all tests against real tritonservers share: where things are, and settings on free ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_bls.settings.command_options import ServeSettings

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets" / "demo"


def free_ports(**more: Any) -> ServeSettings:
    """Settings of a server that takes whichever ports are free."""
    return ServeSettings(http_port=0, grpc_port=0, metrics_port=0, **more)
