"""From the parameters of a text model to its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.engines.trtllm_fields import SPECULATES
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.settings.engine_tls import engine_tls
from trtllm_bls.settings.parameters import BlsParameters, EngineKind
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import SpeculationStats

log = logging.getLogger(__name__)


def open_engine(
    parameters: BlsParameters,
    tokenizer: Tokenizer,
    on_end: Callable[[SpeculationStats], None],
    *,
    in_triton: bool,
) -> RoutingEngine:
    """The engines that ``parameters`` name, as one. Raises ``SetupError``.

    ``in_triton``: this process is one of a Triton server. ``on_end``: that of ``RoutingEngine``.
    """
    common: dict[str, Any] = {
        "vocab_size": tokenizer.model_vocab_size,
        "stall_seconds": parameters.engine_stall_seconds,
        "tls": engine_tls(parameters),
    }

    def triton_model(name: str, url: str = "") -> Engine:
        own = not url and parameters.engine_transport == "auto" and in_triton
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
    return RoutingEngine(target, draft, options, by_default=source != "off", on_end=on_end)
