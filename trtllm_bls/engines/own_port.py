"""Questions about a gRPC port that may be the port of the server to which this process belongs."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any

from trtllm_bls.errors import EngineUnavailable
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


def listening_processes(url: str) -> set[int]:
    """Return the processes that listen at ``url`` (host:port); none if it is another machine.

    Processes of other users cannot be seen. Of several that have the same socket, one is returned.
    """
    host, _, port = url.rpartition(":")
    if host.strip("[]") not in ("localhost", "127.0.0.1", "::1") or not port.isdecimal():
        return set()
    import psutil

    processes = set()
    for connection in psutil.net_connections(kind="tcp"):
        if connection.pid is not None and _is_at(connection, int(port)):
            processes.add(connection.pid)
    return processes


def _is_at(connection: Any, port: int) -> bool:
    """Return true for a socket that listens at the port."""
    import psutil

    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port)


def is_own(url: str) -> bool | None:
    """Return true if the port belongs to a process that this one descends from.

    With host networking another Triton may own the default port. ``None``: nobody listens at the
    port, or its owner cannot be seen.
    """
    if not listening_processes(url):
        return None
    import psutil

    # Each socket is found with one process, which may be a child that Triton is just starting:
    # until it runs its own program, it has all sockets of its parent. So ask the ancestors.
    port = int(url.rpartition(":")[2])
    process = psutil.Process()
    for ancestor in (process, *process.parents()):
        with suppress(psutil.Error):  # another user's
            connections = ancestor.net_connections(kind="tcp")
            if any(_is_at(connection, port) for connection in connections):
                return True
    return False


async def stream_thread_has_returned(url: str, tls: ssl.SSLContext | None = None) -> None:
    """Return once the thread has returned from handing over each request that came before.

    It is the thread of the server that this process belongs to, whose gRPC port is at ``url``
    (host:port). Triton has one thread for the requests of all streams, so it answers another stream
    only after that. The request sent here names no model, so the thread itself answers with an
    error and no model sees it. Raises ``EngineUnavailable`` where the server cannot be asked.
    """
    if not await asyncio.to_thread(is_own, url):
        raise EngineUnavailable(f"{url} is not known to be this server's gRPC port")
    channel = GrpcChannel(url, tls=tls)
    try:
        await channel.unary(_STREAM_INFER, b"")
    except GrpcError as error:
        raise EngineUnavailable(f"{url}: {error}") from error
    finally:
        await channel.close()
