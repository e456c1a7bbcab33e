"""A Triton model as an engine: over gRPC (``grpc``) or Triton's BLS API (``bls``).

The parameter ``engine_transport`` decides, and nothing changes it at run time. ``auto`` is gRPC to
the server that this process is part of; ``grpc`` is gRPC to whatever server ``engine_url`` names.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_bls.engines.triton.bls import BlsEngine
from trtllm_bls.engines.triton.grpc import GrpcEngine
from trtllm_bls.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Route:
    """How engines are reached. ``transport``: auto, bls or grpc; ``url``: host:port.

    ``repository`` is the model repository on disk, where the BLS engine reads what a model
    declares. ``pb_utils`` are Triton's utilities, ``None`` outside of its Python models.
    """

    transport: str
    url: str
    pb_utils: Any
    vocab_size: int
    max_streams: int
    stall_seconds: float
    tls: ssl.SSLContext | None = None
    repository: Path | None = None


def triton_engine(name: str, route: Route) -> GrpcEngine | BlsEngine:
    """The engine of the model ``name``. Raises ``SetupError`` for BLS outside of Triton."""
    if route.transport != "bls":
        return GrpcEngine(
            route.url,
            name,
            route.vocab_size,
            route.stall_seconds,
            route.tls,
            own_server=route.transport == "auto" and route.pb_utils is not None,
        )
    if route.pb_utils is None:
        raise SetupError(f"engine_transport: bls reaches {name} inside Triton only; use grpc")
    return BlsEngine(
        route.pb_utils,
        name,
        route.repository,
        route.vocab_size,
        route.max_streams,
        route.stall_seconds,
    )
