"""Our requests as TrtllmService's: every field is sent, watched for here, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trtllm_bls.engines.ends import end_id_of
from trtllm_bls.engines.request_checks import check_request
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.messages import Array, EngineLimits, EngineRequest, Sampling

_NOWHERE = "TrtllmService has no field for it"
_DROPPED = "TrtllmService drops what it computes of them"
_SAMPLING = {field.name: field.name for field in fields(Sampling)} | {
    "top_p_reset_id": "top_p_reset_ids"
}
# Not sent: what they say is the default, and a server that speculates refuses their fields.
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p_decay": 1.0,
}
_GUIDE_TYPES = {
    name.lower(): number
    for name, number in (
        (value.name.removeprefix("GUIDE_TYPE_"), value.number)
        for value in messages.MESSAGES["GuidedDecodingParams"].DESCRIPTOR.enum_types[0].values
    )
    if number
}


@dataclass(frozen=True)
class ServiceRequest:
    """What is sent, and how its answer is to be read.

    ``copies``: each sequence of the answer is so many of the request's, which are all equal.
    ``ends_known``: the server knows every end of the request, so it ends by itself.
    """

    message: Any
    copies: int
    ends_known: bool


def check(request: EngineRequest, limits: EngineLimits) -> None:
    """Raises ``InvalidRequest``, or ``Unsupported`` for what the service has no way to honour."""
    refused = {
        "draft_input_ids": (request.draft, f"{_NOWHERE}; it speculates as its server is set up"),
        "embedding_bias": (request.embedding_bias, "its length there is another than the logits'"),
        "return_context_logits": (request.wants.context_logits, _DROPPED),
        "return_generation_logits": (request.wants.generation_logits, _DROPPED),
    }
    for name, (present, why) in refused.items():
        if present:
            raise Unsupported(name, f"cannot be honoured: {why}")
    if any(len(words) > 1 for words in request.bad_sequences):
        raise Unsupported("bad_words_list", "TrtllmService takes bad words of one token only")
    check_request(request, limits)


def service_request(
    request: EngineRequest, request_id: str, eos_id: int | None, limits: EngineLimits
) -> ServiceRequest:
    """The request as a message. ``eos_id``: where the server ends by itself. Raises as ``check``.

    What is greedy says so, since a service request that says nothing samples. Greedy sequences of
    one prompt are equal, and asking for several of them is an error there: one is asked for.
    """
    check(request, limits)
    greedy = request.sampling.is_greedy
    copies = request.num_return_sequences if greedy else 1
    message = messages.GenerateRequest(request_id=request_id, max_tokens=request.max_tokens)
    message.tokenized.input_token_ids.extend(request.input_ids)
    config = message.sampling_config
    config.beam_width = 1
    config.num_return_sequences = request.num_return_sequences // copies
    for name, value in _sampling(request.sampling, greedy).items():
        setattr(config, _SAMPLING[name], value)
    if request.wants.log_probs:
        message.output_config.logprobs = 1  # 0 gives none at all
    message.bad_token_ids.extend(words[0] for words in request.bad_sequences)
    known = _add_ends(message, request, eos_id)
    # An answer that is ended from here is read while it grows.
    message.streaming = request.streaming or not known
    _add_extras(message, dict(request.extras))
    return ServiceRequest(message, copies, known)


def _sampling(sampling: Sampling, greedy: bool) -> dict[str, Any]:
    given = {name: getattr(sampling, name) for name in _SAMPLING}
    given |= {"beam_width": None, "min_tokens": None}  # set elsewhere
    if not given["top_k"]:
        given["top_k"] = None
    if greedy or (given["top_p"] or 0) <= 0:
        given["top_p"] = None
    if greedy:
        given["top_k"] = 1
    return {
        name: value
        for name, value in given.items()
        if value is not None and value != _NEUTRAL.get(name)
    }


def _add_ends(message: Any, request: EngineRequest, eos_id: int | None) -> bool:
    """Whether the server knows every end of the request."""
    end_id, least = end_id_of(request), request.sampling.min_tokens or 0
    message.ignore_eos = end_id is None or end_id != eos_id
    if message.ignore_eos:  # turns stop ids off, too
        if end_id is not None and least > 1:
            raise Unsupported("min_tokens", f"only the model's own end_id ({eos_id}) waits for it")
        return end_id is None and not request.stop_sequences
    if least:
        message.sampling_config.min_tokens = least
    if least > 1:  # stops count from there on, which the server does not know of
        return not request.stop_sequences
    single = [stop[0] for stop in request.stop_sequences if len(stop) == 1]
    message.stop_token_ids.extend(single)
    # Otherwise the id is cut off the answer, or is not, depending on how it ends.
    message.include_stop_token_in_output = bool(single)
    return len(single) == len(request.stop_sequences)


def _add_extras(message: Any, extras: dict[str, Array]) -> None:
    guide_type = extras.pop("guided_decoding_guide_type", None)
    guide = extras.pop("guided_decoding_guide", None)
    if guide_type is not None:
        kind = _text(guide_type)
        if kind not in _GUIDE_TYPES:
            known = ", ".join(_GUIDE_TYPES)
            problem = f"{kind!r} is unknown; send one of: {known}"
            raise InvalidRequest("guided_decoding_guide_type", problem)
        text = "" if guide is None else _text(guide)
        if not text and kind != "json":
            raise InvalidRequest("guided_decoding_guide", f"is missing for {kind}")
        message.guided_decoding.guide_type = _GUIDE_TYPES[kind]
        message.guided_decoding.guide = text or kind  # without one, nothing is guided
    elif guide is not None:
        raise InvalidRequest("guided_decoding_guide_type", "is missing beside the guide")
    adapter = extras.pop("lora_task_id", None)
    if adapter is not None and int(np.asarray(adapter).reshape(-1)[0]):
        message.lora_config.task_id = int(np.asarray(adapter).reshape(-1)[0])
    for name in extras:
        raise Unsupported(name, f"cannot be honoured: {_NOWHERE}")


def _text(value: Array) -> str:
    first = np.asarray(value).reshape(-1)[0]
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)
