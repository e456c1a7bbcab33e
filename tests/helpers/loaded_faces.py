"""The faces of pipelines that ``testing`` has loaded, behind the OpenAI API without Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from tests.helpers.openai_server import ScriptedBackend
from tests.helpers.scripted_text import saying
from trtllm_bls.engines.pipeline_faces import FaceCall, FaceModels
from trtllm_bls.errors import from_wire
from trtllm_bls.orchestrator.orchestrator import Admission
from trtllm_bls.orchestrator.pipeline_faces import PipelineFaces
from trtllm_bls.pipeline.testing import LoadedModel
from trtllm_bls.settings.faces import FACES, ServedPipeline


class LoadedFaces(FaceModels):
    """Asks loaded models in place of a Triton server."""

    def __init__(self, models: Mapping[str, LoadedModel]) -> None:
        super().__init__("nowhere:0", None)
        self._models = models

    async def _arrivals(
        self, call: FaceCall, seconds: float | None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        model = self._models[call.model]
        outputs = [name for name, _, _ in call.face.outputs]
        ask = model.ask(outputs=outputs, **{call.face.request: call.body})
        count = 0
        try:
            while True:
                await asyncio.to_thread(ask.wait, count + 1)
                for response in ask.responses[count:]:
                    yield response
                if len(ask.responses) == count:
                    break
                count = len(ask.responses)
            if ask.error is not None:
                raise from_wire(ask.error.message())
        finally:
            ask.leave()
            await asyncio.to_thread(ask.wait)


class FacesBackend(ScriptedBackend):
    """A deployment with pipelines; ``served`` are the settings of these."""

    def __init__(self, models: Mapping[str, LoadedModel], places: int = 100) -> None:
        super().__init__(saying("a"), admission=Admission(places, places, None))
        assert self.admission is not None
        self.pipeline_faces = PipelineFaces(
            LoadedFaces(models), self.admission, None, self.reports.add
        )
        served = []
        for name, model in models.items():
            inputs, _ = model.model.tensors()
            names = {tensor.name for tensor in inputs}
            kinds = frozenset(face.capability for face in FACES if face.request in names)
            served.append(ServedPipeline(name, kinds))
        self.served = tuple(served)
