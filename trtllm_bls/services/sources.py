"""Which engine a text request runs on: the target alone, or the target with drafts.

A request that asks for speculation is refused by name where it cannot be kept lossless; a
deployment's default never refuses anything, it just does not apply to such a request.
"""

from __future__ import annotations

import logging
from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.speculative import SpeculativeEngine
from trtllm_bls.engines.transport import Route, TritonModel
from trtllm_bls.errors import EngineError, InvalidRequest, Unsupported
from trtllm_bls.messages import EngineRequest, Speculation, TextRequest
from trtllm_bls.orchestrator import Source
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.services.metrics import SpeculationMetrics
from trtllm_bls.speculative import (
    DraftSource,
    SpeculationOptions,
    SpeculationShared,
    check_speculative,
)
from trtllm_bls.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_SOURCES = tuple(source.value for source in DraftSource)


class Sources:
    """The models one deployment of ``tensorrt_llm_bls`` may use."""

    def __init__(self, parameters: BlsParameters, pb_utils: Any, tokenizer: Tokenizer) -> None:
        route = Route(
            transport=parameters.transport,
            url=parameters.engine_url,
            pb_utils=pb_utils,
            vocab_size=tokenizer.model_vocab_size,
            max_streams=parameters.max_streams,
            stall_seconds=parameters.stall_seconds,
        )
        self._parameters = parameters
        self._target = TritonModel(parameters.target, route)
        self._draft = None
        if parameters.draft and _same_vocabulary(parameters, tokenizer):
            self._draft = TritonModel(parameters.draft, route)
        self._shared = SpeculationShared()
        self._metrics = SpeculationMetrics(pb_utils)
        self._draft_missed = False

    async def source_for(self, request: TextRequest) -> Source:
        """The engine for one request. Raises ``InvalidRequest`` and ``EngineUnavailable``."""
        target = await self._target.engine()
        options = self._options(request)
        if options is None:
            return Source(engine=target)
        draft = await self._draft_engine() if options.uses_model else None
        engine = SpeculativeEngine(target, draft, options, self._shared)
        stats = engine.stats
        return Source(
            engine=engine,
            speculation=lambda: Speculation(
                rounds=stats.rounds, drafted=stats.drafted, accepted=stats.accepted
            ),
            done=lambda: self._metrics.add(stats),
        )

    async def close(self) -> None:
        """Close what was opened."""
        for model in filter(None, (self._target, self._draft)):
            await model.close()

    def _options(self, request: TextRequest) -> SpeculationOptions | None:
        """How to speculate, or ``None`` for plain decoding."""
        parameters = self._parameters
        if request.num_draft_tokens == 0 or request.draft_source == "off":
            return None
        asked = request.num_draft_tokens is not None or request.draft_source is not None
        source = request.draft_source or parameters.draft_source
        if source == "off":
            if not asked:
                return None
            source = "model" if self._draft is not None else "ngram"
        if source not in _SOURCES:
            raise InvalidRequest(
                "draft_source", f"'{source}' is unknown; send one of: off, {', '.join(_SOURCES)}"
            )
        if not asked and not _can_speculate(request):
            return None
        return SpeculationOptions(
            num_draft_tokens=request.num_draft_tokens or parameters.num_draft_tokens,
            use_draft_logits=request.use_draft_logits,
            draft_source=DraftSource(source),
            max_draft_tokens=parameters.max_draft_tokens,
            draft_deadline_s=parameters.draft_deadline_seconds,
            overlap=parameters.overlap_drafts,
        )

    async def _draft_engine(self) -> Engine | None:
        """The draft model's engine; without one, requests decode plainly."""
        if self._draft is None:
            return None
        try:
            engine = await self._draft.engine()
        except EngineError as error:
            if not self._draft_missed:
                log.warning("no draft model, decoding plainly: %s", error)
            self._draft_missed = True
            self._shared.add_failure("missing")
            return None
        self._draft_missed = False
        return engine


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


def _can_speculate(request: TextRequest) -> bool:
    try:
        check_speculative(
            EngineRequest(
                request_id=request.request_id,
                input_ids=(),
                max_tokens=request.max_tokens,
                sampling=request.sampling,
                num_return_sequences=request.num_return_sequences,
                extras=request.extras,
            )
        )
    except Unsupported:
        return False
    return True
