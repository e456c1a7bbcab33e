"""What chats and completions share: events, choices and usage.

An event of a stream is built by hand: only the text between constant bytes changes. A token costs
one escaped string and one join, no dictionary and no validation. A test compares the bytes with
what ``json`` would write of the whole chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import msgspec

from trtllm_bls.openai.builder import Head, ResponseBuilder, well_ended
from trtllm_bls.openai.errors import DONE, ApiError, invalid
from trtllm_bls.openai.schema import Common
from trtllm_bls.types import Ending, FinishReason, TextChunk, TextRequest

# OpenAI has no word for a time limit. The answer was cut, as by max_tokens.
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}


class Frames:
    """The events of one stream; chats have text in ``delta.content``, completions in ``text``."""

    def __init__(self, head: Head, *, usage: bool) -> None:
        chat = head.object == "chat.completion.chunk"
        self._field = b'"delta":{"content":' if chat else b'"text":'
        self._start = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        # With include_usage, every chunk but the last has the field, and it is null.
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._after_text = b"}" * chat + b',"logprobs":null,"finish_reason":null}' + self._end

    def text(self, index: int, text: str) -> bytes:
        """An event whose choice has new text and nothing else."""
        told = (self._start, index, self._field, msgspec.json.encode(text), self._after_text)
        return b'%b{"index":%d,%b%b%b' % told

    def choice(self, index: int, **fields: object) -> bytes:
        """Any other event of one choice."""
        return self._start + msgspec.json.encode({"index": index, **fields}) + self._end

    def usage(self, usage: object) -> bytes:
        """The last event, which has no choice."""
        return b"".join((self._start, b'],"usage":', msgspec.json.encode(usage), b"}\n\n"))


class ChoicesBuilder(ResponseBuilder):
    """A response with choices, which are streamed as chunks."""

    chunk_object: ClassVar[str]

    def __init__(
        self, request: Common, head: Head, requests: list[TextRequest], guide_field: str
    ) -> None:
        super().__init__(head, requests, guide_field)
        self._per_prompt = request.n or 1
        options = request.stream_options
        if options is not None and not request.stream:
            raise invalid("stream_options", "is only allowed when stream is true")
        self._wants_usage = options is not None and bool(options.include_usage)
        chunk_head = msgspec.structs.replace(head, object=self.chunk_object)
        self._frames = Frames(chunk_head, usage=self._wants_usage)
        self._completion_tokens = 0
        self._predicted = self._accepted = 0  # tokens drafted from a prediction
        self._ended: dict[int, tuple[TextChunk, Ending]] = {}  # choices of a whole response

    def add(self, index: int, chunk: TextChunk) -> bytes:
        ending = chunk.ending
        if ending is not None:
            self._completion_tokens += ending.completion_tokens
            if index % self._per_prompt == 0:  # choices share their prompt
                self.count_cached(ending)
            if ending.speculation is not None:
                self._predicted += ending.speculation.predicted
                self._accepted += ending.speculation.predicted_accepted
        if self.stream:
            return self._events(index, chunk)
        if ending := well_ended(chunk):  # a whole response has one chunk per choice
            self._ended[index] = chunk, ending
        return b""

    @property
    def is_large(self) -> bool:
        return self.requests[0].wants.log_probs

    def last_events(self) -> bytes:
        return (self._frames.usage(self._usage()) if self._wants_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return error.event

    def whole(self) -> bytes:
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
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self.prompt_tokens + self._completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if any(request.prediction for request in self.requests):
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._predicted - self._accepted,
            }
        return usage
