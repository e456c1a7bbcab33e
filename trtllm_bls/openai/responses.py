"""What chats and completions share: the fields of their requests, events, choices and usage.

An event of a stream is built by hand: only the text between constant bytes changes. A token costs
one escaped string and one join, no dictionary and no validation. A test compares the bytes with
what ``json`` would write of the whole chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from trtllm_bls.openai.errors import DONE, invalid
from trtllm_bls.openai.schema import Common
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
# OpenAI has no word for a time limit. The answer was cut, as by max_tokens.
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields with which a whole response and each chunk of a stream begin."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Frames:
    """The events of one stream; chats have text in ``delta.content``, completions in ``text``."""

    def __init__(self, head: Head, *, usage: bool) -> None:
        chat = head.object == "chat.completion.chunk"
        self._field = b'"delta":{"content":' if chat else b'"text":'
        self._start = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        # With include_usage, every chunk but the last has the field, and it is null.
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._after_text = b"}" * chat + b',"logprobs":null,"finish_reason":null}' + self._end
        self._before_text: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """An event whose choice has new text and nothing else."""
        before = self._before_text.get(index) or self._before(index)
        return before + msgspec.json.encode(text) + self._after_text

    def choice(self, index: int, **fields: object) -> bytes:
        """Any other event of one choice."""
        return self._start + msgspec.json.encode({"index": index, **fields}) + self._end

    def usage(self, usage: object) -> bytes:
        """The last event, which has no choice."""
        return b"".join((self._start, b'],"usage":', msgspec.json.encode(usage), b"}\n\n"))

    def _before(self, index: int) -> bytes:
        found = self._before_text[index] = self._start + b'{"index":%d,' % index + self._field
        return found


class ResponseBuilder(ABC):
    """The response to one HTTP request: text chunks in, events or one JSON body out.

    ``index`` of a choice: its prompt's index times ``n``, plus its own among the prompt's.
    """

    object: ClassVar[str]  # of a whole response
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]  # the request's field that has the prompt
    id_prefix: ClassVar[str]
    guide_field = "structured_outputs"  # the request's field that asked for guided decoding

    def __init__(self, request: Common, head: Head, requests: list[TextRequest]) -> None:
        self.requests = requests
        self._head = head
        self._stream = bool(request.stream)
        self._per_prompt = request.n or 1
        options = request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        chunk_head = msgspec.structs.replace(head, object=self.chunk_object)
        self._frames = Frames(chunk_head, usage=self._wants_usage)
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._predicted = self._accepted = 0  # tokens drafted from a prediction
        self._ended: dict[int, tuple[TextChunk, Ending]] = {}  # choices of a whole response

    def add(self, index: int, chunk: TextChunk) -> bytes:
        """Add a choice's chunk; the events to send now, which may be none."""
        ending = chunk.ending
        if ending is not None:
            if index % self._per_prompt == 0:  # each prompt counts once, also with several choices
                self._prompt_tokens += ending.prompt_tokens
            self._completion_tokens += ending.completion_tokens
            if ending.speculation is not None:
                self._predicted += ending.speculation.predicted
                self._accepted += ending.speculation.predicted_accepted
        if self._stream:
            return self._events(index, chunk)
        if ending := well_ended(chunk):  # a whole response has one chunk per choice
            self._ended[index] = chunk, ending
        return b""

    @property
    def is_scored(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.requests[0].wants.log_probs

    @property
    def last_events(self) -> bytes:
        """What ends a stream; the usage is sent where it was asked for."""
        return (self._frames.usage(self._usage()) if self._wants_usage else b"") + DONE

    def whole(self) -> bytes:
        """All choices as one JSON body; any thread may call it.

        It takes seconds where ``is_scored`` and the choices have tens of thousands of tokens.
        """
        fields = msgspec.structs.asdict(self._head)
        fields["choices"] = [
            {"index": index, **self._choice(index, chunk), **self._finish(index, ending)}
            for index, (chunk, ending) in sorted(self._ended.items())
        ]
        return msgspec.json.encode({**fields, "usage": self._usage()})

    @abstractmethod
    def _events(self, index: int, chunk: TextChunk) -> bytes: ...

    @abstractmethod
    def _choice(self, index: int, chunk: TextChunk) -> dict[str, Any]: ...

    def _finish(self, index: int, ending: Ending) -> dict[str, Any]:
        """``finish_reason``, and which stop string it was."""
        fields: dict[str, Any] = {"finish_reason": _FINISH[ending.finish_reason]}
        if ending.stop_reason is not None:
            fields["stop_reason"] = ending.stop_reason
        return fields

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
    """The ending of its sequence, unless it was cancelled or failed: then an error follows."""
    ending = chunk.ending
    return None if ending is None or ending.finish_reason in _UNFINISHED else ending


# --- requests ---------------------------------------------------------------------------------


def shared_fields(request: Common, vocab_size: int) -> dict[str, Any]:
    """The fields of ``TextRequest`` that chats and completions share. Raises ``ApiError``."""
    stops = request.stop or ()
    return {
        "stream": bool(request.stream),
        "sampling": _sampling(request),
        "num_return_sequences": request.n or 1,
        "stop_words": (stops,) if isinstance(stops, str) else tuple(stops),
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


def _bias(request: Common, vocab_size: int) -> tuple[tuple[int, float], ...]:
    found = []
    for key, weight in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            problem = f"{key[:40]!r} is not a token id of this model; they are 0 to"
            raise invalid("logit_bias", f"{problem} {vocab_size - 1}")
        found.append((int(key), weight))
    return tuple(found)
