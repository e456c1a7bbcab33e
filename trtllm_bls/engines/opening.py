"""Opening the engines that parameters name.

``open_engine`` opens the engines of a text model, ``open_local_engine`` the one behind the Python
model ``tensorrt_llm``.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Protocol

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.llm_api import open_llm
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.engines.trtllm_fields import SPECULATES
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.garbage import no_collections
from trtllm_bls.settings.engine_tls import engine_tls
from trtllm_bls.settings.parameters import (
    BlsParameters,
    EngineKind,
    EngineParameters,
    parse_engine,
)
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import SpeculationStats

log = logging.getLogger(__name__)


class VocabularyFacts(Protocol):
    """A tokenizer, as far as engines know it: the id that ends a text, and the number of ids."""

    eos_id: int | None
    model_vocab_size: int


def open_engine(
    parameters: BlsParameters,
    tokenizer: Tokenizer,
    on_end: Callable[[SpeculationStats], None],
    *,
    in_triton: bool,
) -> RoutingEngine:
    """Open the engines that ``parameters`` name, as one. Raises ``SetupError``.

    ``in_triton``: this process is one of a Triton server. ``on_end``: as in ``RoutingEngine``.
    """
    tls = engine_tls(parameters)

    def triton_model(name: str, url: str = "") -> Engine:
        return GrpcEngine(
            url or parameters.engine_url,
            name,
            tokenizer.model_vocab_size,
            parameters.engine_stall_seconds,
            tls,
            own_server=not url and parameters.engine_transport == "auto" and in_triton,
        )

    # TensorRT-LLM's gRPC service verifies no drafts.
    is_service = parameters.engine is not None and parameters.engine.kind is EngineKind.TRTLLM
    targets: list[Engine] = []
    if parameters.engine is None:
        targets.append(triton_model(parameters.tensorrt_llm_model_name))
    elif is_service:
        for address, _ in parameters.engine.addresses:
            targets.append(
                _trtllm_service(
                    address,
                    tokenizer,
                    parameters.engine_max_sequence_tokens,
                    parameters.engine_stall_seconds,
                    tls,
                )
            )
    else:
        for address, model in parameters.engine.addresses:
            targets.append(triton_model(model, address))
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
    elif draft_model and _draft_tokenizer_fits(parameters, tokenizer):
        draft = triton_model(draft_model)
    options = _speculation_options(parameters)
    by_default = parameters.draft_source != "off"
    return RoutingEngine(target, draft, options, by_default=by_default, on_end=on_end)


def open_local_engine(
    name: str, parameters: EngineParameters, load: Callable[[], VocabularyFacts]
) -> Engine:
    """Open the engine of the model ``name``: ``embedded``, ``llm_api`` or ``trtllm://HOST:PORT``.

    ``load`` loads the model's tokenizer, which the embedded engine does not need. Raises
    ``SetupError``.
    """
    if parameters.engine == "embedded":
        with no_collections(freezes=True):
            from trtllm_bls.engines.embedded import EmbeddedEngine  # needs torch

        return EmbeddedEngine(parameters, name)
    if parameters.engine == "llm_api":
        return open_llm(name, parameters, lambda: load().model_vocab_size)
    ((address, _),) = parse_engine(parameters.engine).addresses
    return _trtllm_service(address, load(), parameters.max_sequence_tokens)


def _trtllm_service(
    address: str,
    tokenizer: VocabularyFacts,
    max_sequence_tokens: int | None,
    stall_seconds: float = 0,
    tls: ssl.SSLContext | None = None,
) -> TrtllmServiceEngine:
    return TrtllmServiceEngine(
        address,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.model_vocab_size,
        max_sequence_tokens=max_sequence_tokens,
        stall_seconds=stall_seconds,
        tls=tls,
    )


def _draft_tokenizer_fits(parameters: BlsParameters, tokenizer: Tokenizer) -> bool:
    """Return true if the draft model's ids have the target's meaning; else the log says so."""
    directory = parameters.draft_tokenizer_dir
    if directory is None or load_tokenizer(directory).fingerprint == tokenizer.fingerprint:
        return True
    log.warning(
        "draft model %s is not used: its tokenizer in %s has another token table than the target's",
        parameters.tensorrt_llm_draft_model_name,
        directory,
    )
    return False


def _speculation_options(parameters: BlsParameters) -> SpeculationOptions:
    source = DraftSource.MODEL  # for requests that ask for drafts by themselves
    if parameters.draft_source != "off":
        source = DraftSource(parameters.draft_source)
    return SpeculationOptions(
        draft_source=source,
        num_draft_tokens=parameters.num_draft_tokens,
        max_draft_tokens=parameters.max_draft_len,
        memory_tokens=parameters.draft_memory_tokens,
        draft_deadline_s=parameters.draft_deadline_seconds,
        overlap=parameters.overlap_drafts,
        ignore_unverifiable=parameters.unverifiable_drafts == "ignore",
    )
