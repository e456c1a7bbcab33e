"""From a deployment's parameters to its orchestrator, for a Triton model or any other process."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from trtllm_bls import __version__
from trtllm_bls.admission import Admission
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.engines.triton.grpc import GrpcEngine
from trtllm_bls.engines.trtllm_fields import SPECULATES
from trtllm_bls.engines.trtllm_service import TrtllmServiceEngine
from trtllm_bls.errors import EngineError
from trtllm_bls.orchestrator import Defaults, Load, Orchestrator
from trtllm_bls.parameters import BlsParameters, EngineKind
from trtllm_bls.parameters.engine_tls import engine_tls
from trtllm_bls.services.request_reports import (
    RequestLog,
    RequestMetrics,
    RequestReports,
    TritonMetrics,
)
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.tokenizer import Tokenizer, load_tokenizer

SHUTTING_DOWN = "the server is shutting down; ask another one"

log = logging.getLogger(__name__)


class Deployment:
    """One orchestrator, the engines it owns, and the reports of its requests.

    ``pb_utils`` are Triton's utilities inside a Python model, ``None`` elsewhere: then metrics are
    kept in memory (``reports.metrics``). ``model_name`` labels the metrics. Raises ``SetupError``.
    """

    def __init__(
        self, parameters: BlsParameters, pb_utils: Any = None, model_name: str = "tensorrt_llm_bls"
    ) -> None:
        self.tokenizer = load_tokenizer(parameters.tokenizer_dir, parameters.token_cache_bytes)
        metrics = RequestMetrics() if pb_utils is None else TritonMetrics(pb_utils, model_name)
        line = RequestLog(as_json=parameters.log_format == "json", prompts=parameters.log_prompts)
        self.reports = RequestReports(metrics, [line.add] if parameters.log_requests else [])
        self.engine = _engine(parameters, pb_utils, self.tokenizer, self.reports)
        self._parameters = parameters
        # The longest time that a request may name also bounds a request that names none.
        limits = (parameters.request_timeout_seconds, parameters.limits.max_timeout_seconds)
        self.defaults = Defaults(
            add_special_tokens=parameters.add_special_tokens,
            skip_special_tokens=parameters.skip_special_tokens,
            accumulate=parameters.accumulate_tokens,
            timeout_s=min((seconds for seconds in limits if seconds), default=None),
            limits=parameters.limits,
            expose_kv_cache_metrics=parameters.expose_kv_cache_metrics,
            engine_shows_progress=not (parameters.engine and parameters.engine.is_elsewhere),
        )
        self.admission = Admission(
            parameters.max_running, parameters.max_queued, parameters.max_queue_seconds or None
        )
        self.orchestrator = Orchestrator(
            self.tokenizer,
            self.engine,
            self.defaults,
            on_end=self.reports.add,
            admission=self.admission,
        )

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
        """What is wrong with each engine elsewhere, by its name; an empty text if nothing is.

        At most two seconds old. Empty where the engine does not tell how it is.
        """
        target = self.engine.target
        if isinstance(target, ReplicatedEngine):
            return await target.problems()
        if not isinstance(target, TrtllmServiceEngine):
            return {}
        try:
            await target.capacity()
        except EngineError as error:
            return {target.name: str(error)}
        return {target.name: ""}

    def engine_sequences(self) -> dict[str, int]:
        """Sequences that each of several engines was given, by its name; else nothing."""
        target = self.engine.target
        return target.sequences() if isinstance(target, ReplicatedEngine) else {}

    def load(self) -> Load:
        """See ``Load``; from any thread."""
        return self.orchestrator.load()

    async def drain(self) -> None:
        """Refuse waiting requests; each speculated one goes on as one plain request."""
        self.admission.refuse_waiting(SHUTTING_DOWN)
        self.engine.drain()

    @property
    def handed_over(self) -> bool:
        """Whether no request that runs will send another one to an engine.

        A request that has just been accepted may still send its first.
        """
        return self.engine.handed_over and self.admission.queued == 0

    async def close(self) -> None:
        """Close the engines; the last reports are out on return."""
        await self.engine.close()
        self.reports.close()


def _engine(
    parameters: BlsParameters, pb_utils: Any, tokenizer: Tokenizer, reports: RequestReports
) -> RoutingEngine:
    common: dict[str, Any] = {
        "vocab_size": tokenizer.model_vocab_size,
        "stall_seconds": parameters.engine_stall_seconds,
        "tls": engine_tls(parameters),
    }

    def triton_model(name: str, url: str = "") -> Engine:
        own = not url and parameters.engine_transport == "auto" and pb_utils is not None
        return GrpcEngine(url or parameters.engine_url, name, own_server=own, **common)

    choice, targets = parameters.engine, list[Engine]()
    # TensorRT-LLM's gRPC service, which verifies no drafts.
    is_service = choice is not None and choice.kind is EngineKind.TRTLLM
    for url, model in choice.addresses if choice else [("", parameters.tensorrt_llm_model_name)]:
        if is_service:
            longest = parameters.engine_max_sequence_tokens
            service = TrtllmServiceEngine(
                url, eos_id=tokenizer.eos_id, max_sequence_tokens=longest, **common
            )
            targets.append(service)
        else:
            targets.append(triton_model(model, url))
    target = targets[0]
    if len(targets) > 1:
        target = ReplicatedEngine(
            targets, resume=parameters.engine_resume, affinity=parameters.engine_affinity
        )
    draft: Engine | None = None
    draft_model = parameters.tensorrt_llm_draft_model_name
    if is_service:
        if draft_model or parameters.draft_source != "off":
            log.warning("%s verifies no drafts, so none are made: %s", target.name, SPECULATES)
    elif draft_model:
        where = parameters.draft_tokenizer_dir
        if where is None or load_tokenizer(where).fingerprint == tokenizer.fingerprint:
            draft = triton_model(draft_model)
        else:
            reason = "has another token table than the target's"
            log.warning(
                "draft model %s is not used: its tokenizer in %s %s", draft_model, where, reason
            )
    source = parameters.draft_source
    options = SpeculationOptions(
        draft_source=DraftSource(source) if source != "off" else DraftSource.MODEL,
        num_draft_tokens=parameters.num_draft_tokens,
        max_draft_tokens=parameters.max_draft_len,
        memory_tokens=parameters.draft_memory_tokens,
        draft_deadline_s=parameters.draft_deadline_seconds,
        overlap=parameters.overlap_drafts,
        ignore_unverifiable=parameters.unverifiable_drafts == "ignore",
    )
    return RoutingEngine(
        target, draft, options, by_default=source != "off", on_end=reports.add_speculation
    )
