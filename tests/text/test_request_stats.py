"""What the orchestrator tells of each request once it is over, whatever its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from doubles.scripted import Fault
from tests.helpers.scripted_text import PROMPT, Collected, asking, prompt_ids, saying, tokenizer
from tests.helpers.virtual_time import Clock, run_by_the_clock, run_skipping_waits, skipping_waits
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import (
    CancelCause,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from trtllm_bls.orchestrator.orchestrator import (
    Admission,
    Defaults,
    Orchestrator,
    RequestTimes,
    run_rows,
)
from trtllm_bls.orchestrator.orchestrator import stats_of as stats_of_error
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.types import Outcome, RequestStats, SpeculationRequest, TextRequest

TEXT = "one two three four"
TOKENS = len(tokenizer().encode_word(TEXT))


def stats_of(
    engine: Any, request: TextRequest, cancel: Callable[[asyncio.Task[None]], object] | None = None
) -> RequestStats:
    """Of one request, which ``cancel`` may cancel once its second response is there."""
    found: list[RequestStats] = []

    async def run() -> None:
        served = Orchestrator(tokenizer(), engine, Defaults(), on_end=found.append)
        sink = Collected(lambda _: cancel and len(sink.chunks) == 2 and cancel(task))
        task = asyncio.create_task(served.run(request, sink))
        await asyncio.wait({task})
        task.cancelled() or task.exception()
        assert served.load()[:2] == (0, 0)

    run_skipping_waits(run())
    (stats,) = found
    return stats


def test_a_stream_that_ends_well() -> None:
    """Every figure, on a clock of the test's own: 2 s per prompt token, then 1 s per token."""
    prompt = len(prompt_ids())
    engine = saying(TEXT, prefill_seconds=2, step_seconds=1)
    stats = stats_of(engine, asking(stream=True, traceparent="00-a-b-00"))
    first = 2 * prompt + 1
    assert stats == RequestStats(
        request_id="r",
        outcome=Outcome.SUCCESS,
        reason="end_id",
        prompt_tokens=prompt,
        completion_tokens=TOKENS,
        responses=TOKENS + 1,
        duration_s=first + TOKENS,
        queue_s=0,
        ttft_s=first,
        inter_token_s=TOKENS / (TOKENS - 1),  # the end's own response comes a step later
        longest_gap_s=1,
        traceparent="00-a-b-00",
        prompt="The quick",
    )


def test_the_pace_of_a_stream_is_that_of_each_of_its_sequences() -> None:
    engine = saying(TEXT, step_seconds=1)
    stats = stats_of(engine, asking(stream=True, max_tokens=3, num_return_sequences=2))
    assert (stats.completion_tokens, stats.inter_token_s) == (6, 1)


async def test_the_rows_of_a_failed_batch_tell_why_they_were_cancelled() -> None:
    """Apart from those whose callers left."""
    found: list[RequestStats] = []
    served = Orchestrator(
        tokenizer(), saying(TEXT, step_seconds=60), Defaults(), on_end=found.append
    )
    requests = [asking(), asking(text="")]
    with pytest.raises(InvalidRequest):
        rows = [served.run(request, Collected()) for request in requests]
        await run_rows([asyncio.create_task(row) for row in rows])
    assert [stats.reason for stats in found] == ["text_input", "batch"]


def test_an_answer_in_one_piece_has_no_time_to_first_token() -> None:
    """The engine may have had the first one long before."""
    stats = stats_of(saying(TEXT, step_seconds=1), asking(max_tokens=3, num_return_sequences=2))
    assert (stats.outcome, stats.reason) == (Outcome.SUCCESS, "length")
    assert (stats.completion_tokens, stats.sequences, stats.responses) == (6, 2, 2)
    assert (stats.ttft_s, stats.inter_token_s, stats.longest_gap_s) == (None, None, None)


@pytest.mark.parametrize("cause", CancelCause)
def test_a_cancelled_request_has_its_cause_and_what_was_done(cause: CancelCause) -> None:
    """Who cancels says why; the tokens generated until then were still worked for."""
    stats = stats_of(saying(TEXT), asking(stream=True), lambda task: task.cancel(cause.value))
    assert (stats.outcome, stats.reason, stats.error) == (Outcome.CANCELLED, cause.value, None)
    assert stats.completion_tokens == 2


def test_who_cancels_without_a_word_is_the_caller() -> None:
    """So do servers whose connection has closed."""
    stats = stats_of(saying(TEXT), asking(stream=True), lambda task: task.cancel())
    assert (stats.outcome, stats.reason) == (Outcome.CANCELLED, "caller_left")


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_up_was_cancelled_by_its_deadline(stream: bool) -> None:
    """Its caller has an answer, but not all of it."""
    request = asking(stream=stream, timeout_s=2.5)
    stats = stats_of(saying(TEXT, step_seconds=1), request)
    assert (stats.outcome, stats.reason) == (Outcome.CANCELLED, "deadline")
    assert (stats.completion_tokens, stats.duration_s) == (2, 2.5)


def test_time_that_is_up_before_the_engine_has_the_request() -> None:
    """There is no time in a queue that was never left, and no prompt was counted."""
    engine = saying(TEXT)
    engine.fault = Fault(capacity=True)
    stats = stats_of(engine, asking(stream=True, timeout_s=1))
    assert (stats.outcome, stats.reason) == (Outcome.CANCELLED, "deadline")
    assert (stats.queue_s, stats.prompt_tokens, stats.duration_s) == (None, 0, 1)


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (InvalidRequest("top_k", "no"), Outcome.REFUSED, "top_k"),
        (InvalidRequest("text_input", "no", "max_bytes"), Outcome.REFUSED, "max_bytes"),
        (Overloaded("full"), Outcome.OVERLOADED, "Overloaded"),
        (Overloaded("full", "max_queued"), Outcome.OVERLOADED, "max_queued"),
        (EngineUnavailable("gone"), Outcome.FAILED, "EngineUnavailable"),
        (EngineStalled("silent"), Outcome.FAILED, "EngineStalled"),
    ],
)
def test_an_engines_error_is_told_apart(error: Exception, outcome: Outcome, reason: str) -> None:
    """The caller's mistake, a full engine, a failing one."""
    engine = saying(TEXT)
    engine.fault = Fault(error=error)
    stats = stats_of(engine, asking(stream=True))
    assert (stats.outcome, stats.reason, stats.error) == (outcome, reason, str(error))
    assert (stats.responses, stats.ttft_s) == (0, None)


def test_what_the_orchestrator_refuses_counts_too() -> None:
    """Before any engine has heard of it."""
    stats = stats_of(saying(TEXT), asking(text=""))
    assert (stats.outcome, stats.reason, stats.queue_s) == (Outcome.REFUSED, "text_input", None)


def test_reasons_are_fields_without_places_in_lists() -> None:
    """A caller chooses the place, and each reason is a series of the metrics for ever."""
    error = InvalidRequest("messages[7].content[0]", "is no text")
    stats = stats_of_error("r", error)
    assert (stats.outcome, stats.reason) == (Outcome.REFUSED, "messages")
    assert stats.error == "messages[7].content[0]: is no text"


def test_drafts_are_counted() -> None:
    """Over all rounds of the request."""
    request = asking(
        text="a b c d a b c d a b c d",
        stream=True,
        speculation=SpeculationRequest(draft_source="ngram", num_draft_tokens=3),
    )
    stats = stats_of(RoutingEngine(saying(" a b c d" * 4, request.text or "")), request)
    assert stats.speculation is not None
    assert 0 < stats.speculation.accepted <= stats.speculation.drafted


@skipping_waits
async def test_load_tells_who_runs_and_who_waits() -> None:
    """Waiting: without a token, so also what stands in the engine's queue.

    An answer in one piece has its first token at its end: it runs once the engine was given it.
    """
    engine = saying(TEXT, step_seconds=1)
    served = Orchestrator(tokenizer(), engine, Defaults())
    waits = saying(TEXT)
    waits.fault = Fault(capacity=True)
    other = Orchestrator(tokenizer(), waits, Defaults())
    tasks = [
        asyncio.create_task(each.run(asking(stream=True), Collected()))
        for each in (served, served, other)
    ]
    await asyncio.sleep(0.5)
    assert (served.load()[:3], other.load()[:3]) == ((0, 2, 0), (0, 1, 1))
    whole = asyncio.create_task(served.run(asking(), Collected()))
    await asyncio.sleep(0.1)
    assert served.load()[:2] == (1, 2)
    tasks.append(whole)
    await asyncio.sleep(1)
    assert served.load()[:2] == (3, 0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (served.load()[:2], other.load()[:2]) == ((0, 0), (0, 0))


def test_figures_keep_no_large_prompt() -> None:
    """They may wait for a while to be read."""
    stats = stats_of(saying(TEXT), asking(text="word " * 500, max_tokens=1))
    assert stats.prompt == "word " * 200


@skipping_waits
async def test_places_and_queues_are_seen() -> None:
    """Who waits for a place is waiting; who is sent away is counted under the limit's parameter."""
    found: list[RequestStats] = []
    served = Orchestrator(
        tokenizer(),
        saying(TEXT, step_seconds=1),
        Defaults(limits=RequestLimits(max_prompt_bytes=20)),
        on_end=found.append,
        admission=Admission(1, 1, None),
    )
    tasks = [
        asyncio.create_task(served.run(asking(text, request_id=name), Collected()))
        for name, text in (("large", "x" * 21), ("first", PROMPT), ("next", PROMPT))
    ]
    await asyncio.sleep(0.5)
    assert served.load()[:3] == (1, 1, 1)
    with pytest.raises(Overloaded):
        await served.run(asking(), Collected())
    await asyncio.wait(tasks)
    assert isinstance(tasks[0].exception(), InvalidRequest)
    assert [(stats.outcome, stats.reason) for stats in found] == [
        (Outcome.REFUSED, "max_prompt_bytes"),
        (Outcome.OVERLOADED, "max_queued_requests"),
        (Outcome.SUCCESS, "end_id"),
        (Outcome.SUCCESS, "end_id"),
    ]
    first, last = found[2:]
    assert (first.queue_s, last.queue_s) == (0, first.duration_s)


@pytest.mark.parametrize("times", [(1, 2, 5, 6), (1, 4, 5, 6), (1, 2, 3, 6)])
def test_the_longest_gap_is_the_longest_wherever_it_is(times: tuple[float, ...]) -> None:
    """Between two responses, not before the first one."""
    stats = RequestStats(request_id="r", outcome=Outcome.SUCCESS, reason="end_id")

    async def scenario(clock: Clock) -> None:
        noted = RequestTimes()
        for clock.now in times:
            noted.note_response()
        noted.add_to(stats, streamed=True)

    run_by_the_clock(scenario)
    assert (stats.longest_gap_s, stats.ttft_s, stats.responses) == (3, 1, 4)
