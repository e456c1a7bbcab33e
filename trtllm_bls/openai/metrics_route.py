"""``/metrics``: the samples of all workers, of the engines, and Triton's own."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.exposition import Samples, exposition, samples, triton_metrics
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.reports import ENGINE_SEQUENCES
from trtllm_bls.orchestrator.status import engines_up

_SHARE_S = 1.0


class MetricsRoute:
    """The route of a scrape, which reaches any of the workers."""

    def __init__(self, backend: Deployment, settings: ApiSettings) -> None:
        self._backend = backend
        self._model_name = settings.model_names[0]
        self._shared = settings.shared
        self._triton_url = settings.triton_metrics

    async def share(self) -> None:
        """Share this worker's samples with the other workers every second, until cancelled."""
        while self._shared is not None:
            with suppress(OSError):  # no memory, perhaps for a while
                self._shared.put(self._samples())
            await asyncio.sleep(_SHARE_S)

    async def get(self, request: Request) -> Response:
        """Answer ``GET /metrics``."""
        values = self._samples()
        if self._shared is not None:
            values = self._shared.put(values)
        text = exposition(values) + engines_up(await self._backend.engine_problems())
        if self._triton_url:
            text += await asyncio.to_thread(triton_metrics, self._triton_url)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _samples(self) -> Samples:
        metrics = self._backend.reports.metrics
        for engine, sequences in self._backend.engine_sequences().items():
            metrics.numbers[ENGINE_SEQUENCES, (engine,)] = sequences
        return samples(metrics, self._model_name)
