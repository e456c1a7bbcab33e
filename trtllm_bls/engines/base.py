"""The seam: what orchestrator and doors know of an engine, and all they know.

Engines behind it: ``grpc`` and ``bls`` (a Triton model), ``embedded`` (this process, torch),
``scripted`` (tests and benchmarks), ``speculative`` (two engines made to look like one).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from trtllm_bls.messages import EngineChunk, EngineLimits, EngineRequest


class Engine(Protocol):
    """Runs requests concurrently; one object serves any number of streams on one event loop."""

    name: str

    async def limits(self) -> EngineLimits:
        """What the engine can take. Raises ``EngineUnavailable`` if it cannot be asked."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """Yield chunks until every sequence of the request has had its ``final`` chunk.

        A non-streaming request yields one chunk per sequence. Closing the generator
        (``aclose``) or cancelling the task that reads it ends the engine's work at once; both
        may happen at any await. Raises ``InvalidRequest`` before the first chunk for a request
        the engine refuses, ``EngineError`` at any time when the engine fails.
        """

    async def close(self) -> None:
        """End what runs and free what is held. The engine is not used again."""
