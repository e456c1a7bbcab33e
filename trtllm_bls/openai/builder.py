"""What all APIs share: the builder of a response, and what becomes of a request's common fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from trtllm_bls.openai.errors import ApiError, invalid
from trtllm_bls.openai.schema import Generation
from trtllm_bls.types import (
    Ending,
    FinishReason,
    Sampling,
    SpeculationRequest,
    TextChunk,
    TextRequest,
)

# Below it, temperature and top_p select the likeliest token, or overflow in the engine.
_COLDEST = 1e-5
_UNFINISHED = (FinishReason.CANCELLED, FinishReason.ERROR)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a response; chats and completions begin with these fields."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ResponseBuilder(ABC):
    """The response to one HTTP request: text chunks in, events or one JSON body out.

    ``index`` of a choice: its prompt's index times ``n``, plus its own among the prompt's.
    """

    object: ClassVar[str]  # of a whole response
    prompt_field: ClassVar[str]  # the request's field that has the prompt
    id_prefix: ClassVar[str]
    has_pings = False

    def __init__(self, head: Head, requests: list[TextRequest], guide_field: str) -> None:
        self.requests = requests
        self.guide_field = guide_field  # the request's field that asked for guided decoding, if any
        self.stream = requests[0].stream
        self.prompt_tokens = 0  # of all prompts
        self.cached_tokens: int | None = None  # of them; the engine may not tell
        self._head = head

    def count_prompt(self, tokens: int) -> None:
        """Count a prompt, which has been tokenised; its engine request follows."""
        self.prompt_tokens += tokens

    def count_cached(self, ending: Ending) -> None:
        """Count the prompt's tokens that were in the KV cache, where the engine tells them."""
        if ending.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + ending.cached_tokens

    @abstractmethod
    def add(self, index: int, chunk: TextChunk) -> bytes:
        """Add a choice's chunk; the events to send now, which may be none."""

    @property
    def is_large(self) -> bool:
        """Whether the end of the response takes so long that a thread should make it."""
        return False

    def ping(self) -> bytes:
        """With ``has_pings``: an event that shows a client that waits that the server works."""
        return b""

    @abstractmethod
    def last_events(self) -> bytes:
        """What ends a stream; any thread may call it."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""

    @abstractmethod
    def whole(self) -> bytes:
        """The JSON body of a response that is not streamed; any thread may call it."""


def well_ended(chunk: TextChunk) -> Ending | None:
    """The ending of its sequence, unless it was cancelled or failed: then an error follows."""
    ending = chunk.ending
    return None if ending is None or ending.finish_reason in _UNFINISHED else ending


def shared_fields(request: Generation, vocab_size: int) -> dict[str, Any]:
    """The fields of ``TextRequest`` that requests of all APIs have. Raises ``ApiError``."""
    return {
        "stream": bool(request.stream),
        "sampling": _sampling(request),
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


def _sampling(request: Generation) -> Sampling:
    """As OpenAI samples: without any field at temperature 1 over the whole vocabulary.

    What changes nothing is left out, since some engines have no input for it.
    """
    greedy = request.top_k == 1 or (request.top_p is not None and request.top_p < _COLDEST)
    greedy = greedy or (request.temperature is not None and request.temperature < _COLDEST)
    chosen: dict[str, Any] = {}
    if not greedy:
        chosen["temperature"] = 1.0 if request.temperature is None else request.temperature
        chosen["top_p"] = 1.0 if request.top_p is None else request.top_p
        chosen["top_k"] = request.top_k if request.top_k and request.top_k > 1 else None
        chosen["min_p"] = request.min_p or None
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


def _bias(request: Generation, vocab_size: int) -> tuple[tuple[int, float], ...]:
    found = []
    for key, weight in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            problem = f"{key[:40]!r} is not a token id of this model; they are 0 to"
            raise invalid("logit_bias", f"{problem} {vocab_size - 1}")
        found.append((int(key), weight))
    return tuple(found)
