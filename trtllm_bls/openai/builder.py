"""The response to a request: text chunks in, events of a stream or one JSON body out.

Chats and completions share ``ChoicesBuilder``, the APIs of agents ``PartsBuilder``.
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

# Each token with its likeliest alternatives: their bytes and log-probabilities (natural logarithm).
Scores: TypeAlias = Sequence[tuple[TokenText, list[tuple[bytes, float]]]]
Delta: TypeAlias = str | dict[str, Any]  # what an event adds to a choice: text alone, or fields
Opening: TypeAlias = Content | Reasoning | Refusal | ToolCall  # the first event of a part
_LOWEST = -9999.0  # JSON has no minus infinity
_UNFINISHED = (FinishReason.CANCELLED, FinishReason.ERROR)
# OpenAI has no word for a time limit. The answer was cut, as by max_tokens.
_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a response; chats and completions begin with these fields."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ResponseBuilder(ABC):
    """The response to one HTTP request.

    The ``index`` of a choice is its prompt's index times ``n``, plus its index within the prompt.
    """

    object: ClassVar[str]  # the type of a whole response
    prompt_field: ClassVar[str]  # the request's field that has the prompt
    id_prefix: ClassVar[str]

    def __init__(
        self, request: Generation, model: ChatModel, requests: list[TextRequest], guide_field: str
    ) -> None:
        self.requests = requests
        self.storage_failed = False  # the client asked to store the response, and storing failed
        self.guide_field = guide_field  # the request's field that demands guided decoding, or ""
        self.stream = requests[0].stream
        self.prompt_tokens = 0  # the sum over all prompts
        # The sum of the prompts' tokens found in the KV cache; ``None`` without the engine's count.
        self.cached_tokens: int | None = None
        self._head = Head(
            id=self.id_prefix + (request.request_id or uuid.uuid4().hex),
            object=self.object,
            created=int(time.time()),
            model=request.model,
            system_fingerprint=model.fingerprint,
        )

    def count_prompt(self, tokens: int) -> None:
        """Add the tokens of a prompt to the sum, before its engine request is sent."""
        self.prompt_tokens += tokens

    def count_cached(self, ending: Ending) -> None:
        """Add the prompt's tokens that were in the KV cache, if the engine reports them."""
        if ending.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + ending.cached_tokens

    @property
    def id(self) -> str:
        return self._head.id

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The items that a later response continues from; empty where the API has no such thing."""
        return []

    @property
    def model(self) -> str:
        """The model that the request names."""
        return self._head.model

    @abstractmethod
    def add(self, index: int, chunk: TextChunk) -> bytes:
        """Add a choice's chunk; return the events to send now, which may be none."""

    @abstractmethod
    def last_events(self) -> bytes:
        """Return the last events of a stream; any thread may call it."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that cannot go on."""

    def stored(self, status: str = "", error: ApiError | None = None) -> Stored | None:
        """Return the response to store, if any. ``status`` is set if it failed or was cancelled."""
        return None

    @abstractmethod
    def whole(self) -> bytes:
        """Return the JSON body of a response that is not streamed; any thread may call it."""


def well_ended(chunk: TextChunk) -> Ending | None:
    """Return the chunk's ending, or None if the sequence goes on, failed or was cancelled.

    The client gets an error for a failed or cancelled sequence.
    """
    ending = chunk.ending
    if ending is None or ending.finish_reason in _UNFINISHED:
        return None
    return ending


class Frames:
    """The encoder of one stream's events.

    A chat's text is in ``delta.content``, a completion's in ``text``.
    """

    def __init__(self, head: Head, *, usage: bool) -> None:
        self._start = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._end = b"]}\n\n"
        if usage:
            # OpenAI: with include_usage, ``usage`` is null in every chunk but the last.
            self._end = b'],"usage":null}\n\n'
        self._field = b'"text":'
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._end
        if head.object == "chat.completion.chunk":
            self._field = b'"delta":{"content":'
            self._after_text = b"}" + self._after_text

    def event(self, index: int, delta: Delta) -> bytes:
        """Return an event of one choice."""
        if isinstance(delta, str):
            return self.text(index, delta)
        return self.choice(index, **delta)

    def text(self, index: int, text: str) -> bytes:
        """Return an event whose choice has new text and nothing else."""
        parts = (self._start, index, self._field, msgspec.json.encode(text), self._after_text)
        return b'%b{"index":%d,%b%b%b' % parts

    def choice(self, index: int, **fields: object) -> bytes:
        """Return an event whose choice has these fields."""
        return self._start + msgspec.json.encode({"index": index, **fields}) + self._end

    def usage(self, usage: object) -> bytes:
        """Return the stream's last event: the usage, without choices."""
        return b"".join((self._start, b'],"usage":', msgspec.json.encode(usage), b"}\n\n"))


class ChoicesBuilder(ResponseBuilder):
    """A response with choices; a stream sends them as chunks."""

    chunk_object: ClassVar[str]

    def __init__(
        self, request: Common, model: ChatModel, requests: list[TextRequest], guide_field: str
    ) -> None:
        super().__init__(request, model, requests, guide_field)
        self._choices_per_prompt = request.n or 1
        options = request.stream_options
        if options is not None and not request.stream:
            raise invalid("stream_options", "is only allowed when stream is true")
        self._wants_usage = options is not None and bool(options.include_usage)
        chunk_head = msgspec.structs.replace(self._head, object=self.chunk_object)
        self._frames = Frames(chunk_head, usage=self._wants_usage)
        self._completion_tokens = 0
        self._prediction_tokens = 0  # draft tokens from the request's predicted output
        self._accepted_tokens = 0  # draft tokens from it that were accepted
        self._choices: dict[int, TextChunk] = {}  # without a stream, a choice is one chunk

    def add(self, index: int, chunk: TextChunk) -> bytes:
        ending = chunk.ending
        if ending is not None:
            self._completion_tokens += ending.completion_tokens
            if index % self._choices_per_prompt == 0:  # count a prompt once for all of its choices
                self.count_cached(ending)
            if ending.speculation is not None:
                self._prediction_tokens += ending.speculation.predicted
                self._accepted_tokens += ending.speculation.predicted_accepted
        if self.stream:
            deltas = self._deltas(index, chunk)
            return b"".join([self._frames.event(index, delta) for delta in deltas])
        if well_ended(chunk):
            self._choices[index] = chunk
        return b""

    def last_events(self) -> bytes:
        if not self._wants_usage:
            return DONE
        return self._frames.usage(self._usage()) + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body + b"\n\n" + DONE

    def whole(self) -> bytes:
        choices: list[dict[str, Any]] = []
        for index, chunk in sorted(self._choices.items()):
            deltas = list(self._deltas(index, chunk))
            choices.append({"index": index, **self._folded(deltas)})
        head = msgspec.structs.asdict(self._head)
        return msgspec.json.encode({**head, "choices": choices, "usage": self._usage()})

    @abstractmethod
    def _deltas(self, index: int, chunk: TextChunk) -> Iterator[Delta]:
        """Yield the choice's deltas for a chunk; a stream sends an event for each."""

    @abstractmethod
    def _folded(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Join all deltas of a choice into the fields of a whole one."""

    def _finish(self, index: int, ending: Ending) -> dict[str, Any]:
        """Return ``finish_reason``, and the stop string if one ended the choice."""
        fields: dict[str, Any] = {"finish_reason": _FINISH_REASONS[ending.finish_reason]}
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
            "accepted_prediction_tokens": self._accepted_tokens,
            "rejected_prediction_tokens": self._prediction_tokens - self._accepted_tokens,
        }


def sse(kind: str, **fields: object) -> bytes:
    """Return a server-sent event that has its type in ``event:`` and in its JSON."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class PartsBuilder(ResponseBuilder):
    """A response of one choice: a sequence of parts (text, reasoning, tool calls).

    One part is open at a time. It gets deltas until it is closed, then the next one opens.
    """

    def __init__(
        self, request: Generation, model: ChatModel, conversation: Conversation, **fields: Any
    ) -> None:
        fields["fits_max_tokens"] = True
        turn = turn_request(request, model, conversation, **fields)
        super().__init__(request, model, [turn.request], turn.guide_field)
        (self._parser,) = turn.parsers
        self._items: list[dict[str, Any]] = []  # the parts so far, in the API's form
        self._kind: type[Opening] | None = None  # the kind of the open part
        self._texts: list[str] = []  # the open part's text, or a call's arguments
        self._begin = 0  # the open part's start, in characters of the answer
        self._tokens = TokenSpans()
        self._part_scores: list[Any] = []  # the scores of the open part's tokens
        self.reasoning_tokens = 0
        # The bytes of a delta event before and after its text; the same while the part is open.
        self._delta_head = b""
        self._delta_tail = b""
        self._is_started = False
        self._ending: Ending | None = None

    def add(self, index: int, chunk: TextChunk) -> bytes:
        events = [self._start_once()]
        ending = well_ended(chunk)
        self._tokens.add(chunk.tokens or (), self._scores_of(chunk))
        reason = None if ending is None else ending.finish_reason
        for event in self._parser.feed(chunk.text, reason):
            if isinstance(event, Annotation):
                events.append(self._annotated(event.value))
                continue
            if isinstance(event, ToolCall) or (
                not isinstance(event, Arguments) and (self._kind is not type(event) or event.begins)
            ):
                events.append(self._close())
                events.append(self._open(event))
                self._kind = type(event)
                self._begin = event.span[0] if isinstance(event, Text) else 0
            if not isinstance(event, ToolCall):
                tokens = []
                if isinstance(event, Text):
                    tokens = self._tokens.take(self._begin, event.span[1])
                self._texts.append(event.text)
                self._part_scores += tokens
                events.append(self._grown(event.text, tokens))
        if ending is not None:
            self.count_cached(ending)
            self._ending = ending  # only the open part may be cut short; earlier ones are complete
            events.append(self._close())
        return b"".join(events) if self.stream else b""

    def _scores_of(self, chunk: TextChunk) -> Sequence[Any]:
        """Return the scores of the chunk's tokens, in the API's form."""
        return chunk.tokens or ()

    def _start_once(self) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        return self._first_events()

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        text = "".join(self._texts)
        tokens = self._part_scores
        if self._kind is not ToolCall:
            # The last tokens may have arrived after their text.
            tokens += self._tokens.take(self._begin, self._begin + len(text))
        if self._kind is Reasoning:
            self.reasoning_tokens += len(tokens)
        self._texts = []
        self._part_scores = []
        events = self._closed(self._items[-1], text, tokens)
        self._kind = None
        return events

    def ping(self) -> bytes:
        """Return a keep-alive event, after the stream's first events if none was sent yet."""
        return self._start_once() + sse("ping")

    def whole(self) -> bytes:
        return msgspec.json.encode(self._body())

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """Return the fields of the response as far as it has come."""

    @abstractmethod
    def _first_events(self) -> bytes: ...

    @abstractmethod
    def _open(self, event: Opening) -> bytes:
        """Append the item that ``event`` begins; return the events that announce it."""

    def _grown(self, text: str, tokens: list[Any]) -> bytes:
        """Return the events for ``text``, which these tokens add to the open part."""
        return self._delta_head + msgspec.json.encode(text) + self._delta_tail

    def _annotated(self, annotation: Mapping[str, Any]) -> bytes:
        """Add an annotation to the open part; return its events."""
        return b""

    @abstractmethod
    def _closed(self, item: dict[str, Any], text: str, tokens: list[Any]) -> bytes:
        """Complete the item with its whole text and its last tokens; return its events."""


class TokenSpans:
    """A queue of an answer's tokens, each with the span of characters that it adds to the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0  # the end of the last token, in characters of the answer
        self._queue: deque[tuple[int, int, Any]] = deque()  # (begin, end, score) of each token

    def add(self, tokens: Sequence[TokenText], scores: Sequence[Any]) -> None:
        """Add the next tokens, with the score of each."""
        for token, score in zip(tokens, scores, strict=True):
            begin = self._end
            self._end += len(self._decoder.decode(token.data))
            # A token that ends within a character adds none yet. Its span is that character.
            self._queue.append((begin, max(begin + 1, self._end), score))

    def take(self, begin: int, end: int) -> list[Any]:
        """Remove the tokens that begin before ``end``; return the scores of those in the span."""
        scores: list[Any] = []
        while self._queue and self._queue[0][0] < end:
            _, token_end, score = self._queue.popleft()
            if token_end > begin:
                scores.append(score)
        return scores


class ReasoningTokens:
    """A counter of an answer's reasoning tokens, fed with its tokens and its parser's events."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens = TokenSpans()
        self._open: tuple[int, int] | None = None  # the open part, in characters of the answer

    def add(self, tokens: Sequence[TokenText]) -> None:
        """Add the tokens of a chunk, before its events."""
        self._tokens.add(tokens, tokens)

    def read(self, event: ChatEvent) -> None:
        """Count the tokens of the next event, if it is reasoning."""
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
        """End the open part, and count its tokens that arrived after their text."""
        if self._open is not None:
            self.count += len(self._tokens.take(*self._open))
            self._open = None


def token_string(data: bytes) -> str:
    """Return a token as a string, or as OpenAI's ``bytes:\\x…`` if it is not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


class TokenScores:
    """Log-probabilities of a chunk's tokens, and of their likeliest alternatives.

    The engine returns the log-probability of the chosen token. Some engines also return the
    likeliest alternatives. The rest, and the values of a prompt's tokens, are computed from logits.
    Logits are costly to transfer: one row per token, as wide as the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._token_bytes: dict[int, bytes] = {}

    def of(self, chunk: TextChunk) -> Scores:
        """Return each token of the chunk with its alternatives, the likeliest first.

        If the prompt is echoed, its tokens come first.
        """
        tokens = chunk.tokens or ()
        rows: list[Array | None] = list(chunk.generation_logits or ())
        if rows:
            num_echoed = len(tokens) - len(rows)
        else:
            # The engine gives no log-probabilities for a prompt's tokens.
            num_echoed = len([token for token in tokens if token.log_prob is None])
        scores: list[tuple[TokenText, list[tuple[bytes, float]]]] = []
        for index, token in enumerate(tokens):
            row = None
            if index >= num_echoed:
                if rows:
                    row = rows[index - num_echoed]
            elif index and chunk.context_logits is not None:
                row = chunk.context_logits[index - 1]  # the logits at a token predict the next one
                log_probs = _log_softmax(row)
                token = token._replace(log_prob=float(log_probs[token.token_id]))
            if row is not None:
                alternatives = self._likeliest(row)
            else:
                alternatives = [(self._bytes(id_), value) for id_, value in token.top_log_probs]
            scores.append((token, alternatives))
        return scores

    def _likeliest(self, row: Array) -> list[tuple[bytes, float]]:
        if not self._alternatives:
            return []
        log_probs = _log_softmax(row)[: self._tokenizer.vocab_size]
        count = min(self._alternatives, len(log_probs))
        ids = np.argpartition(-log_probs, count - 1)[:count]
        ids = ids[np.argsort(-log_probs[ids], kind="stable")]
        return [(self._bytes(int(token_id)), float(log_probs[token_id])) for token_id in ids]

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds after other text, its leading space included."""
        if token_id not in self._token_bytes:
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
            detokenizer.feed(self._tokenizer.encode_word("a"))
            _, self._token_bytes[token_id] = detokenizer.feed_one(token_id)
        return self._token_bytes[token_id]


def chat_logprobs(scores: Scores) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice; its tokens' ``bytes``, joined, are its text."""
    content: list[dict[str, Any]] = []
    for token, alternatives in scores:
        entry = _logprob_entry(token.data, token.log_prob)
        entry["top_logprobs"] = [_logprob_entry(*alternative) for alternative in alternatives]
        content.append(entry)
    return {"content": content, "refusal": None}


def _logprob_entry(data: bytes, log_prob: float | None) -> dict[str, Any]:
    return {"token": token_string(data), "logprob": _finite(log_prob), "bytes": list(data)}


class CompletionLogprobs:
    """The ``logprobs`` of a completion's choice, chunk by chunk.

    ``text_offset`` counts characters from the beginning of the choice.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, scores: Scores) -> dict[str, Any]:
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []
        for token, alternatives in scores:
            tokens.append(token_string(token.data))
            log_prob = token.log_prob
            token_logprobs.append(None if log_prob is None else _finite(log_prob))
            top = {token_string(data): _finite(value) for data, value in alternatives}
            if top:
                top[token_string(token.data)] = _finite(log_prob)
            top_logprobs.append(top or None)
            text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs if any(top_logprobs) else None,
            "text_offset": text_offset,
        }


def _finite(log_prob: float | None) -> float:
    if log_prob is None or not log_prob > _LOWEST:  # also NaN
        return _LOWEST
    return log_prob


def _log_softmax(row: Array) -> Array:
    values = np.asarray(row, dtype=np.float64)
    values = values - values.max()
    result: Array = values - np.log(np.exp(values).sum())
    return result
