"""Our requests as TrtllmService's: every field is sent, watched for here, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trtllm_bls.engines import trtllm_fields as trtllm
from trtllm_bls.engines.ends import sequence_ends
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.errors import Unsupported
from trtllm_bls.types import Array, EngineCapacity, EngineRequest

_NOWHERE = "TrtllmService has no field for it"
_DROPPED = "TrtllmService drops what it computes of them"
_TAKEN = {"guided_decoding_guide_type", "guided_decoding_guide", "lora_task_id"}
_REFUSED = {
    "draft_input_ids": f"{_NOWHERE}; {trtllm.SPECULATES}",
    "embedding_bias": "TrtllmService wants another length than that of the logits",
    "return_context_logits": _DROPPED,
    "return_generation_logits": _DROPPED,
    "return_perf_metrics": "TrtllmService reports no figures",
    "bad_words_list": "TrtllmService takes bad words of one token only",
    "lora_weights": "TrtllmService takes lora_task_id alone, of an adapter that its server has",
    "lora_config": "TrtllmService takes lora_task_id alone, of an adapter that its server has",
}
_GUIDE_TYPES = {kind: number for number, kind in enumerate(trtllm.GUIDE_TYPES, start=1)}


def service_request(
    request: EngineRequest, request_id: str, eos_id: int | None, capacity: EngineCapacity
) -> tuple[Any, bool]:
    """The request as a message, and whether the server knows every end of it, so that it ends by
    itself. ``eos_id``: the id at which it does.

    Raises ``InvalidRequest``, or ``Unsupported`` for what the service has no way to honour.
    """
    trtllm.check(request, capacity, _TAKEN, _REFUSED, _NOWHERE)
    sampling = trtllm.sampling_fields(request.sampling)
    message = messages.GenerateRequest(
        request_id=request_id,
        max_tokens=request.max_tokens,
        sampling_config={
            "beam_width": 1,
            "num_return_sequences": len(sequence_ends(request)),
            **sampling,
        },
        bad_token_ids=[words[0] for words in request.bad_sequences],
    )
    message.tokenized.input_token_ids.extend(request.input_ids)
    if request.wants.log_probs:
        message.output_config.logprobs = max(1, request.wants.top_log_probs)  # 0 gives none at all
    known = _add_ends(message, request, eos_id)
    # An answer that is ended from here is read while it grows.
    message.streaming = request.streaming or not known
    _add_extras(message, request.extras)
    return message, known


def _add_ends(message: Any, request: EngineRequest, eos_id: int | None) -> bool:
    """Whether the server knows every end of the request."""
    never_ends, least = request.end_id in (None, -1), request.sampling.min_tokens or 0
    message.ignore_eos = never_ends or request.end_id != eos_id
    if message.ignore_eos:  # turns stop ids off, too
        if not never_ends and least > 1:
            raise Unsupported("min_tokens", f"only the model's own end_id ({eos_id}) waits for it")
        return never_ends and not request.stop_sequences
    if least:
        message.sampling_config.min_tokens = least
    single, known = trtllm.stop_ids(request)
    message.stop_token_ids.extend(single)
    # Otherwise the id is cut off the answer, or is not, depending on how it ends.
    message.include_stop_token_in_output = bool(single)
    return known


def _add_extras(message: Any, extras: Mapping[str, Array]) -> None:
    guide = trtllm.guide_of(extras)
    if guide is not None:
        kind, text = guide
        message.guided_decoding.guide_type = _GUIDE_TYPES[kind]
        message.guided_decoding.guide = text or kind  # without one nothing is guided
    if "lora_task_id" in extras:
        adapter = int(np.asarray(extras["lora_task_id"]).reshape(-1)[0])
        if adapter:  # 0 is the model itself
            message.lora_config.task_id = adapter
