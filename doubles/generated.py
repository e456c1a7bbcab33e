"""Chunks of an async generator, for engines that are scripted."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.types import EngineChunk


class GeneratedChunks(QueuedChunks):
    """Chunks of an async generator, which runs no further than it is read."""

    def __init__(self, chunks: AsyncGenerator[EngineChunk, None]) -> None:
        super().__init__()
        self._chunks = chunks

    async def wait(self) -> None:
        if not self._items and (chunk := await anext(self._chunks, None)) is not None:
            self._items.append(chunk)

    async def aclose(self) -> None:
        await self._chunks.aclose()
