"""Checks that an engine can run a request: the contract's bounds, and the engine's capacity.

Values from the wire and requests made in Python meet the same rules and the same error texts.
"""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections.abc import Collection
from typing import Any

import numpy as np

from trtllm_bls.errors import InvalidRequest, PromptTooLong, Unsupported
from trtllm_bls.types import Draft, EngineCapacity, EngineRequest
from trtllm_bls.wire.contract import ENGINE

# The fields of ``Sampling`` that this package's own engines obey. Those of beam search mean nothing
# without it, and more than one beam is refused.
HONOURED = frozenset(
    (
        "temperature",
        "top_k",
        "top_p",
        "top_p_min",
        "top_p_decay",
        "top_p_reset_id",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "min_tokens",
        "seed",
        "beam_width",
        "length_penalty",
        "early_stopping",
        "beam_search_diversity_rate",
    )
)


def check_request(request: EngineRequest, capacity: EngineCapacity) -> None:
    """Raise ``InvalidRequest`` by wire name for anything that no engine of this capacity runs.

    ``Unsupported`` is raised for fields that none of this package's own engines honours, such as
    beam search. A limit that the capacity does not have is not checked.
    """
    draft = request.draft or Draft(token_ids=())
    sampling = request.sampling
    values: dict[str, Any] = vars(request) | vars(sampling)
    values["draft_acceptance_threshold"] = draft.acceptance_threshold
    for tensor in ENGINE.inputs:
        if tensor.bounds is not None and values.get(tensor.key) is not None:
            tensor.check(values[tensor.key])
    for key, value in vars(sampling).items():
        if value is not None and key not in HONOURED:
            names = ENGINE.input_names(key) or [key]
            raise Unsupported(names[0], "this engine cannot honour it")
    if (sampling.beam_width or 1) > 1:
        # Beams rewrite what was already sent and share one width per batch; samples do neither.
        problem = f"{sampling.beam_width}; this engine has no beam search"
        raise Unsupported("beam_width", f"{problem}, use num_return_sequences")
    if request.wants.top_log_probs and not capacity.tells_top_log_probs:
        problem = "this engine reports no alternatives; use return_generation_logits"
        raise Unsupported("return_top_log_probs", problem)
    if not request.input_ids:
        raise InvalidRequest("input_ids", "the prompt is empty")
    _check_tokens(request, draft, capacity)
    if any(math.isnan(bias) or bias == math.inf for _, bias in request.embedding_bias):
        raise InvalidRequest("embedding_bias", "holds NaN or infinity")
    logits = draft.logits
    if logits is not None:
        shape = len(draft.token_ids), capacity.vocab_size or logits.shape[-1]
        if logits.shape != shape:
            raise InvalidRequest("draft_logits", f"shape {logits.shape} is not {shape}")
        if not (logits < np.inf).all():
            raise InvalidRequest("draft_logits", "holds NaN or infinity")


def _check_tokens(request: EngineRequest, draft: Draft, capacity: EngineCapacity) -> None:
    """Check the number of tokens in each field, and that the vocabulary has them."""
    vocab_size = capacity.vocab_size or sys.maxsize
    limits = {"draft_input_ids": capacity.max_draft_tokens}
    if capacity.max_sequence_tokens:
        limits["input_ids"] = capacity.max_sequence_tokens - 1
    words = {"stop_words_list": request.stop_sequences, "bad_words_list": request.bad_sequences}
    fields: dict[str, Collection[Any]] = {
        "input_ids": request.input_ids,
        "draft_input_ids": draft.token_ids,
        "end_id": {request.end_id} - {-1, None},  # -1: no token ends the text
    }
    for name, sequences in words.items():
        fields[name] = list(itertools.chain.from_iterable(sequences))
    fields["embedding_bias"] = [token for token, _ in request.embedding_bias]
    fields["runtime_top_p_reset_ids"] = {request.sampling.top_p_reset_id} - {None}
    for name, ids in fields.items():
        limit = limits.get(name)
        if limit is not None and len(ids) > limit:
            if name == "input_ids":
                raise PromptTooLong(name, len(ids), limit)
            raise InvalidRequest(name, f"{len(ids)} tokens; at most {limit} are allowed")
        if not all(words.get(name, ())):
            raise InvalidRequest(name, "holds an empty sequence")
        if not ids:
            continue
        lowest: Any = min
        highest: Any = max
        if isinstance(ids, array):  # numpy makes no object of each id of a long prompt
            lowest = np.min
            highest = np.max
        for token in (lowest(ids), highest(ids)):
            if token >= vocab_size and "prompt_embedding_table" in request.extras:
                raise Unsupported("prompt_embedding_table", "this engine reads no such table")
            if not 0 <= token < vocab_size:
                raise InvalidRequest(name, f"token {token} is not in 0..{vocab_size - 1}")
