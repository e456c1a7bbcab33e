"""Tells when Triton's thread that reads all gRPC streams has returned from earlier requests."""

from __future__ import annotations

import asyncio
import ssl

from trtllm_bls.engines.triton.own_port import is_own
from trtllm_bls.errors import EngineUnavailable
from trtllm_bls.grpc_client import GrpcChannel, GrpcError

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class StreamThread:
    """The thread of the server that this process belongs to, whose gRPC port is at ``url``.

    ``url``: host:port. ``tls``: of that port.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._tls = tls
        self._is_own = False

    async def has_returned(self) -> None:
        """Return once the thread has returned from handing over each request that came before.

        Triton has one thread for the requests of all streams, so it answers another stream only
        after that. The request sent here names no model, so the thread itself answers with an error
        and no model sees it. Raises ``EngineUnavailable`` where the server cannot be asked.
        """
        if not self._is_own and not await asyncio.to_thread(is_own, self._url):
            raise EngineUnavailable(f"{self._url} is not known to be this server's gRPC port")
        self._is_own = True
        channel = GrpcChannel(self._url, tls=self._tls)
        try:
            await channel.unary(_STREAM_INFER, b"")
        except GrpcError as error:
            raise EngineUnavailable(f"{self._url}: {error}") from error
        finally:
            await channel.close()
