"""What both kinds of requests share on their way to a ``TextRequest``."""

from __future__ import annotations

from typing import Any

from trtllm_bls.messages import Sampling, SpeculationRequest
from trtllm_bls.openai.errors import invalid
from trtllm_bls.openai.schema import Common

_COLDEST = 1e-5  # smaller temperatures and top_p leave the likeliest token alone, or overflow


def shared_fields(request: Common, vocab_size: int) -> dict[str, Any]:
    """The fields of ``TextRequest`` that do not depend on the kind. Raises ``ApiError``."""
    return {
        "stream": bool(request.stream),
        "sampling": _sampling(request),
        "num_return_sequences": request.n or 1,
        "stop_words": _stops(request),
        "include_stop": bool(request.include_stop_str_in_output),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "bad_words": tuple(request.bad_words or ()),
        "token_bias": _bias(request, vocab_size),
        "end_id": -1 if request.ignore_eos else None,
        "skip_special_tokens": request.skip_special_tokens,
        "speculation": SpeculationRequest(
            num_draft_tokens=request.num_draft_tokens, draft_source=request.draft_source
        ),
    }


def _sampling(request: Common) -> Sampling:
    """OpenAI's defaults: a request that says nothing samples, over the whole vocabulary.

    Penalties that change nothing are not sent on; some engines have no input for them.
    """
    greedy = request.top_k == 1 or (request.top_p is not None and request.top_p < _COLDEST)
    greedy = greedy or (request.temperature is not None and request.temperature < _COLDEST)
    chosen: dict[str, Any] = {}
    if not greedy:
        chosen["temperature"] = 1.0 if request.temperature is None else request.temperature
        chosen["top_p"] = 1.0 if request.top_p is None else request.top_p
        chosen["top_k"] = request.top_k if request.top_k and request.top_k > 1 else None
        if request.seed is not None:
            chosen["seed"] = request.seed % 2**64  # unsigned on the engine's wire
    penalty = request.repetition_penalty
    return Sampling(
        frequency_penalty=request.frequency_penalty or None,
        presence_penalty=request.presence_penalty or None,
        repetition_penalty=None if penalty == 1 else penalty,
        min_tokens=request.min_tokens or None,
        **chosen,
    )


def _stops(request: Common) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _bias(request: Common, vocab_size: int) -> tuple[tuple[int, float], ...]:
    found = []
    for key, weight in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            problem = f"{key[:40]!r} is not a token id of this model; they are 0 to"
            raise invalid("logit_bias", f"{problem} {vocab_size - 1}")
        found.append((int(key), weight))
    return tuple(found)
