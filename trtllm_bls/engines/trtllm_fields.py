"""The common part of TensorRT-LLM's gRPC service and its LLM API: requests in their words, and the
ends of sequences.

Owns the lists of fields that both take and do not take. Greedy requests state ``top_k`` 1, since a
request without it samples there. Both end at one end id and at single stop ids, give the end id as
a token of the answer, and give a stop of several ids up to its last one. ``SequenceEnds`` watches
for every end that a request names, so the chunks are those that ``engines.base`` promises: without
the end id, up to and including a stop, and never more than ``max_tokens``.
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
# The reasons why a sequence ended; a stop of the request's own shows in the ids.
REASONS = {
    "length": FinishReason.LENGTH,
    "stop": FinishReason.END_ID,
    "timeout": FinishReason.TIMEOUT,
    "cancelled": FinishReason.CANCELLED,
}
GUIDE_TYPES: tuple[str, ...] = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")
# The setting of an engine of this kind in place of drafts.
SPECULATES = "it speculates by speculative_config in its own --extra_llm_api_options"
# The fields of ``Sampling`` that both have, with their names there.
_SAMPLING_NAMES = {name: name for name in HONOURED} | {"top_p_reset_id": "top_p_reset_ids"}
# Values that are not sent: they are the defaults, and an engine that speculates refuses the fields.
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p_decay": 1.0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
}


def ignored_fields(release: str) -> str:
    """Return a warning of fields that a release of TensorRT-LLM may ignore in silence.

    Empty if it honours every field.
    """
    try:
        if Version(release) >= _HONOURS_ALL:
            return ""
    except InvalidVersion:
        release = release or "of an unknown version"
    return f"TensorRT-LLM {release} may ignore penalties, bad words, n-grams and seeds"


def check(
    request: EngineRequest,
    capacity: EngineCapacity,
    supported: Collection[str],
    refusals: Mapping[str, str],
    default_refusal: str,
) -> None:
    """Raise ``InvalidRequest`` for a bad request, and ``Unsupported`` for a field not taken.

    ``refusals``: the reason why a field is refused, by wire name. Any other field that is not
    ``supported`` is refused for ``default_refusal``.
    """
    presence = {
        "draft_input_ids": request.draft is not None,
        "embedding_bias": bool(request.embedding_bias),
        "return_context_logits": request.wants.context_logits,
        "return_generation_logits": request.wants.generation_logits,
        "return_perf_metrics": request.wants.perf_metrics,
        "bad_words_list": any(len(words) > 1 for words in request.bad_sequences),
    }
    presence |= dict.fromkeys((*required_inputs(request), *request.extras), True)
    for name, is_present in presence.items():
        if is_present and (name in refusals or name not in supported):
            reason = refusals.get(name, default_refusal)
            raise Unsupported(name, f"cannot be honoured: {reason}")
    check_request(request, capacity)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields to send, under TensorRT-LLM's names; ``min_tokens`` and beams are not."""
    fields = {name: getattr(sampling, name) for name in _SAMPLING_NAMES}
    fields |= {"beam_width": None, "min_tokens": None}
    greedy = sampling.is_greedy
    if greedy or (sampling.top_p or 0) <= 0:
        fields["top_p"] = None
    fields["top_k"] = 1 if greedy else sampling.top_k or None
    if sampling.early_stopping is not None:
        fields["early_stopping"] = int(sampling.early_stopping)
    sent_fields = {}
    for name, value in fields.items():
        if value is not None and value != _NEUTRAL.get(name):
            sent_fields[_SAMPLING_NAMES[name]] = value
    return sent_fields


def stop_ids(request: EngineRequest) -> tuple[list[int], bool]:
    """Return the stops to send, which are those of one id, and true if these are all stops.

    None are sent with ``min_tokens``, since the engine would stop at them before that minimum.
    """
    stops = request.stop_sequences
    single: list[int] = []
    if (request.sampling.min_tokens or 0) <= 1:
        single = [stop[0] for stop in stops if len(stop) == 1]
    return single, len(single) == len(stops)


def likeliest(pairs: Iterable[tuple[int, float]], count: int) -> TopLogProbs:
    """Return the ``count`` likeliest alternatives at one place, of which the chosen id is one."""
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:count])


def guide_text(guide: Guide, *, may_be_empty: bool = False) -> str:
    """Return the text of a guide whose kind is one of ``GUIDE_TYPES``; empty for ``json``.

    ``may_be_empty``: it may be so for other kinds. Raises ``InvalidRequest``.
    """
    if guide.kind not in GUIDE_TYPES:
        kinds = ", ".join(GUIDE_TYPES)
        problem = f"{guide.kind!r} is unknown; send one of: {kinds}"
        raise InvalidRequest(GUIDE_KIND_INPUT, problem)
    if guide.kind == "json":
        return ""
    if guide.text is None or not (guide.text or may_be_empty):
        raise InvalidRequest(GUIDE_TEXT_INPUT, f"is missing for {guide.kind}")
    return guide.text


def text_of(extras: Mapping[str, Array], name: str) -> str | None:
    """Return the text of an engine's input; ``None`` if the request does not have it."""
    values = np.asarray(extras.get(name, ())).reshape(-1)
    if not values.size:
        return None
    value = values[0]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# --- where sequences end ------------------------------------------------------------------------


def sequence_ends(request: EngineRequest) -> list[SequenceEnds]:
    """Return one for each sequence to request; greedy ones of a prompt are all equal."""
    sequences = request.num_return_sequences
    if request.sampling.is_greedy:
        return [SequenceEnds(request, range(sequences))]
    return [SequenceEnds(request, (index,)) for index in range(sequences)]


class SequenceEnds:
    """A sequence of the engine: ids in as they come, chunks out, the last of them ``final``.

    ``indices``: the sequences of ``request`` that get its chunks. ``received`` counts the ids so
    far. ``cached_tokens``, set before the first ids are fed, is on the first chunk.
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
        """Return the chunks of the next ids. Not to be called once ``done``.

        Log-probabilities are those of the ids, and maybe more. ``ended``: nothing follows. The
        finish reason is then ``reason``, unless an end of the request's own is in ``ids``.
        """
        self.received += len(ids)
        answer_ids, own_reason = self._criteria.feed(ids)
        num_ids = len(answer_ids)
        self.done = ended or own_reason is not None
        chunk = EngineChunk(token_ids=answer_ids, sequence_index=self._indices[0])
        if self.done:
            chunk.final = True
            chunk.finish_reason = own_reason or reason
        if log_probs is not None:
            chunk.log_probs = tuple(log_probs[:num_ids])
            self._cum_log_prob += sum(chunk.log_probs)
            chunk.cum_log_prob = self._cum_log_prob
        if top_log_probs is not None:
            chunk.top_log_probs = tuple(top_log_probs[:num_ids])
        if not answer_ids and not self.done:
            return []
        chunk.cached_tokens = self.cached_tokens
        self.cached_tokens = None
        if len(self._indices) == 1:  # nearly always
            return [chunk]
        return [replace(chunk, sequence_index=index) for index in self._indices]
