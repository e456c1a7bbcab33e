"""From a deployment's parameters to its orchestrator, for a Triton model or any other process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from trtllm_bls import __version__
from trtllm_bls.engines.chat_model import ChatModels
from trtllm_bls.engines.opening import open_engine
from trtllm_bls.engines.pipeline_faces import FaceModels
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.errors import EngineError, ShuttingDown
from trtllm_bls.orchestrator.chat_models import ChatPipeline
from trtllm_bls.orchestrator.orchestrator import Admission, Defaults, Load, Orchestrator
from trtllm_bls.orchestrator.pipeline_faces import PipelineFaces
from trtllm_bls.orchestrator.reports import (
    RequestLog,
    RequestMetrics,
    RequestReports,
    TritonMetrics,
)
from trtllm_bls.settings.engine_tls import engine_tls
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.settings.parameters import BlsParameters
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


class BaseDeployment:
    """Limits, defaults and reports of a model's requests, and the engines that it owns.

    ``pb_utils`` are Triton's utilities inside a Python model, ``None`` elsewhere: then metrics are
    kept in memory (``reports.metrics``). ``model_name`` labels the metrics. Raises ``SetupError``.
    """

    def __init__(self, parameters: Any, pb_utils: Any, model_name: str) -> None:
        self.name = model_name
        self._parameters = parameters
        self._is_in_triton = pb_utils is not None
        metrics = RequestMetrics()
        if self._is_in_triton:
            metrics = TritonMetrics(pb_utils, model_name)
        readers = []
        if parameters.log_requests:
            as_json = parameters.log_format == "json"
            readers.append(RequestLog(as_json=as_json, prompts=parameters.log_prompts).add)
        self.reports = RequestReports(metrics, readers)
        self.defaults = defaults_of(parameters)
        self.admission = Admission(
            parameters.max_running, parameters.max_queued, parameters.max_queue_seconds or None
        )
        self.engines: list[RoutingEngine] = []

    def open(self, parameters: BlsParameters, tokenizer: Tokenizer) -> RoutingEngine:
        """Open the engine that the parameters name; it is closed with the deployment."""
        on_end = self.reports.add_speculation
        engine = open_engine(parameters, tokenizer, on_end, in_triton=self._is_in_triton)
        self.engines.append(engine)
        return engine

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to report requests; they run on ``loop``."""
        self.reports.start(loop, self.load)
        # The first line that Triton's logger writes takes 40 ms, because it looks at the file of
        # each loaded module. Writing one now keeps that out of the first request.
        log.info(
            "trtllm-bls %s: this process runs at most %d requests, and %d more wait",
            __version__,
            self._parameters.max_running,
            self._parameters.max_queued,
        )

    async def engine_problems(self) -> dict[str, str]:
        """Return the problem of each engine elsewhere, by its name; an empty text without one.

        The answer is at most two seconds old. Engines that do not tell their state are left out.
        """
        problems: dict[str, str] = {}
        for engine in self.engines:
            target = engine.target
            if isinstance(target, ReplicatedEngine):
                problems |= await target.problems()
            elif isinstance(target, TrtllmServiceEngine):
                problems[target.name] = ""
                try:
                    await target.capacity()
                except EngineError as error:
                    problems[target.name] = str(error)
        return problems

    def engine_sequences(self) -> dict[str, int]:
        """Return the number of sequences that each replica was given, by its name.

        It is empty without replicas.
        """
        sequences: dict[str, int] = {}
        for engine in self.engines:
            if isinstance(engine.target, ReplicatedEngine):
                sequences |= engine.target.sequences()
        return sequences

    def load(self) -> Load:
        """Return the load now; from any thread."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Refuse waiting requests; each speculated one goes on as one plain request."""
        self.admission.refuse_waiting(ShuttingDown)
        for engine in self.engines:
            engine.drain()

    @property
    def handed_over(self) -> bool:
        """True if no request that runs will send another one to an engine.

        A request that has just been accepted may still send its first.
        """
        return all(engine.handed_over for engine in self.engines) and self.admission.queued == 0

    async def close(self) -> None:
        """Close the engines; the last reports are out on return."""
        for engine in self.engines:
            await engine.close()
        self.reports.close()


class Deployment(BaseDeployment):
    """An orchestrator and its engine."""

    def __init__(
        self, parameters: BlsParameters, pb_utils: Any = None, model_name: str = BLS_NAME
    ) -> None:
        self.tokenizer = load_tokenizer(parameters.tokenizer_dir)
        super().__init__(parameters, pb_utils, model_name)
        self.engine = self.open(parameters, self.tokenizer)
        self.chat_models: ChatModels | None = None
        self._faces: PipelineFaces | None = None
        self.orchestrator = Orchestrator(
            self.tokenizer,
            self.engine,
            self.defaults,
            on_end=self.reports.add,
            admission=self.admission,
        )

    def load(self) -> Load:
        return self.orchestrator.load()

    def chat_pipelines(self, names: Iterable[str]) -> dict[str, ChatPipeline]:
        """Return the pipelines of these names behind this deployment's Triton server.

        They answer conversations.
        """
        models = ChatModels(self._parameters.engine_url, engine_tls(self._parameters))
        self.chat_models = models
        pipelines = {}
        for name in names:
            pipelines[name] = ChatPipeline(
                name, models, self.orchestrator, self.defaults.timeout_s, self.reports.add
            )
        return pipelines

    @property
    def pipeline_faces(self) -> PipelineFaces:
        """Faces of the pipelines behind this deployment's Triton server."""
        if self._faces is None:
            models = FaceModels(self._parameters.engine_url, engine_tls(self._parameters))
            self._faces = PipelineFaces(
                models, self.admission, self.defaults.timeout_s, self.reports.add
            )
        return self._faces

    async def close(self) -> None:
        if self.chat_models is not None:
            await self.chat_models.close()
        if self._faces is not None:
            await self._faces.close()
        await super().close()


def defaults_of(parameters: BlsParameters) -> Defaults:
    """Return the defaults of requests that the parameters set."""
    # The longest time that a request may name also bounds a request that names none.
    limits = (parameters.request_timeout_seconds, parameters.limits.max_timeout_seconds)
    return Defaults(
        add_special_tokens=parameters.add_special_tokens,
        draft_source=parameters.draft_source,
        skip_special_tokens=parameters.skip_special_tokens,
        accumulate=parameters.accumulate_tokens,
        timeout_s=min(filter(None, limits), default=None),
        limits=parameters.limits,
        expose_kv_cache_metrics=parameters.expose_kv_cache_metrics,
        engine_shows_progress=not (parameters.engine and parameters.engine.is_elsewhere),
    )
