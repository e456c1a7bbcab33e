"""Questions to a server over gRPC: which models are ready, and does a token come out?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trtllm_bls.client import Client, Tls
from trtllm_bls.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TrtllmBlsError,
    is_for_room,
)

TEXT_MODEL = "tensorrt_llm_bls"


@dataclass(frozen=True)
class Canary:
    """The result of a request for one token.

    ``answered``: a token, or a refusal that only a working server gives. ``full``: a refusal
    because the server has as many requests as it may, which does not show that they progress.
    ``late``: no answer in time. ``failed``: an error.
    """

    outcome: Literal["answered", "full", "late", "failed"]
    error: str = ""


class Probe(Client):
    """A client for health checks; ``canary_id`` is the id of its requests for a token.

    ``local``: the server is on this machine, so proxies in the environment are ignored.
    """

    def __init__(
        self,
        url: str,
        canary_id: str = "trtllm-bls-health",
        tls: Tls | None = None,
        *,
        local: bool = False,
    ) -> None:
        super().__init__(url, tls=tls)
        self._canary_id = canary_id
        if local:
            self._options.append(("grpc.enable_http_proxy", 0))

    async def models_not_ready(self, models: Iterable[str], timeout: float) -> tuple[str, ...]:
        """Those of ``models`` that are not ready. Raises ``ConnectionFailed`` without an answer."""
        asked = list(models)
        try:
            answers = await asyncio.gather(*(self.model_ready(model, timeout) for model in asked))
        except DeadlineExceeded as error:
            raise ConnectionFailed(f"{self.url}: {error}") from error
        return tuple(model for model, ready in zip(asked, answers, strict=True) if not ready)

    async def canary(self, timeout: float) -> Canary:
        """Ask for one token; raises nothing."""
        try:
            await self.generate(
                TEXT_MODEL,
                text_input="Hello",
                max_tokens=1,
                stream=False,
                request_id=self._canary_id,
                deadline_s=timeout,
            )
        except InvalidRequest:
            return Canary("answered")
        except (ConnectionFailed, DeadlineExceeded) as error:
            return Canary("late", str(error))
        except Overloaded as error:  # or an engine that cannot be reached
            return Canary("full" if is_for_room(error) else "failed", str(error))
        except TrtllmBlsError as error:
            return Canary("failed", str(error))
        return Canary("answered")
