"""Runs requests to the faces of pipelines, with the places and limits of the language model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from trtllm_bls.engines.pipeline_faces import FaceCall, FaceModels, FaceUsage
from trtllm_bls.errors import DeadlineExceeded
from trtllm_bls.orchestrator.orchestrator import (
    Admission,
    RequestTimes,
    has_expired,
    seconds_left,
    stats_of,
    timeout,
)
from trtllm_bls.types import Array, RequestStats

_NO_USAGE = FaceUsage(0, 0)


class PipelineFaces:
    """The faces of all pipelines. ``on_end`` gets the figures of each request."""

    def __init__(
        self,
        models: FaceModels,
        admission: Admission,
        timeout_s: float | None,
        on_end: Callable[[RequestStats], None],
    ) -> None:
        self._models = models
        self._admission = admission
        self._timeout_s = timeout_s
        self._on_end = on_end

    async def run(
        self, call: FaceCall, take: Callable[[Mapping[str, Array]], Awaitable[None]]
    ) -> FaceUsage:
        """Give each response to ``take``, which may wait, and return the usage.

        Raises ``Overloaded``, ``DeadlineExceeded``, and what the pipeline raised.
        """
        times = RequestTimes()
        usage = _NO_USAGE
        ended_by: BaseException | None = None
        limit = timeout(self._timeout_s)
        try:
            async with (
                limit,
                self._admission.acquire(1),
                aclosing(self._models.responses(call, seconds_left(limit))) as responses,
            ):
                times.begun_at = asyncio.get_running_loop().time()
                async for response in responses:
                    if isinstance(response, FaceUsage):
                        usage = response
                    else:
                        await take(response)
                        times.note_response()
            return usage
        except BaseException as error:
            ended_by = error
            if isinstance(error, asyncio.TimeoutError) and has_expired(limit):
                ended_by = DeadlineExceeded(f"the time limit of {self._timeout_s:g} s is over")
                raise ended_by from error
            raise
        finally:
            stats = stats_of(
                call.request_id,
                ended_by,
                "stop",
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                traceparent=call.traceparent,
                api=call.face.capability,
            )
            times.add_to(stats, streamed=True)
            self._on_end(stats)
            ended_by = None  # whose traceback refers to this frame: a reference cycle

    async def close(self) -> None:
        """End what runs, and disconnect."""
        await self._models.close()
