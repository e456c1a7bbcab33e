"""What a request may ask of the embedded engine; everything else is refused by wire name.

Runs before any work, on the caller's thread, and needs nothing but the limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.messages import Draft, EngineLimits, EngineRequest, Sampling


def validate(request: EngineRequest, limits: EngineLimits) -> None:
    """Raises ``InvalidRequest`` or ``Unsupported`` naming the field, its value and what is allowed.

    ``limits`` must be complete.
    """
    longest, most = limits.max_sequence_tokens, limits.max_draft_tokens
    vocab_size = limits.vocab_size
    assert longest is not None and vocab_size is not None and most is not None
    if not request.input_ids:
        raise InvalidRequest("input_ids", "the prompt is empty")
    _check_ids("input_ids", request.input_ids, vocab_size)
    if len(request.input_ids) >= longest:
        raise InvalidRequest(
            "input_ids", f"{len(request.input_ids)} tokens; at most {longest - 1} are allowed"
        )
    if request.max_tokens <= 0:
        raise InvalidRequest("request_output_len", f"{request.max_tokens} is not above 0")
    if request.num_return_sequences < 1:
        raise InvalidRequest("num_return_sequences", f"{request.num_return_sequences} is below 1")
    _check_sampling(request.sampling, vocab_size)
    if request.end_id is not None and not -1 <= request.end_id < vocab_size:
        raise InvalidRequest("end_id", f"{request.end_id} is not in -1..{vocab_size - 1}")
    _check_words(request, vocab_size)
    if request.draft is not None:
        _check_draft(request.draft, vocab_size, most)
    for name, array in request.extras.items():
        if np.size(array):
            raise Unsupported(name, "this engine cannot honour it")


def _check_words(request: EngineRequest, vocab_size: int) -> None:
    for field, words in (
        ("stop_words_list", request.stop_sequences),
        ("bad_words_list", request.bad_sequences),
    ):
        if not all(words):
            raise InvalidRequest(field, "holds an empty sequence")
        _check_ids(field, (token for word in words for token in word), vocab_size)
    _check_ids("embedding_bias", (token for token, _ in request.embedding_bias), vocab_size)
    for _, bias in request.embedding_bias:
        if math.isnan(bias) or bias == math.inf:
            raise InvalidRequest("embedding_bias", f"{bias} is not a number below infinity")


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(field, f"token {token} is not in 0..{vocab_size - 1}")


# field, wire name, lower bound, upper bound, whether the lower bound itself is allowed
_RANGES = (
    ("temperature", "temperature", 0, math.inf, True),
    ("top_k", "runtime_top_k", 0, math.inf, True),
    ("top_p", "runtime_top_p", -math.inf, 1, True),  # not above 0 means absent
    ("top_p_min", "runtime_top_p_min", 0, 1, False),
    ("top_p_decay", "runtime_top_p_decay", 0, 1, False),
    ("repetition_penalty", "repetition_penalty", 0, math.inf, False),
    ("presence_penalty", "presence_penalty", -math.inf, math.inf, False),
    ("frequency_penalty", "frequency_penalty", -math.inf, math.inf, False),
    ("min_tokens", "min_tokens", 0, math.inf, True),
    ("seed", "seed", 0, 2**64 - 1, True),
    ("beam_width", "beam_width", 1, math.inf, True),
)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    for field, wire_name, low, high, inclusive in _RANGES:
        value = getattr(sampling, field)
        if value is None:
            continue
        # Written so that NaN fails; infinity itself is never a setting.
        enough = value >= low if inclusive else value > low
        if not (enough and value <= high and value != math.inf):
            raise InvalidRequest(wire_name, f"{value} is not in {_interval(low, high, inclusive)}")
    if sampling.top_p_reset_id is not None:
        # TensorRT-LLM's own "no token resets" is -1.
        _check_ids("runtime_top_p_reset_ids", {sampling.top_p_reset_id} - {-1}, vocab_size)
    if sampling.beam_width is not None and sampling.beam_width > 1:
        # Beams rewrite what was already sent and share one width per batch; samples do neither.
        raise Unsupported(
            "beam_width",
            f"{sampling.beam_width}; this engine has no beam search, use num_return_sequences",
        )


def _interval(low: float, high: float, inclusive: bool) -> str:
    return f"{'[' if inclusive else '('}{low}, {high}{')' if high == math.inf else ']'}"


def _check_draft(draft: Draft, vocab_size: int, most: int) -> None:
    count = len(draft.token_ids)
    if count > most:
        raise InvalidRequest("draft_input_ids", f"{count} tokens; at most {most} are allowed")
    _check_ids("draft_input_ids", draft.token_ids, vocab_size)
    threshold = draft.acceptance_threshold
    if threshold is not None and not 0 < threshold <= 1:
        raise InvalidRequest("draft_acceptance_threshold", f"{threshold} is not in (0, 1]")
    if draft.logits is None:
        return
    if draft.logits.shape != (count, vocab_size):
        raise InvalidRequest(
            "draft_logits", f"shape {draft.logits.shape} is not ({count}, {vocab_size})"
        )
    if not (draft.logits < np.inf).all():
        raise InvalidRequest("draft_logits", "holds NaN or infinity")
