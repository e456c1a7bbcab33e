"""Questions to a server over gRPC: which models are ready, and does a token come out?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtllm_bls.client import Client
from trtllm_bls.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TrtllmBlsError,
)

TEXT_MODEL = "tensorrt_llm_bls"


@dataclass(frozen=True)
class Canary:
    """What became of a request for one token.

    ``answered``: also by a refusal that only a working server gives. ``late``: no answer in time,
    or one that a server without room gives. ``failed``: an error.
    """

    outcome: Literal["answered", "late", "failed"]
    error: str = ""


class Probe:
    """Asks the server at ``url`` (``host:port``); to be entered and left in one event loop.

    ``canary_id`` is the id of its requests for a token.
    """

    def __init__(self, url: str, canary_id: str = "trtllm-bls-health") -> None:
        self._url = url
        self._canary_id = canary_id
        self._client = Client(url)

    async def __aenter__(self) -> Probe:
        self._channel = grpc.aio.insecure_channel(self._url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()
        await self._channel.close()

    async def models_not_ready(self, models: Iterable[str], timeout: float) -> tuple[str, ...]:
        """Those that the server says are not. Raises ``ConnectionFailed`` if it says nothing."""
        asked = list(models)
        answers = await asyncio.gather(*(self._ready(model, timeout) for model in asked))
        return tuple(model for model, ready in zip(asked, answers, strict=True) if not ready)

    async def _ready(self, model: str, timeout: float) -> bool:
        request: Any = service_pb2.ModelReadyRequest(name=model)
        try:
            return bool((await self._stub.ModelReady(request, timeout=timeout)).ready)
        except grpc.aio.AioRpcError as error:
            late = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if error.code() in late:
                raise ConnectionFailed(f"{self._url}: {error.details()}") from error
            return False

    async def canary(self, timeout: float, model: str = TEXT_MODEL) -> Canary:
        """Ask ``model`` for one token; raises nothing."""
        try:
            await self._client.generate(
                model,
                text_input="Hello",
                max_tokens=1,
                stream=False,
                request_id=self._canary_id,
                deadline_s=timeout,
            )
        except InvalidRequest:
            return Canary("answered")
        except (ConnectionFailed, DeadlineExceeded, Overloaded) as error:
            return Canary("late", str(error))
        except TrtllmBlsError as error:
            return Canary("failed", str(error))
        return Canary("answered")
