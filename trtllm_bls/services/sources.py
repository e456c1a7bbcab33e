"""Which engine a text request runs on: the target alone, or the target with drafts."""

from __future__ import annotations

from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.transport import Route, TritonModel
from trtllm_bls.messages import TextRequest
from trtllm_bls.parameters import BlsParameters


class Sources:
    """The models one deployment of ``tensorrt_llm_bls`` may use."""

    def __init__(self, parameters: BlsParameters, pb_utils: Any, vocab_size: int) -> None:
        route = Route(
            transport=parameters.transport,
            url=parameters.engine_url,
            pb_utils=pb_utils,
            vocab_size=vocab_size,
            max_streams=parameters.max_streams,
            stall_seconds=parameters.stall_seconds,
        )
        self._target = TritonModel(parameters.target, route)

    async def source_for(self, request: TextRequest) -> Engine:
        """The engine for one request. Raises ``EngineUnavailable``."""
        return await self._target.engine()

    async def close(self) -> None:
        """Close what was opened."""
        await self._target.close()
