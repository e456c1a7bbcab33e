"""What chats and completions share: fields of their requests, choices, figures, and why a choice
ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from trtllm_bls.openai.errors import invalid
from trtllm_bls.openai.frames import Frames, Head
from trtllm_bls.openai.schema import Common
from trtllm_bls.types import (
    Ending,
    FinishReason,
    Sampling,
    SpeculationRequest,
    TextChunk,
    TextRequest,
)

_COLDEST = 1e-5  # smaller temperatures and top_p leave the likeliest token alone, or overflow
_UNFINISHED = (FinishReason.CANCELLED, FinishReason.ERROR)
# A time limit has no word there; the answer was cut, as by max_tokens.
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}


class Answer(ABC):
    """The answer to one HTTP request, in the making: text chunks in, events or one body out.

    A choice has the number of its prompt times ``n``, plus its own.
    """

    object: ClassVar[str]  # of a whole answer
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]  # the caller's name of it
    id_prefix: ClassVar[str]
    guide_field = "structured_outputs"  # by which the caller demanded a form

    def __init__(self, request: Common, head: Head, requests: list[TextRequest]) -> None:
        self.requests = requests
        self._head = head
        self._per_prompt = request.n or 1
        options = request.stream_options
        self._usage_wanted = options is not None and bool(options.include_usage)
        chunk_head = msgspec.structs.replace(head, object=self.chunk_object)
        self._frames = Frames(chunk_head, usage=self._usage_wanted)
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._predicted = self._accepted = 0  # tokens drafted from a prediction
        self._choices: dict[int, dict[str, Any]] = {}

    def events(self, choice: int, chunk: TextChunk) -> bytes:
        """The chunk as events of a stream; there may be none."""
        if chunk.ending is not None:
            self._count(choice, chunk.ending)
        return self._events(choice, chunk)

    def last_event(self) -> bytes:
        """The figures, where they were asked for."""
        return self._frames.usage(self._usage()) if self._usage_wanted else b""

    def add(self, choice: int, chunk: TextChunk) -> None:
        """The chunk as a choice of the whole answer, which has one chunk per choice."""
        if ending := well_ended(chunk):
            self._count(choice, ending)
            fields = self._choice(choice, chunk) | self._finish(choice, ending)
            self._choices[choice] = {"index": choice, **fields}

    def whole(self) -> bytes:
        """All choices as one JSON body."""
        fields = msgspec.structs.asdict(self._head)
        fields["choices"] = [self._choices[choice] for choice in sorted(self._choices)]
        return msgspec.json.encode({**fields, "usage": self._usage()})

    @abstractmethod
    def _events(self, choice: int, chunk: TextChunk) -> bytes: ...

    @abstractmethod
    def _choice(self, choice: int, chunk: TextChunk) -> dict[str, Any]: ...

    def _finish(self, choice: int, ending: Ending) -> dict[str, Any]:
        """``finish_reason``, and which stop string it was."""
        fields: dict[str, Any] = {"finish_reason": _FINISH[ending.finish_reason]}
        if ending.stop_reason is not None:
            fields["stop_reason"] = ending.stop_reason
        return fields

    def _count(self, choice: int, ending: Ending) -> None:
        if choice % self._per_prompt == 0:  # a prompt counts once, also with several choices
            self._prompt_tokens += ending.prompt_tokens
        self._completion_tokens += ending.completion_tokens
        if ending.speculation is not None:
            self._predicted += ending.speculation.predicted
            self._accepted += ending.speculation.predicted_accepted

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }
        if any(request.prediction for request in self.requests):
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._predicted - self._accepted,
            }
        return usage


def well_ended(chunk: TextChunk) -> Ending | None:
    """Its sequence's ending, if it has one; after one that is not well an error follows."""
    ending = chunk.ending
    return None if ending is None or ending.finish_reason in _UNFINISHED else ending


# --- requests ---------------------------------------------------------------------------------


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
