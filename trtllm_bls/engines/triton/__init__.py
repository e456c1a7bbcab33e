"""A Triton model as an engine: over gRPC (``grpc``) or Triton's BLS API (``bls``).

The parameter ``engine_transport`` decides, and nothing changes it at run time. ``auto`` is gRPC to
the server that this process is part of; ``grpc`` is gRPC to whatever server ``engine_url`` names.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from trtllm_bls.engines.triton.bls import BlsEngine
from trtllm_bls.engines.triton.grpc import GrpcEngine
from trtllm_bls.errors import SetupError


def triton_engine(
    name: str,
    *,
    transport: str,
    url: str,
    pb_utils: Any,
    vocab_size: int,
    max_streams: int,
    stall_seconds: float,
    tls: ssl.SSLContext | None = None,
    repository: Path | None = None,
) -> GrpcEngine | BlsEngine:
    """The engine of the model ``name``. ``transport``: auto, bls or grpc; ``url``: host:port.

    ``repository`` is the model repository on disk, where the BLS engine reads what a model
    declares. ``pb_utils`` are Triton's utilities, ``None`` outside of its Python models. Raises
    ``SetupError`` for BLS there.
    """
    if transport != "bls":
        own_server = transport == "auto" and pb_utils is not None
        return GrpcEngine(url, name, vocab_size, stall_seconds, tls, own_server)
    if pb_utils is None:
        raise SetupError(f"engine_transport: bls reaches {name} inside Triton only; use grpc")
    return BlsEngine(pb_utils, name, repository, vocab_size, max_streams, stall_seconds)
