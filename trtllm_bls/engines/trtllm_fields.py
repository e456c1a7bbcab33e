"""What TensorRT-LLM's gRPC service and its LLM API share: our requests in their words, and where
sequences end.

Owns what both take and do not take. What is greedy is said aloud, since a request that says nothing
samples there. Both end at one end id and at single stop ids, give the end id as a token of the
answer, and give a stop of several ids up to its last one. ``SequenceEnds`` watches for every end
that a request names, so the chunks are those that ``engines.base`` promises: without the end id, up
to and including a stop, and never more than ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from packaging.version import InvalidVersion, Version

from trtllm_bls.engines.request_checks import HONOURED, check_request
from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import (
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    Array,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Guide,
    Sampling,
    TokenIds,
    TopLogProbs,
)
from trtllm_bls.wire.request_fields import required_inputs

# The first release whose source was read and honours every field. The sampler of earlier ones took
# some fields and did nothing (NVIDIA/TensorRT-LLM#9442, mended by #16485, #16594, #17172).
_HONOURS_ALL = Version("1.3.0rc29")
# Why a sequence ended; a stop of the request's own is seen in the ids.
REASONS = {
    "length": FinishReason.LENGTH,
    "stop": FinishReason.END_ID,
    "timeout": FinishReason.TIMEOUT,
    "cancelled": FinishReason.CANCELLED,
}
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")
# What an engine of this kind takes in place of drafts.
SPECULATES = "it speculates by speculative_config in its own --extra_llm_api_options"
# The fields of ``Sampling`` that both have, and what they call them.
_SAMPLING_NAMES = {name: name for name in HONOURED} | {"top_p_reset_id": "top_p_reset_ids"}
# Not sent: what they say is the default, and an engine that speculates refuses their fields.
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p_decay": 1.0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
}


def ignored_fields(release: str) -> str:
    """A warning of what a release of TensorRT-LLM may ignore without a word; empty where it honours
    every field."""
    try:
        if Version(release) >= _HONOURS_ALL:
            return ""
    except InvalidVersion:
        release = release or "of an unknown version"
    return f"TensorRT-LLM {release} may ignore penalties, bad words, n-grams and seeds"


def check(
    request: EngineRequest,
    capacity: EngineCapacity,
    taken: Collection[str],
    refused: Mapping[str, str],
    otherwise: str,
) -> None:
    """Raises ``InvalidRequest``, or ``Unsupported`` for what neither takes, is ``refused`` (why, by
    wire name), or is not ``taken`` (``otherwise`` says why)."""
    present = {
        "draft_input_ids": request.draft is not None,
        "embedding_bias": bool(request.embedding_bias),
        "return_context_logits": request.wants.context_logits,
        "return_generation_logits": request.wants.generation_logits,
        "return_perf_metrics": request.wants.perf_metrics,
        "bad_words_list": any(len(words) > 1 for words in request.bad_sequences),
    }
    present |= dict.fromkeys((*required_inputs(request), *request.extras), True)
    for name, is_there in present.items():
        if is_there and (name in refused or name not in taken):
            raise Unsupported(name, f"cannot be honoured: {refused.get(name, otherwise)}")
    check_request(request, capacity)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """What is sent of it, under TensorRT-LLM's names; ``min_tokens`` and beams are not."""
    fields = {name: getattr(sampling, name) for name in _SAMPLING_NAMES}
    fields |= {"beam_width": None, "min_tokens": None}
    greedy = sampling.is_greedy
    if greedy or (sampling.top_p or 0) <= 0:
        fields["top_p"] = None
    fields["top_k"] = 1 if greedy else sampling.top_k or None
    if sampling.early_stopping is not None:
        fields["early_stopping"] = int(sampling.early_stopping)
    return {
        _SAMPLING_NAMES[name]: value
        for name, value in fields.items()
        if value is not None and value != _NEUTRAL.get(name)
    }


def stop_ids(request: EngineRequest) -> tuple[list[int], bool]:
    """The stops that are sent, which are those of one id, and whether these are all there are.

    None are sent with ``min_tokens``, from which on they count: the engine would not wait for it.
    """
    stops = request.stop_sequences
    waits = (request.sampling.min_tokens or 0) > 1
    single = [] if waits else [stop[0] for stop in stops if len(stop) == 1]
    return single, len(single) == len(stops)


def likeliest(pairs: Iterable[tuple[int, float]], count: int) -> TopLogProbs:
    """The first ``count`` of the alternatives at one place, which list the chosen id, too."""
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:count])


def guide_text(guide: Guide, *, may_be_empty: bool = False) -> str:
    """Return the text of a guide whose kind is one of ``GUIDE_TYPES``; empty for ``json``.

    ``may_be_empty``: it may be so for other kinds. Raises ``InvalidRequest``.
    """
    if guide.kind not in GUIDE_TYPES:
        known = ", ".join(GUIDE_TYPES)
        problem = f"{guide.kind!r} is unknown; send one of: {known}"
        raise InvalidRequest(GUIDE_KIND_INPUT, problem)
    if guide.kind == "json":
        return ""
    if guide.text is None or not (guide.text or may_be_empty):
        raise InvalidRequest(GUIDE_TEXT_INPUT, f"is missing for {guide.kind}")
    return guide.text


def text_of(extras: Mapping[str, Array], name: str) -> str | None:
    """The text of an engine's input; ``None`` where it was not sent."""
    values = np.asarray(extras.get(name, ())).reshape(-1)
    if not values.size:
        return None
    first = values[0]
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)


# --- where sequences end ------------------------------------------------------------------------


def sequence_ends(request: EngineRequest) -> list[SequenceEnds]:
    """One for each sequence that the engine is asked for; greedy ones of a prompt are all equal."""
    count = 1 if request.sampling.is_greedy else request.num_return_sequences
    copies = request.num_return_sequences // count
    return [SequenceEnds(request, range(i, i + copies)) for i in range(count)]


class SequenceEnds:
    """One sequence of the engine: ids in as they come, chunks out, the last of them ``final``.

    ``indices``: the sequences of ``request`` that it is. ``received`` counts the ids that came in.
    ``cached_tokens``: set before the first ids are fed, it is on the first chunk.
    """

    def __init__(self, request: EngineRequest, indices: Sequence[int]) -> None:
        self.done = False
        self.received = 0
        self.cached_tokens: int | None = None
        self.stop_ids = frozenset(stop[0] for stop in request.stop_sequences if len(stop) == 1)
        self._criteria = StoppingCriteria.of(request)
        self._indices = indices
        self._cum_log_prob = 0.0

    def feed(
        self,
        ids: TokenIds,
        log_probs: Sequence[float] | None = None,
        top_log_probs: Sequence[TopLogProbs] | None = None,
        ended: bool = False,
        reason: FinishReason | None = None,
    ) -> list[EngineChunk]:
        """The chunks of the next ids. Not to be called once ``done``.

        Log-probabilities are those of the ids, and maybe more. ``ended``: nothing follows, for
        ``reason`` where no end of the request's own is in ``ids``.
        """
        self.received += len(ids)
        kept, found = self._criteria.feed(ids)
        self.done = ended or found is not None
        chunk = EngineChunk(token_ids=kept, sequence_index=self._indices[0])
        if self.done:
            chunk.final, chunk.finish_reason = True, found or reason
        if log_probs is not None:
            chunk.log_probs = tuple(log_probs[: len(kept)])
            self._cum_log_prob += sum(chunk.log_probs)
            chunk.cum_log_prob = self._cum_log_prob
        if top_log_probs is not None:
            chunk.top_log_probs = tuple(top_log_probs[: len(kept)])
        if not kept and not self.done:
            return []
        chunk.cached_tokens, self.cached_tokens = self.cached_tokens, None
        if len(self._indices) == 1:  # nearly always
            return [chunk]
        return [replace(chunk, sequence_index=index) for index in self._indices]
