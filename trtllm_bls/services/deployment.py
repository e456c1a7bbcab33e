"""From a deployment's parameters to its orchestrator, for a Triton model or any other process."""

from __future__ import annotations

import logging
import ssl
from dataclasses import replace
from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.engines.triton import Route, TritonEngine
from trtllm_bls.engines.trtllm_service import ServiceSettings, TrtllmServiceEngine
from trtllm_bls.errors import SettingsError
from trtllm_bls.orchestrator import Defaults, Orchestrator
from trtllm_bls.parameters import BlsParameters, EngineKind
from trtllm_bls.services.metrics import SpeculationMetrics
from trtllm_bls.speculative import DraftSource, SpeculationOptions
from trtllm_bls.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


class Deployment:
    """One orchestrator and the engines it owns.

    ``pb_utils`` are Triton's utilities inside a Python model, ``None`` elsewhere: then there are no
    metrics of Triton's and engines are reached over gRPC alone. Raises ``SetupError``.
    """

    def __init__(self, parameters: BlsParameters, pb_utils: Any = None) -> None:
        self.tokenizer = load_tokenizer(parameters.tokenizer_dir)
        self.engine = _engine(parameters, pb_utils, self.tokenizer)
        defaults = Defaults(
            add_special_tokens=parameters.add_special_tokens,
            skip_special_tokens=parameters.skip_special_tokens,
            accumulate=parameters.accumulate_tokens,
            timeout_s=parameters.timeout_seconds or None,
        )
        self.orchestrator = Orchestrator(self.tokenizer, self.engine, defaults)

    async def close(self) -> None:
        """Close the engines."""
        await self.engine.close()


def _engine(parameters: BlsParameters, pb_utils: Any, tokenizer: Tokenizer) -> RoutingEngine:
    route = Route(
        transport=parameters.transport,
        url=parameters.engine_url,
        pb_utils=pb_utils,
        vocab_size=tokenizer.model_vocab_size,
        max_streams=parameters.max_streams,
        stall_seconds=parameters.stall_seconds,
        tls=_tls(parameters),
        repository=parameters.repository,
    )
    draft: Engine | None = None
    target = _target(parameters, route, tokenizer)
    if parameters.draft and not _is_service(parameters) and _same_vocabulary(parameters, tokenizer):
        draft = TritonEngine(parameters.draft, route)
    source = parameters.draft_source
    options = SpeculationOptions(
        draft_source=DraftSource(source) if source != "off" else DraftSource.MODEL,
        num_draft_tokens=parameters.num_draft_tokens,
        max_draft_tokens=parameters.max_draft_tokens,
        draft_deadline_s=parameters.draft_deadline_seconds,
        overlap=parameters.overlap_drafts,
    )
    return RoutingEngine(
        target,
        draft,
        options,
        by_default=source != "off",
        on_end=SpeculationMetrics(pb_utils).add,
    )


def _target(parameters: BlsParameters, route: Route, tokenizer: Tokenizer) -> Engine:
    """The engine, or those, that parameter ``engine`` names."""
    choice = parameters.engine
    if choice is None:
        return TritonEngine(parameters.target, route)
    settings = ServiceSettings(
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.model_vocab_size,
        max_sequence_tokens=parameters.engine_max_sequence_tokens,
        stall_seconds=parameters.stall_seconds,
    )
    engines: list[Engine] = []
    for url, model in choice.addresses:
        if choice.kind is EngineKind.TRTLLM:
            engines.append(TrtllmServiceEngine(url, settings, route.tls))
        elif choice.kind is EngineKind.TRITON_GRPC:
            engines.append(TritonEngine(model, replace(route, transport="grpc", url=url)))
        else:
            engines.append(TritonEngine(model, route))
    if len(engines) == 1:
        return engines[0]
    return ReplicatedEngine(engines, resume=parameters.engine_resume)


def _is_service(parameters: BlsParameters) -> bool:
    return parameters.engine is not None and parameters.engine.kind is EngineKind.TRTLLM


def _tls(parameters: BlsParameters) -> ssl.SSLContext | None:
    ca, cert, key = parameters.tls_ca, parameters.tls_cert, parameters.tls_key
    if ca is None and cert is None and key is None:
        return None
    if ca is None:
        raise SettingsError("parameter engine_tls_ca is empty: name whom to trust at engine_url")
    if (cert is None) != (key is None):
        raise SettingsError("parameters engine_tls_cert and engine_tls_key: set both or neither")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # of which ssl's own are kinds
        files = ", ".join(str(path) for path in (ca, cert, key) if path)
        raise SettingsError(f"parameters engine_tls_*: {files}: not usable: {error}") from error
    return context


def _same_vocabulary(parameters: BlsParameters, tokenizer: Tokenizer) -> bool:
    directory = parameters.draft_tokenizer_dir
    if directory is None or load_tokenizer(directory).fingerprint == tokenizer.fingerprint:
        return True
    log.warning(
        "draft model %s is not used: its tokenizer in %s has another token table than the target's",
        parameters.draft,
        directory,
    )
    return False
