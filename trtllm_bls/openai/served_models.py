"""The models that requests may name, and the routes that list them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone

from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls import __version__
from trtllm_bls.errors import SettingsError, TrtllmBlsError
from trtllm_bls.openai.api_errors import ApiError, invalid
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.content import ContentReader, note_once
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.exchange import JsonResponse
from trtllm_bls.openai.schema import Generation
from trtllm_bls.orchestrator.chat_models import ChatPipeline
from trtllm_bls.orchestrator.chat_turn import ChatTurns
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.pipeline_faces import PipelineFaces
from trtllm_bls.orchestrator.reports import (
    TOOL_CALLS,
    UNREADABLE_ARGUMENTS,
    UNREADABLE_CONTENT,
)
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.settings.faces import CHAT, FACES, Face
from trtllm_bls.text.chat_parser import CallOutcome
from trtllm_bls.types import Adapter, TextRequest


class ServedModels:
    """The language model by its names, its LoRA adapters, and pipelines with faces.

    ``pipelines`` has the runner of chats for each pipeline, by the pipeline's name. Raises
    ``SettingsError`` where a pipeline has the name of another model.
    """

    def __init__(self, backend: Deployment, settings: ApiSettings) -> None:
        language_models = {*settings.model_names, *settings.loras}
        self._served = {pipeline.name: pipeline for pipeline in settings.pipelines}
        if duplicates := language_models.intersection(self._served):
            problem = f"{min(duplicates)} is a pipeline of this server, too"
            raise SettingsError(f"--served-model-name: {problem}; choose another name")
        self.names = (*settings.model_names, *settings.loras, *self._served)
        pipelines: dict[str, ChatPipeline] = {}
        if chat_names := self._names_with(CHAT):
            pipelines = backend.chat_pipelines(chat_names)
        self.pipelines = pipelines
        self._faces: PipelineFaces | None = None
        if any(self._names_with(face) for face in FACES if face is not CHAT):
            self._faces = backend.pipeline_faces
        self._engine = backend.engine
        self._status_dir = settings.status_dir
        self._base_name = settings.model_names[0]
        self._loras = settings.loras
        self._created = int(time.time())

        tokenizer = backend.tokenizer
        metrics = backend.reports.metrics
        fingerprint = _fingerprint(
            self._base_name, backend.engine.name, __version__, tokenizer.fingerprint
        )
        reader = ContentReader(
            settings.unreadable == "refuse",
            lambda kind: metrics.record(UNREADABLE_CONTENT, (kind,), 1),
        )

        def count_call(tool_format: str, result: str) -> None:
            metrics.record(TOOL_CALLS, (tool_format, result), 1)
            if result == CallOutcome.UNREADABLE.value:
                metrics.record(UNREADABLE_ARGUMENTS, (tool_format,), 1)
                note_once(f"answers with calls in {tool_format} that cannot be read")

        self._language_model = ChatModel(
            tokenizer,
            ChatTurns.of(
                tokenizer,
                settings.tool_parser,
                settings.reasoning_parser,
                settings.chat_template_kwargs,
            ),
            fingerprint,
            reader,
            count_call,
        )
        pipeline_models: dict[str, ChatModel] = {}
        for pipeline in settings.pipelines:
            pipeline_reader = replace(reader, accepts=pipeline.accepts)
            model = ChatModel(tokenizer, None, fingerprint, pipeline_reader)
            pipeline_models[pipeline.name] = model
        self._pipeline_models = pipeline_models

    def check(self, name: str) -> None:
        """Raise ``ApiError`` for a model that this server does not have."""
        if name not in self.names:
            problem = f"The model {name[:200]!r} does not exist"
            raise ApiError(404, problem, param="model", code="model_not_found")

    def resolve(self, request: Generation) -> ChatModel:
        """Return the model that ``request`` names, and name the default one in the request.

        Raises ``ApiError``. With LoRA adapters there is no default.
        """
        if not request.model and not self._loras:
            request.model = self.names[0]
        elif not request.model:
            raise invalid("model", f"is missing; send one of {', '.join(self.names)}"[:500])
        self.check(request.model)
        if request.model in self.pipelines:
            return self._pipeline_models[request.model]
        if request.model in self._served:
            raise self._elsewhere(request.model)
        return self._language_model

    def pipeline_of(self, face: Face, model: str) -> tuple[str, PipelineFaces]:
        """Return the pipeline that ``model`` names, and the runner of its faces.

        The only pipeline with that face is the default. Raises ``ApiError``.
        """
        names = self._names_with(face)
        if model:
            self.check(model)
        elif len(names) == 1:
            model = names[0]
        elif names:
            raise invalid("model", f"is missing; send one of {', '.join(names)}"[:500])
        if self._faces is None or model not in names:
            remedy = "a pipeline of the server may"
            if names:
                remedy = f"send {' or '.join(names)}"
            problem = f"{model or self.names[0]!r} does not answer {face.path}; {remedy}"
            raise invalid("model", problem[:500])
        return model, self._faces

    def _names_with(self, face: Face) -> Sequence[str]:
        """Return the pipelines that have a face."""
        names: list[str] = []
        for pipeline in self._served.values():
            if face.capability in pipeline.capabilities:
                names.append(pipeline.name)
        return names

    def _elsewhere(self, model: str) -> ApiError:
        """Return the refusal of a request that a pipeline answers at other paths only."""
        paths = [face.path for face in FACES if model in self._names_with(face)]
        return invalid("model", f"{model!r} answers {' and '.join(paths)} alone")

    def add_adapter(self, model: str, requests: Sequence[TextRequest]) -> None:
        """Add the LoRA adapter that is served as ``model`` to the requests, if there is one."""
        task_id = self._loras.get(model)
        if task_id is None:
            return
        adapter = Adapter(name=model)
        if task_id:
            adapter = Adapter(task_id=int(task_id))
        for request in requests:
            request.adapter = adapter

    async def max_tokens(self) -> int | None:
        """Return the limit of prompt and completion in tokens; ``None`` where it is unknown."""
        with suppress(TrtllmBlsError):
            capacity = await self._engine.capacity()
            if max_tokens := capacity.max_sequence_tokens or capacity.max_prompt_tokens:
                return max_tokens
        if not self._status_dir:
            return None
        return StatusDirectory(self._status_dir).longest(self._engine.name)

    async def list(self, request: Request) -> Response:
        """Answer ``GET /v1/models``."""
        cards = [await self._card(name) for name in self.names]
        return JsonResponse(
            {
                "object": "list",
                "data": cards,
                # Fields of Anthropic's list.
                "has_more": False,
                "first_id": self.names[0],
                "last_id": self.names[-1],
            }
        )

    async def get(self, request: Request) -> Response:
        """Answer ``GET /v1/models/NAME``."""
        name = request.path_params["name"]
        self.check(name)
        return JsonResponse(await self._card(name))

    def _capabilities(self, name: str) -> Sequence[str]:
        if name in self._served:
            return sorted(self._served[name].capabilities)
        return ["chat", "completions"]

    def _accepts(self, name: str) -> Sequence[str]:
        """Return the kinds of content that a model's conversations may have."""
        if name not in self._served:
            return ["text"]
        return ["text", *sorted(self._served[name].accepts)]

    async def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtllm-bls",
            "parent": self._base_name if name in self._loras else None,
            "max_model_len": await self.max_tokens(),
            "capabilities": self._capabilities(name),
            "accepts": self._accepts(name),
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, timezone.utc).isoformat(),
        }


def _fingerprint(*identity: str) -> str:
    digest = hashlib.sha256("\n".join(identity).encode())
    return f"fp_{digest.hexdigest()[:10]}"
