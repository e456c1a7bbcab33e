"""What is told of a request that is over: how it ended, what it counted, and how long it took.

``RequestStats`` is made once per request, at its end, whatever the end. Nothing here knows Triton
or HTTP, nor who counts or logs the figures.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from trtllm_bls.errors import InvalidRequest, Overloaded
from trtllm_bls.types import SpeculationStats, TextChunk

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
    speculation: SpeculationStats | None = None
    traceparent: str | None = None
    prompt: str | None = field(
        default=None, repr=False
    )  # at most MOST_CHARACTERS, for the request log

    @classmethod
    def of_refusal(cls, request_id: str, error: Exception) -> RequestStats:
        """Of a request that ended before it could be read."""
        outcome, reason = outcome_of(error)
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


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """The outcome of a request that ``error`` ended, and the reason that ``Outcome`` describes."""
    if isinstance(error, asyncio.CancelledError):
        causes = {cause.value: cause for cause in CancelCause}
        cause = causes.get(str(error.args[0]) if error.args else "", CancelCause.CALLER_LEFT)
        return Outcome.CANCELLED, cause.value
    if isinstance(error, InvalidRequest):
        # The reason is a label of metrics. With the place in a list ("stop_words[7]") callers
        # could make as many series as they like.
        return Outcome.REFUSED, error.limit or error.field.partition("[")[0]
    if isinstance(error, Overloaded):
        return Outcome.OVERLOADED, error.limit or type(error).__name__
    return Outcome.FAILED, type(error).__name__
