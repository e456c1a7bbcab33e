"""What becomes of a request's figures: metrics, and a line in the log."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers import fake_metrics
from tests.helpers.fake_metrics import Registry
from tests.helpers.waiting import eventually
from trtllm_bls.errors import printable
from trtllm_bls.orchestrator.orchestrator import stats_of
from trtllm_bls.orchestrator.reports import (
    API_REQUESTS,
    DURATION,
    ENGINE_SEQUENCES,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    LOOP_LAG,
    METRICS,
    PER_TOKEN,
    PROMPT_TOKENS,
    REQUESTS,
    RESPONSES,
    RUNNING,
    SPECULATION,
    TOOL_CALLS,
    UNREADABLE_ARGUMENTS,
    UNREADABLE_CONTENT,
    WAITING,
    RequestLog,
    RequestMetrics,
    RequestReports,
    TritonMetrics,
)
from trtllm_bls.orchestrator.status import CANARY_ID
from trtllm_bls.types import Outcome, RequestStats, SpeculationStats

GOOD = RequestStats(
    request_id="7-1",
    outcome=Outcome.SUCCESS,
    reason="stop",
    prompt_tokens=5,
    completion_tokens=9,
    responses=4,
    duration_s=0.5,
    queue_s=0.001,
    ttft_s=0.1,
    inter_token_s=0.05,
    longest_gap_s=0.2,
    speculation=SpeculationStats(rounds=2, drafted=8, accepted=6),
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    prompt="Tell me",
)
BAD = stats_of("x-2", ValueError("no"))
MODEL = "tensorrt_llm_bls"


def test_a_request_is_counted_once_in_each_metric() -> None:
    """In memory and on Triton's page alike."""
    memory, registry = RequestMetrics(), Registry()
    triton = TritonMetrics(registry, MODEL)
    for metrics in (memory, triton):
        for stats in (GOOD, GOOD, BAD):
            metrics.add(stats)
        metrics.publish()
    assert memory.numbers[REQUESTS, ("success", "stop")] == 2
    assert registry.numbers(REQUESTS.name) == {("success", "stop"): 2, ("failed", "ValueError"): 1}
    assert registry.numbers(DURATION.name) == {("success",): [0.5, 0.5], ("failed",): [0.0]}
    assert registry.of(FIRST_TOKEN.name, model=MODEL) == [0.1, 0.1]
    assert registry.of(PER_TOKEN.name, model=MODEL) == [0.05, 0.05]
    for metric, total in ((PROMPT_TOKENS, 10), (GENERATION_TOKENS, 18), (RESPONSES, 8)):
        assert memory.numbers[metric, ()] == registry.of(metric.name, model=MODEL) == total


def test_a_bound_belongs_to_its_bucket() -> None:
    """As Prometheus' ``le`` says."""
    metrics, metric = RequestMetrics(), replace(FIRST_TOKEN, buckets=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        metrics.record(metric, (), value)
    assert metrics.histograms[metric, ()] == [2, 2, 1, 14.0]


def test_every_metric_is_there_before_the_first_request() -> None:
    """A first increase that creates its series would be no increase to Prometheus.

    But for those that the OpenAI API alone has, by an engine's address or a path.
    """
    registry = Registry()
    TritonMetrics(registry, MODEL)
    assert set(registry.kinds) == {metric.name for metric in METRICS if metric.initial_labels}
    assert {each for each in METRICS if not each.initial_labels} == {
        *(API_REQUESTS, ENGINE_SEQUENCES, TOOL_CALLS, UNREADABLE_ARGUMENTS, UNREADABLE_CONTENT)
    }
    assert registry.of(REQUESTS.name, outcome="cancelled", reason="deadline", model=MODEL) == 0


def test_processes_of_a_model_add_up() -> None:
    """Their series have the same names and labels; gauges go down again."""
    registry = Registry()
    first, second = (TritonMetrics(registry, MODEL) for _ in range(2))
    for metrics, change in ((first, 3), (second, 4), (first, -2)):
        metrics.add(GOOD)
        metrics.record(RUNNING, (), change)
        metrics.publish()
    assert registry.of(RUNNING.name, model=MODEL) == 5
    assert registry.of(RESPONSES.name, model=MODEL) == 12


def test_triton_gets_no_metric_back() -> None:
    """A process that frees one after ``finalize`` crashes; before, the server of others may."""
    registry = Registry()
    TritonMetrics(registry, MODEL)
    gc.collect()
    assert len(registry.alive) == len(registry.kinds) + len(registry.values)


def test_a_change_that_triton_does_not_take_is_shown_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gauge that missed one would be wrong from then on; the others do not wait for it."""
    registry = Registry()
    metrics = TritonMetrics(registry, MODEL)
    take = fake_metrics.Number.increment

    def refuse_all(histogram: fake_metrics.Histogram, value: float) -> None:
        raise RuntimeError("no shared memory")

    def refuse(number: fake_metrics.Number, value: float) -> None:
        if value == 2:
            raise RuntimeError("no shared memory")
        take(number, value)

    metrics.add(GOOD)
    metrics.record(RUNNING, (), 2)
    metrics.record(WAITING, (), 3)
    with monkeypatch.context() as full:
        full.setattr(fake_metrics.Histogram, "observe", refuse_all)
        full.setattr(fake_metrics.Number, "increment", refuse)
        with pytest.raises(RuntimeError, match="no shared memory"):
            metrics.publish()
    assert registry.numbers(RUNNING.name) == {}
    assert registry.of(WAITING.name, model=MODEL) == 3
    assert registry.of(PROMPT_TOKENS.name, model=MODEL) == GOOD.prompt_tokens
    metrics.publish()
    metrics.publish()
    assert registry.of(RUNNING.name, model=MODEL) == 2
    assert registry.of(DURATION.name, outcome="success", model=MODEL) == [GOOD.duration_s]
    assert registry.of(FIRST_TOKEN.name, model=MODEL) == [GOOD.ttft_s]


async def test_late_metrics_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Four tries a second would fill the log."""

    class Late(RequestMetrics):
        calls = 0

        def publish(self) -> None:
            self.calls += 1
            if self.calls < 4:
                raise RuntimeError("no shared memory")

    metrics = Late()
    reports = RequestReports(metrics)
    reports.start(asyncio.get_running_loop(), lambda: (0, 0))
    await eventually(lambda: metrics.calls > 4)
    reports.close()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics are late; Triton did not take them"
    ]


def test_a_triton_without_histograms_has_the_other_metrics() -> None:
    """Before 24.08; what only a histogram tells is missing there."""
    registry = Registry(histograms=False)
    metrics = TritonMetrics(registry, MODEL)
    metrics.add(GOOD)
    metrics.publish()
    assert registry.of(PROMPT_TOKENS.name, model=MODEL) == GOOD.prompt_tokens
    assert set(registry.kinds.values()) == {"counter", "gauge"}


def test_what_drafting_did_is_counted() -> None:
    """Also of a request that failed: the engines did the work."""
    stats = SpeculationStats(rounds=1, drafted=3, accepted=2, ngram_drafted=3)
    registry = Registry()
    metrics = TritonMetrics(registry, MODEL)
    metrics.add_speculation(stats)
    metrics.publish()
    found = {name: registry.of(row.name, model=MODEL) for name, row in SPECULATION.items()}
    assert found == {"rounds": 1, "drafted": 3, "accepted": 2, "draft_failures": 0}


@pytest.mark.parametrize(("rounds", "counted"), [(2, 0), (0, 8)])
def test_drafts_of_a_request_are_counted_once(rounds: int, counted: int) -> None:
    """Our rounds are told by ``add_speculation``, an engine's own with its request's end."""
    metrics, done = RequestMetrics(), SpeculationStats(rounds=rounds, drafted=8, accepted=6)
    metrics.add(replace(GOOD, speculation=done))
    assert metrics.numbers[SPECULATION["drafted"], ()] == counted


async def test_reports_are_read_by_a_thread_and_none_is_lost() -> None:
    """The event loop only queues; what is queued when the server ends is still read."""
    registry, threads = Registry(), set()
    load = [(2, 1)]
    reports = RequestReports(
        TritonMetrics(registry, MODEL), [lambda _: threads.add(threading.get_ident())]
    )
    reports.add(GOOD)  # a request may end before reports are read
    reports.start(asyncio.get_running_loop(), lambda: load[0])
    await eventually(lambda: registry.of(RUNNING.name, model=MODEL))
    assert registry.of(WAITING.name, model=MODEL) == 1
    await eventually(lambda: registry.of(LOOP_LAG.name, model=MODEL))
    load[0] = (0, 0)
    for _ in range(100):
        reports.add(GOOD)
    reports.close()
    assert registry.numbers(REQUESTS.name) == {("success", "stop"): 101}
    assert registry.numbers(RUNNING.name) == registry.numbers(WAITING.name) == {}
    assert threads and threading.get_ident() not in threads


async def test_the_servers_own_requests_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve`` sends one every few seconds; its id is a secret, so that no caller hides."""
    monkeypatch.setenv(CANARY_ID, "health-secret")
    metrics, seen = RequestMetrics(), list[str]()
    reports = RequestReports(metrics, [lambda stats: seen.append(stats.request_id)])
    for request_id in ("health-secret-1", "health-guess-2", "health-secret-x-3"):
        reports.add(replace(GOOD, request_id=request_id))
    reports.start(asyncio.get_running_loop(), lambda: (0, 0))
    reports.close()
    assert seen == ["health-guess-2", "health-secret-x-3"]


async def test_reports_outlive_a_reader_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Triton raises what it likes; the log tells, and the next request is reported."""

    def fail(stats: RequestStats) -> None:
        raise RuntimeError("from Triton")

    metrics = RequestMetrics()
    reports = RequestReports(metrics, [fail])
    reports.add(GOOD)
    reports.add(GOOD)
    reports.start(asyncio.get_running_loop(), lambda: (0, 0))
    reports.close()
    assert metrics.numbers[REQUESTS, ("success", "stop")] == 2
    assert "from Triton" in caplog.text


LINE = (
    "request id=7-1 outcome=success reason=stop prompt_tokens=5 completion_tokens=9 sequences=1 "
    "responses=4 duration_ms=500.0 queue_ms=1.0 ttft_ms=100.0 inter_token_ms=50.0 "
    "longest_gap_ms=200.0 rounds=2 drafted=8 accepted=6 acceptance=0.75 "
    "trace_id=4bf92f3577b34da6a3ce929d0e0e4736"
)


def test_the_line_of_a_request() -> None:
    """As pairs and as JSON; the prompt only where it is asked for."""
    assert RequestLog().line(GOOD) == LINE
    assert RequestLog(prompts=True).line(GOOD) == f'{LINE} prompt="Tell me"'
    found = json.loads(RequestLog(as_json=True).line(GOOD))
    assert [f"{key}={value}" for key, value in found.items()] == LINE.split()[1:]


NASTY = 'a" b=c\n\x1b[31m\u202e\x00' + "é" * 1000


@pytest.mark.parametrize("as_json", [True, False])
def test_no_value_leaves_its_place_in_the_line(as_json: bool) -> None:
    """Ids and prompts are the caller's: no new line, no terminal command, no megabytes."""
    stats = replace(BAD, request_id=NASTY, error=NASTY, prompt=NASTY)
    line = RequestLog(as_json=as_json, prompts=True).line(stats)
    assert line.isprintable() and line.isascii()
    assert printable(line) == line  # Triton's log gets it whole
    if as_json:
        assert json.loads(line)["id"][:14] == NASTY[:14]
    else:
        assert line.startswith('request id="a\\" b=c\\n\\u001b[31m\\u202e\\u0000')


def test_failures_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Whose level an operator can look for; refusals and cancels are the callers' affair."""
    caplog.set_level(logging.INFO, logger="trtllm_bls")
    for stats in (GOOD, BAD):
        RequestLog().add(stats)
    levels: list[Any] = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING"]
