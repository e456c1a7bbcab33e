"""Tells when Triton's thread that reads all gRPC streams has returned from earlier requests."""

from __future__ import annotations

import asyncio
import ssl

from trtllm_bls.engines.triton.own_port import is_own
from trtllm_bls.errors import EngineUnavailable
from trtllm_bls.grpc_client import GrpcChannel, GrpcError

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


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
