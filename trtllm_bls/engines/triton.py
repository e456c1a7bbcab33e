"""A Triton model as an engine, over gRPC or over Triton's BLS API, whichever suits.

The choice is made at the first request: while models load, the server's port is not open yet. A
choice of BLS that was made for want of a port is looked at again later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.engines.base import ChunkStream, Engine
from trtllm_bls.engines.triton_bls import BlsEngine
from trtllm_bls.engines.triton_grpc import GrpcEngine
from trtllm_bls.errors import EngineError, EngineUnavailable
from trtllm_bls.types import EngineCapacity, EngineRequest
from trtllm_bls.wire.engine_client import DeployedModel

_CONNECT_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Route:
    """How engines are reached. ``transport``: auto, bls or grpc; ``url``: host:port.

    ``repository`` is the model repository on disk, where the configuration of a model is read that
    cannot be asked for over gRPC.
    """

    transport: str
    url: str
    pb_utils: Any
    vocab_size: int
    max_streams: int
    stall_seconds: float
    tls: ssl.SSLContext | None = None
    repository: Path | None = None


class TritonEngine:
    """The model ``name``, opened when its capacity are first asked for."""

    def __init__(self, name: str, route: Route) -> None:
        self.name = name
        self._route = route
        self._grpc = GrpcEngine(route.url, name, route.vocab_size, route.stall_seconds, route.tls)
        self._bls: BlsEngine | None = None
        self._chosen: Engine | None = None
        self._look_again_at = float("inf")
        self._lock = asyncio.Lock()
        # Once nothing is left to choose, these are the chosen engine's own.
        self.capacity: Callable[[], Coroutine[Any, Any, EngineCapacity]] = self._capacity
        self.generate: Callable[[EngineRequest], ChunkStream] = self._generate

    async def _capacity(self) -> EngineCapacity:
        """Opens the engine if need be. Raises ``EngineUnavailable``; the next call tries again."""
        if self._is_to_choose():
            async with self._lock:
                if self._is_to_choose():  # another request may just have chosen
                    self._chosen = await self._choose()
        assert self._chosen is not None
        if self._look_again_at == float("inf"):
            self.capacity, self.generate = self._chosen.capacity, self._chosen.generate
        return await self._chosen.capacity()

    def _generate(self, request: EngineRequest) -> ChunkStream:
        if self._chosen is None:
            raise EngineUnavailable(f"{self.name}: not asked for its capacity yet")
        return self._chosen.generate(request)

    async def close(self) -> None:
        """Close what was opened."""
        await self._grpc.close()
        if self._bls is not None:
            await self._bls.close()

    def _is_to_choose(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._chosen is None or now > self._look_again_at

    async def _choose(self) -> Engine:
        transport, url = self._route.transport, self._route.url
        if transport != "grpc" and _is_foreign(url):
            return self._by_bls(f"another process than this server listens at {url}")
        try:
            model = await self._grpc.model(_CONNECT_SECONDS)
        except EngineUnavailable as error:
            # A server without the model may have it soon; without a server there is only BLS.
            if transport == "grpc" or await self._grpc.server_answers(_CONNECT_SECONDS):
                raise
            return self._by_bls(f"no gRPC: {error}")
        self._look_again_at = float("inf")
        if transport == "bls":
            return self._by_bls("as configured", model)
        why = "as configured"
        if transport == "auto":
            why = "it cancels for real and delivers every error; Triton's BLS API does not"
        log.info("%s: engine transport grpc at %s (%s)", self.name, url, why)
        return self._grpc

    def _by_bls(self, why: str, model: DeployedModel | None = None) -> Engine:
        """``model`` is what the model declares, where that could be asked."""
        route = self._route
        if model is None and route.transport == "auto":
            self._look_again_at = asyncio.get_running_loop().time() + _LOOK_AGAIN_SECONDS
        if self._bls is None:
            if route.pb_utils is None:
                raise EngineUnavailable(f"{self.name}: {why}")
            model = model or _declared_on_disk(route.repository, self.name)
            self._bls = BlsEngine(
                route.pb_utils, self.name, model, route.vocab_size, route.max_streams
            )
            self._bls.stall_seconds = route.stall_seconds
            log.warning("%s: engine transport bls (%s)", self.name, why)
        return self._bls


def _declared_on_disk(repository: Path | None, name: str) -> DeployedModel:
    """What the model's configuration file declares; TensorRT-LLM's last form if there is none."""
    path = repository / name / "config.pbtxt" if repository else None
    if path is None or not path.is_file():
        log.warning("%s: its config.pbtxt is not there; the last release's tensors assumed", name)
        return DeployedModel()
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise EngineError(f"{name}: its config.pbtxt cannot be read: {error}") from error
    return DeployedModel.of(config)


def listening_processes(url: str) -> set[int]:
    """Who listens at a port of this machine; none where the address is another's.

    Processes of other users cannot be seen.
    """
    host, _, port = url.rpartition(":")
    if host.strip("[]") not in ("localhost", "127.0.0.1", "::1") or not port.isdigit():
        return set()
    import psutil

    return {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
        and tuple(connection.laddr)[1:] == (int(port),)
        and connection.pid is not None
    }


def _is_foreign(url: str) -> bool:
    """Whether a port of this machine belongs to a process that this one does not descend from.

    With host networking another Triton may own the default port. A port that nobody listens at, or
    whose owner cannot be seen, is not foreign.
    """
    known = listening_processes(url)
    if not known:
        return False
    import psutil

    ancestors = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return not known & ancestors
