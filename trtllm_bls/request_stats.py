"""What one request was: how it ended, what it counted, and how long it took.

``RequestStats`` is made once per request, at its end, whatever the end. ``RequestRecord`` is what
gathers it: a sink in front of the caller's, which costs one clock reading per response. Knows
nothing of Triton or HTTP, nor of who counts or logs the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from trtllm_bls.answer import Answer
from trtllm_bls.errors import InvalidRequest, Overloaded
from trtllm_bls.types import Ending, FinishReason, SpeculationCounts, TextChunk, TextRequest

MOST_CHARACTERS = 1000  # of a prompt and an error: figures may wait to be read, prompts are large


class Outcome(str, Enum):
    """How a request ended; ``RequestStats.reason`` says more."""

    SUCCESS = "success"  # reason: its finish reason
    REFUSED = "refused"  # reason: the limit's parameter, or the field that has a mistake
    OVERLOADED = "overloaded"  # refused for want of room; reason: the limit's parameter, if ours
    FAILED = "failed"  # reason: the kind of error
    CANCELLED = "cancelled"  # reason: a ``CancelCause``


class CancelCause(str, Enum):
    """Who cancelled a request: what is passed to ``Task.cancel`` of the task that runs it."""

    CALLER_LEFT = "caller_left"  # also where nobody says
    DEADLINE = "deadline"  # its own time was up; the caller has got what there was by then
    SHUTDOWN = "shutdown"
    BATCH = "batch"  # another prompt of its batch failed


@dataclass(kw_only=True)  # see EngineChunk
class RequestStats:
    """One request (one prompt) that is over. Times are seconds from its arrival.

    ``queue_s`` lasts until the engine was given the request, ``ttft_s`` until the first response of
    a stream; ``None`` where that never happened. ``inter_token_s`` is the mean time between two
    tokens of a sequence, ``longest_gap_s`` the longest between two responses, each of which may
    hold several tokens. ``error`` is what the caller was told.
    """

    request_id: str
    outcome: Outcome
    reason: str
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sequences: int = 1
    responses: int = 0
    duration_s: float = 0.0
    queue_s: float | None = None
    ttft_s: float | None = None
    inter_token_s: float | None = None
    longest_gap_s: float | None = None
    speculation: SpeculationCounts | None = None
    traceparent: str | None = None
    prompt: str | None = field(default=None, repr=False)  # cut, for who logs prompts

    @classmethod
    def of_refusal(cls, request_id: str, error: Exception) -> RequestStats:
        """Of a request that ended before it could be read."""
        outcome, reason = _outcome(error, ())
        text = str(error)[:MOST_CHARACTERS]
        return cls(request_id=request_id, outcome=outcome, reason=reason, error=text)


class TextSink(Protocol):
    """Where the chunks of one request go.

    Chunks that arrive while the sink is not ready are answered together, so a slow reader's
    responses grow larger instead of more.
    """

    async def ready(self) -> None:
        """Return once a chunk would leave at once; without suspending if it would now."""

    def send(self, chunk: TextChunk) -> None:
        """Take a chunk; never waits. Several may come in a row, one per sequence."""


class RequestRecord:
    """Passes the chunks of one request on to ``sink`` and notes what they tell.

    ``clock`` gives seconds.
    """

    def __init__(self, request: TextRequest, sink: TextSink, clock: Callable[[], float]) -> None:
        self.ready: Callable[[], Coroutine[Any, Any, None]] = sink.ready
        self.running = False  # the engine was given the request
        self.shown = False  # the answer is to be in one piece, but grows as it is read
        self._request = request
        self._send = sink.send
        self._clock = clock
        self._arrived_at = clock()
        self._begun_at = self._first_at = self._last_at = self._arrived_at
        self._longest_gap = 0.0
        self._responses = 0
        self._prompt_tokens = 0
        self._answer: Answer | None = None
        self._endings: list[Ending] = []

    def begin(self, prompt_tokens: int, answer: Answer) -> None:
        """The engine is about to be given the request."""
        self._prompt_tokens, self._answer = prompt_tokens, answer
        self._begun_at = self._clock()
        self.running = True

    @property
    def tokens(self) -> int:
        """Those of the answer so far."""
        return self._answer.completion_tokens if self._answer is not None else 0

    def send(self, chunk: TextChunk) -> None:
        """Pass a chunk on."""
        now = self._clock()
        if not self._responses:
            self._first_at = now
        elif now - self._last_at > self._longest_gap:
            self._longest_gap = now - self._last_at
        self._last_at = now
        self._responses += 1
        if chunk.ending is not None:
            self._endings.append(chunk.ending)
        self._send(chunk)

    def stats(self, error: BaseException | None = None) -> RequestStats:
        """The request is over; ``error`` is what ended it, if one did."""
        outcome, reason = _outcome(error, self._endings)
        request, tokens = self._request, self.tokens
        told = [ending.speculation for ending in self._endings if ending.speculation]
        begun = request.stream and tokens > 0 and self._responses > 0
        return RequestStats(
            request_id=request.request_id,
            outcome=outcome,
            reason=reason,
            error=str(error)[:MOST_CHARACTERS] if isinstance(error, Exception) else None,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=tokens,
            sequences=request.num_return_sequences,
            responses=self._responses,
            duration_s=self._clock() - self._arrived_at,
            queue_s=self._begun_at - self._arrived_at if self.running else None,
            ttft_s=self._first_at - self._arrived_at if begun else None,
            inter_token_s=self._inter_token(tokens) if begun else None,
            longest_gap_s=self._longest_gap if begun and self._responses > 1 else None,
            speculation=told[0] if told else None,  # which takes one sequence only
            traceparent=request.traceparent,
            prompt=(request.text or request.messages or "")[:MOST_CHARACTERS],
        )

    def _inter_token(self, tokens: int) -> float | None:
        gaps = tokens / self._request.num_return_sequences - 1
        return (self._last_at - self._first_at) / gaps if gaps > 0 else None


def _outcome(error: BaseException | None, endings: Sequence[Ending]) -> tuple[Outcome, str]:
    if isinstance(error, asyncio.CancelledError):
        causes = {cause.value: cause for cause in CancelCause}
        cause = causes.get(str(error.args[0]) if error.args else "", CancelCause.CALLER_LEFT)
        return Outcome.CANCELLED, cause.value
    if isinstance(error, InvalidRequest):
        # A label of metrics: places in lists would make as many of them as callers like.
        return Outcome.REFUSED, error.limit or error.field.partition("[")[0]
    if isinstance(error, Overloaded):
        return Outcome.OVERLOADED, error.limit or type(error).__name__
    if error is not None:
        return Outcome.FAILED, type(error).__name__
    if any(ending.finish_reason is FinishReason.TIMEOUT for ending in endings):
        return Outcome.CANCELLED, CancelCause.DEADLINE.value
    return Outcome.SUCCESS, endings[0].finish_reason.value if endings else ""
