"""Choosing how to reach a Triton model: gRPC or Triton's BLS API.

The choice is made at the first request: while models load, the server's port is not open yet.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.bls import BlsEngine
from trtllm_bls.engines.dialect import Dialect
from trtllm_bls.engines.grpc import GrpcEngine
from trtllm_bls.errors import EngineUnavailable

_CONNECT_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Route:
    """How engines are reached; ``transport`` is auto, bls or grpc."""

    transport: str
    url: str
    pb_utils: Any
    vocab_size: int
    max_streams: int
    stall_seconds: float


class TritonModel:
    """One Triton model, opened as an engine when it is first asked for."""

    def __init__(self, name: str, route: Route) -> None:
        self._name = name
        self._route = route
        self._engine: Engine | None = None
        self._lock = asyncio.Lock()

    async def engine(self) -> Engine:
        """Raises ``EngineUnavailable``; the next call then tries again."""
        async with self._lock:
            if self._engine is None:
                self._engine = await _open(self._name, self._route)
            return self._engine

    async def close(self) -> None:
        """Close the engine if it was opened."""
        if self._engine is not None:
            await self._engine.close()


async def _open(name: str, route: Route) -> Engine:
    remote = GrpcEngine(route.url, name, route.vocab_size, route.stall_seconds)
    engine: Engine | None = None
    try:
        engine = await _choose(remote, route)
    finally:
        if engine is not remote:
            await remote.close()
    return engine


async def _choose(remote: GrpcEngine, route: Route) -> Engine:
    name = remote.name
    try:
        dialect = await remote.dialect(timeout=_CONNECT_SECONDS)
    except EngineUnavailable as error:
        # A server without the model may have it soon; without a server there is only BLS.
        if route.transport == "grpc" or await remote.server_answers(_CONNECT_SECONDS):
            raise
        why = "as configured" if route.transport == "bls" else f"no gRPC: {error}"
        log.warning("%s: engine transport bls (%s); tensors of the last release assumed", name, why)
        return _bls(name, route, Dialect())
    if route.transport == "bls":
        log.info("%s: engine transport bls (as configured)", name)
        return _bls(name, route, dialect)
    why = "as configured"
    if route.transport == "auto":
        why = "it cancels for real and delivers every error; Triton's BLS API does not"
    log.info("%s: engine transport grpc at %s (%s)", name, route.url, why)
    return remote


def _bls(name: str, route: Route, dialect: Dialect) -> BlsEngine:
    engine = BlsEngine(route.pb_utils, name, dialect, route.vocab_size, route.max_streams)
    engine.stall_seconds = route.stall_seconds
    return engine
