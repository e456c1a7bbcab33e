"""Errors in OpenAI's form: a status and ``{"error": {message, type, param, code}}``.

The orchestrator and engines name tensors and fields of their own. Clients get the names of the
fields that they sent.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TypeGuard

import msgspec

from trtllm_bls.errors import (
    PROMPT_FIELDS,
    DeadlineExceeded,
    Defect,
    EngineError,
    EngineStalled,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    ShuttingDown,
    unexpected,
)
from trtllm_bls.http.limits import RETRY, Refused
from trtllm_bls.types import GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT

DONE = b"data: [DONE]\n\n"  # the last event of every stream
_CODES = {421: "unknown_host", 403: "foreign_origin", 503: "overloaded"}

# Fields of requests, by the names of the orchestrator and engines. ``api_error`` maps the prompt
# and the guide.
_CLIENT_FIELDS = {
    "num_return_sequences": "n",
    "beam_width": "n",
    "stop_words": "stop",
    "stop_words_list": "stop",
    "bad_words_list": "bad_words",
    "embedding_bias": "logit_bias",
    "embedding_bias_words": "logit_bias",
    "random_seed": "seed",
    "request_output_len": "max_tokens",
    "min_length": "min_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "return_log_probs": "logprobs",
    "return_generation_logits": "logprobs",
    "return_context_logits": "echo",
    "end_id": "ignore_eos",
}


class Error(msgspec.Struct):
    """The error object of a response."""

    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(eq=False)
class ApiError(Refused):
    """A request that ends with ``status``; ``param`` names the field, ``code`` the kind.

    ``problem``: the message without the field's name; by default the message itself.
    ``too_long``: the number of the prompt's tokens, and the model's limit.
    """

    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    problem: str = ""
    too_long: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.problem = self.problem or self.message

    @property
    def body(self) -> bytes:
        """The JSON of the answer, and of an event in a stream."""
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status < 500:
            kind = "invalid_request_error"
        else:
            kind = "server_error"
        code = self.code or _CODES.get(self.status)
        return msgspec.json.encode({"error": Error(self.message, kind, self.param, code)})


def error_body(status: int, message: str) -> bytes:
    """Return the JSON of a refusal that names no field."""
    return ApiError(status, message).body


def invalid(param: str, problem: str, code: str | None = None) -> ApiError:
    """Return the error for a field whose value cannot be used."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code, problem=problem)


def api_error(
    error: Exception,
    prompt: str,
    max_tokens: int | None,
    guide: str = "response_format",
    request_id: str = "",
) -> ApiError:
    """Return the error to answer for an exception of the orchestrator or of ``http.limits``.

    ``prompt``: the request's field that has the prompt. ``max_tokens``: the model's limit for the
    tokens of prompt and completion. ``guide``: the field that demands guided decoding.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return ApiError(error.status, error.message, error.headers)
    text = " ".join(str(error).split())
    if is_too_long(error):
        sizes = None
        if error.tokens is not None and error.max_tokens is not None:
            sizes = (error.tokens, error.max_tokens)
            max_tokens = max_tokens or error.max_tokens + 1
        code = "context_length_exceeded"
        message = f"{prompt}: {error.problem}"
        if max_tokens:
            # litellm looks for this sentence, langchain for the code.
            message = f"This model's maximum context length is {max_tokens} tokens. {message}"
        problem = error.problem
        return ApiError(400, message, param=prompt, code=code, problem=problem, too_long=sizes)
    if isinstance(error, InvalidRequest):
        name = error.field
        if name in PROMPT_FIELDS:
            name = prompt
        if name in (GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT):
            name = guide
        else:
            name = _CLIENT_FIELDS.get(name, name)
        return invalid(name, error.problem)
    if isinstance(error, ShuttingDown):
        return ApiError(503, text, code="shutting_down", headers=RETRY)
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(error.retry_after_s or 1)}
        return ApiError(429, text, code="overloaded", headers=retry)
    if isinstance(error, (DeadlineExceeded, EngineTimeout)):
        return ApiError(504, text, code="timeout")
    if isinstance(error, (EngineUnavailable, EngineStalled)):
        return ApiError(503, text, code="engine_unavailable", headers=RETRY)
    if isinstance(error, Defect):
        return ApiError(500, text)
    if isinstance(error, EngineError):
        return ApiError(502, text, code="engine_error")
    return ApiError(500, str(unexpected(error, request_id or "an HTTP request")))


def is_too_long(error: Exception) -> TypeGuard[PromptTooLong]:
    """Return true if the prompt has more tokens than the model allows."""
    return isinstance(error, PromptTooLong) and error.field in PROMPT_FIELDS
