"""The response to a request: text chunks in, events of a stream or one JSON body out.

``ChoicesBuilder`` is what chats and completions share, ``PartsBuilder`` what the APIs of agents do.
"""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np
from mypy_extensions import mypyc_attr

from trtllm_bls.openai.api_errors import DONE, ApiError, invalid
from trtllm_bls.openai.conversation import ChatModel, turn_request
from trtllm_bls.openai.schema import Common, Generation
from trtllm_bls.openai.stored import Stored
from trtllm_bls.orchestrator.chat_turn import Conversation
from trtllm_bls.text.chat_parser import (
    Annotation,
    Arguments,
    ChatEvent,
    Content,
    Reasoning,
    Refusal,
    Text,
    ToolCall,
)
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import Array, Ending, FinishReason, TextChunk, TextRequest, TokenText

# Tokens with their alternatives, as bytes, and what is known of their probability.
Scores: TypeAlias = Sequence[tuple[TokenText, list[tuple[bytes, float]]]]
Delta: TypeAlias = str | dict[str, Any]  # of a choice: its fields, or new text and nothing else
Opening: TypeAlias = Content | Reasoning | Refusal | ToolCall  # what a part begins with
_LOWEST = -9999.0  # JSON has no minus infinity
_UNFINISHED = (FinishReason.CANCELLED, FinishReason.ERROR)
# OpenAI has no word for a time limit. The answer was cut, as by max_tokens.
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a response; chats and completions begin with these fields."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseBuilder(ABC):
    """The response to one HTTP request.

    ``index`` of a choice: its prompt's index times ``n``, plus its own among the prompt's.
    """

    object: ClassVar[str]  # of a whole response
    prompt_field: ClassVar[str]  # the request's field that has the prompt
    id_prefix: ClassVar[str]

    def __init__(
        self, request: Generation, model: ChatModel, requests: list[TextRequest], guide_field: str
    ) -> None:
        self.requests = requests
        self.storage_failed = False  # It was to be stored and could not be.
        self.guide_field = guide_field  # the request's field that asked for guided decoding, if any
        self.stream = requests[0].stream
        self.prompt_tokens = 0  # of all prompts
        self.cached_tokens: int | None = None  # of them; the engine may not tell
        self._head = Head(
            id=self.id_prefix + (request.request_id or uuid.uuid4().hex),
            object=self.object,
            created=int(time.time()),
            model=request.model,
            system_fingerprint=model.fingerprint,
        )

    def count_prompt(self, tokens: int) -> None:
        """Count a prompt, which has been tokenised; its engine request follows."""
        self.prompt_tokens += tokens

    def count_cached(self, ending: Ending) -> None:
        """Count the prompt's tokens that were in the KV cache, where the engine tells them."""
        if ending.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + ending.cached_tokens

    @property
    def id(self) -> str:
        return self._head.id

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All items up to the end of the response, where the next may follow it."""
        return []

    @property
    def model(self) -> str:
        """The model that the request names."""
        return self._head.model

    @abstractmethod
    def add(self, index: int, chunk: TextChunk) -> bytes:
        """Add a choice's chunk; the events to send now, which may be none."""

    @abstractmethod
    def last_events(self) -> bytes:
        """What ends a stream; any thread may call it."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""

    def stored(self, status: str = "", error: ApiError | None = None) -> Stored | None:
        """What is to be stored, if anything; ``status``: of a response that did not end well."""
        return None

    @abstractmethod
    def whole(self) -> bytes:
        """The JSON body of a response that is not streamed; any thread may call it."""


def well_ended(chunk: TextChunk) -> Ending | None:
    """The ending of its sequence, unless it was cancelled or failed: then an error follows."""
    ending = chunk.ending
    return None if ending is None or ending.finish_reason in _UNFINISHED else ending


class Frames:
    """The events of one stream; chats have text in ``delta.content``, completions in ``text``."""

    def __init__(self, head: Head, *, usage: bool) -> None:
        chat = head.object == "chat.completion.chunk"
        self._field = b'"delta":{"content":' if chat else b'"text":'
        self._start = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        # With include_usage, every chunk but the last has the field, and it is null.
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._after_text = b"}" * chat + b',"logprobs":null,"finish_reason":null}' + self._end

    def event(self, index: int, delta: Delta) -> bytes:
        """An event of one choice."""
        if isinstance(delta, str):
            return self.text(index, delta)
        return self.choice(index, **delta)

    def text(self, index: int, text: str) -> bytes:
        """An event whose choice has new text and nothing else."""
        parts = (self._start, index, self._field, msgspec.json.encode(text), self._after_text)
        return b'%b{"index":%d,%b%b%b' % parts

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
        self, request: Common, model: ChatModel, requests: list[TextRequest], guide_field: str
    ) -> None:
        super().__init__(request, model, requests, guide_field)
        self._per_prompt = request.n or 1
        options = request.stream_options
        if options is not None and not request.stream:
            raise invalid("stream_options", "is only allowed when stream is true")
        self._wants_usage = options is not None and bool(options.include_usage)
        chunk_head = msgspec.structs.replace(self._head, object=self.chunk_object)
        self._frames = Frames(chunk_head, usage=self._wants_usage)
        self._completion_tokens = 0
        self._predicted = self._accepted = 0  # tokens drafted from a prediction
        self._ended: dict[int, TextChunk] = {}  # choices of a whole response

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
            return b"".join([self._frames.event(index, d) for d in self._deltas(index, chunk)])
        if well_ended(chunk):  # a whole response has one chunk per choice
            self._ended[index] = chunk
        return b""

    def last_events(self) -> bytes:
        return (self._frames.usage(self._usage()) if self._wants_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body + b"\n\n" + DONE

    def whole(self) -> bytes:
        fields = msgspec.structs.asdict(self._head)
        fields["choices"] = [
            {"index": index, **self._folded([*self._deltas(index, chunk)])}
            for index, chunk in sorted(self._ended.items())
        ]
        return msgspec.json.encode({**fields, "usage": self._usage()})

    @abstractmethod
    def _deltas(self, index: int, chunk: TextChunk) -> Iterator[Delta]:
        """What each event of a stream tells of the choice."""

    @abstractmethod
    def _folded(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """All that is told of a choice, as one."""

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
        details = self._completion_details()
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def _completion_details(self) -> dict[str, int]:
        if not any(request.prediction for request in self.requests):
            return {}
        return {
            "accepted_prediction_tokens": self._accepted,
            "rejected_prediction_tokens": self._predicted - self._accepted,
        }


def sse(kind: str, **fields: object) -> bytes:
    """A server-sent event, whose type is also in its JSON."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


@mypyc_attr(allow_interpreted_subclasses=True)
class PartsBuilder(ResponseBuilder):
    """A response of one choice whose parts are opened, grow, and are closed, one after another."""

    def __init__(
        self, request: Generation, model: ChatModel, conversation: Conversation, **fields: Any
    ) -> None:
        fields["fits_max_tokens"] = True
        turn = turn_request(request, model, conversation, **fields)
        super().__init__(request, model, [turn.request], turn.guide_field)
        (self._parser,) = turn.parsers
        self._items: list[dict[str, Any]] = []  # the parts so far, as the API shows them
        self._kind: type[Opening] | None = None  # of the last part, while it is open
        self._texts: list[str] = []  # of the open part; of a call, its arguments
        self._begin = 0  # of the open part, in characters of the answer
        self._tokens = TokenSpans()
        self._scores_of_part: list[Any] = []  # of the open part's tokens
        self.reasoning_tokens = 0
        self._before = self._after = b""  # the constant bytes of the open part's deltas
        self._begun = False
        self._ending: Ending | None = None

    def add(self, index: int, chunk: TextChunk) -> bytes:
        events, ending = [self._begin_once()], well_ended(chunk)
        self._tokens.add(chunk.tokens or (), self._scores_of(chunk))
        reason = None if ending is None else ending.finish_reason
        for event in self._parser.feed(chunk.text, reason):
            if isinstance(event, Annotation):
                events.append(self._annotated(event.value))
                continue
            if isinstance(event, ToolCall) or not (
                isinstance(event, Arguments) or (self._kind is type(event) and not event.begins)
            ):
                events += self._close(), self._open(event)
                self._kind = type(event)
                self._begin = event.span[0] if isinstance(event, Text) else 0
            if not isinstance(event, ToolCall):
                tokens = []
                if isinstance(event, Text):
                    tokens = self._tokens.take(self._begin, event.span[1])
                self._texts.append(event.text)
                self._scores_of_part += tokens
                events.append(self._grown(event.text, tokens))
        if ending is not None:
            self.count_cached(ending)
            self._ending = ending  # of the part that is open; those before have ended by themselves
            events.append(self._close())
        return b"".join(events) if self.stream else b""

    def _scores_of(self, chunk: TextChunk) -> Sequence[Any]:
        """What is told of each of the chunk's tokens."""
        return chunk.tokens or ()

    def _begin_once(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._first_events()

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        text, kind, tokens = "".join(self._texts), self._kind, self._scores_of_part
        if kind is not ToolCall:  # tokens whose text left before them
            tokens += self._tokens.take(self._begin, self._begin + len(text))
        self._texts, self._scores_of_part = [], []
        self.reasoning_tokens += len(tokens) if kind is Reasoning else 0
        events = self._closed(self._items[-1], text, tokens)
        self._kind = None
        return events

    def ping(self) -> bytes:
        """An event that shows a client that waits that the server works."""
        return self._begin_once() + sse("ping")

    def whole(self) -> bytes:
        return msgspec.json.encode(self._body())

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """The response as it is now."""

    @abstractmethod
    def _first_events(self) -> bytes: ...

    @abstractmethod
    def _open(self, event: Opening) -> bytes:
        """Add an item, which ``event`` begins; the events that tell it."""

    def _grown(self, text: str, tokens: list[Any]) -> bytes:
        """The events that tell more of the open part, which came from these tokens."""
        return self._before + msgspec.json.encode(text) + self._after

    def _annotated(self, annotation: Mapping[str, Any]) -> bytes:
        """Add a remark on the text that is open; the events that tell it."""
        return b""

    @abstractmethod
    def _closed(self, item: dict[str, Any], text: str, tokens: list[Any]) -> bytes:
        """Complete the item, which has all of its text now; the events that tell it."""


class TokenSpans:
    """Which tokens of an answer a part of its text came from, each told of once."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0  # characters of the answer that tokens have so far
        self._waiting: deque[tuple[int, int, Any]] = deque()

    def add(self, tokens: Sequence[TokenText], scores: Sequence[Any]) -> None:
        """The next tokens, and what is told of each."""
        for token, score in zip(tokens, scores, strict=True):
            begin, self._end = self._end, self._end + len(self._decoder.decode(token.data))
            # One that ends within a character is of that character.
            self._waiting.append((begin, max(begin + 1, self._end), score))

    def take(self, begin: int, end: int) -> list[Any]:
        """What is told of the tokens of these characters; nothing of those before is needed."""
        scores = []
        while self._waiting and self._waiting[0][0] < end:
            _, last, score = self._waiting.popleft()
            if last > begin:
                scores.append(score)
        return scores


class ReasoningTokens:
    """Counts the tokens of an answer's reasoning, by its tokens and the events of its text."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens = TokenSpans()
        self._open: tuple[int, int] | None = None  # of the part, in characters of the answer

    def add(self, tokens: Sequence[TokenText]) -> None:
        """Add the tokens of a chunk, before its events."""
        self._tokens.add(tokens, tokens)

    def read(self, event: ChatEvent) -> None:
        """Read the next event."""
        if not isinstance(event, Reasoning):
            self.close()
            return
        begin, end = event.span
        if self._open is None or event.begins:
            self.close()
        else:
            begin = self._open[0]
        self._open = (begin, end)
        self.count += len(self._tokens.take(begin, end))

    def close(self) -> None:
        """Count the tokens whose text left before them: another part begins, or the end is here."""
        if self._open is not None:
            self.count += len(self._tokens.take(*self._open))
            self._open = None


def spelled(data: bytes) -> str:
    """A token as a string; OpenAI writes one with half characters as ``bytes:\\x…``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenScores:
    """Log-probabilities of a chunk's tokens and, if asked for, of the likeliest alternatives.

    The engine gives the chosen token's, and some engines give those of the likeliest other tokens.
    All others, and those of a prompt's tokens, are computed from logits: one row per token, as wide
    as the vocabulary, which has to be transferred.
    """

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._spelled: dict[int, bytes] = {}

    def of(self, chunk: TextChunk) -> Scores:
        """Each token, the prompt's included, with its alternatives, the likeliest first."""
        tokens = chunk.tokens or ()
        rows: list[Array | None] = list(chunk.generation_logits or ())
        echoed = len(tokens) - len(rows) if rows else sum(t.log_prob is None for t in tokens)
        scores = []
        for index, token in enumerate(tokens):
            row = None
            if index >= echoed:
                row = rows[index - echoed] if rows else None
            elif index and chunk.context_logits is not None:
                row = chunk.context_logits[index - 1]
                log_probs = _log_softmax(row)
                token = token._replace(log_prob=float(log_probs[token.token_id]))
            if row is None:
                best = [(self._bytes(other), log_prob) for other, log_prob in token.top_log_probs]
            else:
                best = self._best(row)
            scores.append((token, best))
        return scores

    def _best(self, row: Array) -> list[tuple[bytes, float]]:
        if not self._alternatives:
            return []
        log_probs = _log_softmax(row)[: self._tokenizer.vocab_size]
        count = min(self._alternatives, len(log_probs))
        best = np.argpartition(-log_probs, count - 1)[:count]
        best = best[np.argsort(-log_probs[best], kind="stable")]
        return [(self._bytes(int(token)), float(log_probs[token])) for token in best]

    def _bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds in the middle of a text."""
        if token_id not in self._spelled:
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
            detokenizer.feed(self._tokenizer.encode_word("a"))
            self._spelled[token_id] = detokenizer.feed_one(token_id)[1]
        return self._spelled[token_id]


def chat_logprobs(scores: Scores) -> dict[str, Any]:
    """``logprobs`` of a chat's choice; the bytes, joined, are the text."""

    def entry(data: bytes, log_prob: float | None) -> dict[str, Any]:
        return {"token": spelled(data), "logprob": _finite(log_prob), "bytes": list(data)}

    content = [
        entry(token.data, token.log_prob) | {"top_logprobs": [entry(*other) for other in others]}
        for token, others in scores
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``logprobs`` of a completion's choice; ``text_offset`` goes on from chunk to chunk."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, scores: Scores) -> dict[str, Any]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        told: dict[str, list[Any]] = {name: [] for name in names}
        for token, others in scores:
            told["tokens"].append(spelled(token.data))
            log_prob = token.log_prob
            told["token_logprobs"].append(None if log_prob is None else _finite(log_prob))
            likely = [*others, (token.data, token.log_prob)] if others else []
            known = {spelled(data): _finite(log_prob) for data, log_prob in likely}
            told["top_logprobs"].append(known or None)
            told["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return told if any(told["top_logprobs"]) else {**told, "top_logprobs": None}


def _finite(log_prob: float | None) -> float:
    return _LOWEST if log_prob is None or not log_prob > _LOWEST else log_prob


def _log_softmax(row: Array) -> Array:
    values = np.asarray(row, dtype=np.float64)
    values = values - values.max()
    result: Array = values - np.log(np.exp(values).sum())
    return result
