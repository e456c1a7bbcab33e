"""Whether an engine can run a request: the bounds of the contract table, and the engine's capacity.

Values from the wire and requests made in Python meet the same rules and the same error texts.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Collection
from typing import Any

import numpy as np

from trtllm_bls.contract import ENGINE
from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.types import Draft, EngineCapacity, EngineRequest, Sampling

# The fields of ``Sampling`` that this package's own engines obey. Those of beam search mean nothing
# without it, and more than one beam is refused.
HONOURED = frozenset(
    (
        *("temperature", "top_k", "top_p", "top_p_min", "top_p_decay", "top_p_reset_id", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
        *("min_tokens", "seed"),
        *("beam_width", "length_penalty", "early_stopping", "beam_search_diversity_rate"),
    )
)


def check_request(request: EngineRequest, capacity: EngineCapacity) -> None:
    """Raises ``InvalidRequest`` by wire name for anything that no engine of this capacity runs,
    and ``Unsupported`` for what none of this package's own engines honours, such as beam search.

    What the capacity does not tell is not checked.
    """
    draft = request.draft or Draft(token_ids=())
    values: dict[str, Any] = vars(request) | vars(request.sampling)
    values["draft_acceptance_threshold"] = draft.acceptance_threshold
    for tensor in ENGINE.inputs:
        if tensor.bounds is not None and values.get(tensor.key) is not None:
            tensor.check(values[tensor.key])
    _check_sampling(request.sampling)
    if request.wants.top_log_probs and not capacity.tells_top_log_probs:
        problem = "this engine reports no alternatives; use return_generation_logits"
        raise Unsupported("return_top_log_probs", problem)
    if not request.input_ids:
        raise InvalidRequest("input_ids", "the prompt is empty")
    longest = capacity.max_sequence_tokens
    for name, ids, most in (
        ("input_ids", request.input_ids, None if longest is None else longest - 1),
        ("draft_input_ids", draft.token_ids, capacity.max_draft_tokens),
    ):
        if most is not None and len(ids) > most:
            raise InvalidRequest(name, f"{len(ids)} tokens; at most {most} are allowed")
    _check_tokens(request, draft, capacity.vocab_size or sys.maxsize)
    if draft.logits is not None:
        _check_logits(draft, capacity.vocab_size)


def _check_sampling(sampling: Sampling) -> None:
    for key, value in vars(sampling).items():
        if value is not None and key not in HONOURED:
            name = next((tensor.name for tensor in ENGINE.inputs if tensor.key == key), key)
            raise Unsupported(name, "this engine cannot honour it")
    if (sampling.beam_width or 1) > 1:
        # Beams rewrite what was already sent and share one width per batch; samples do neither.
        problem = f"{sampling.beam_width}; this engine has no beam search"
        raise Unsupported("beam_width", f"{problem}, use num_return_sequences")


def _check_tokens(request: EngineRequest, draft: Draft, vocab_size: int) -> None:
    for name, words in (
        ("stop_words_list", request.stop_sequences),
        ("bad_words_list", request.bad_sequences),
    ):
        if not all(words):
            raise InvalidRequest(name, "holds an empty sequence")
    given: dict[str, Collection[Any]] = {
        "input_ids": request.input_ids,
        "end_id": {request.end_id} - {-1, None},  # -1: no token ends the text
        "stop_words_list": [token for word in request.stop_sequences for token in word],
        "bad_words_list": [token for word in request.bad_sequences for token in word],
        "embedding_bias": [token for token, _ in request.embedding_bias],
        "runtime_top_p_reset_ids": {request.sampling.top_p_reset_id} - {None},
        "draft_input_ids": draft.token_ids,
    }
    for name, ids in given.items():
        # numpy makes no object of each id in the array of a long prompt.
        ends: Any = (np.min, np.max) if isinstance(ids, array) else (min, max)
        for token in [end(ids) for end in ends] if ids else ():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(name, f"token {token} is not in 0..{vocab_size - 1}")
    if any(math.isnan(bias) or bias == math.inf for _, bias in request.embedding_bias):
        raise InvalidRequest("embedding_bias", "holds NaN or infinity")


def _check_logits(draft: Draft, vocab_size: int | None) -> None:
    assert draft.logits is not None
    shape = len(draft.token_ids), vocab_size or draft.logits.shape[-1]
    if draft.logits.shape != shape:
        raise InvalidRequest("draft_logits", f"shape {draft.logits.shape} is not {shape}")
    if not (draft.logits < np.inf).all():
        raise InvalidRequest("draft_logits", "holds NaN or infinity")
