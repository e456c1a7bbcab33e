"""Reports of requests that are over: metrics, and a line each in the log.

Each metric and each log line is a round trip to Triton, for which an event loop full of streams
should not wait. The loop only queues the figures of a request; four times a second a thread of
``RequestReports`` reads them.

``RequestMetrics`` adds up in memory, ``TritonMetrics`` on Triton's ``/metrics``. Names are
OpenTelemetry's where it has one, in Prometheus' spelling, and vLLM's elsewhere. ``docs/metrics.md``
describes them to users.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import ctypes
import itertools
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from trtllm_bls.errors import CancelCause, EngineError, Overloaded, defects
from trtllm_bls.orchestrator.status import CANARY_ID
from trtllm_bls.types import FinishReason, Outcome, RequestStats, SpeculationStats

EVERY_SECONDS = 0.25
_MAX_REPORTS = 2**17  # if Triton no longer answers, the oldest figures are dropped
_LAG_TURNS = 4  # the event loop's lag is measured every so many turns

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[str, ...]  # values, in the order of the metric's label names

log = logging.getLogger(__name__)


# --- the table of metrics ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Metric:
    """A row of the table. Every series also has the label ``model``.

    ``initial_labels``: label values of series that are there from the start, so that their first
    increase is seen. ``buckets``: the upper bounds of a histogram's.
    """

    name: str
    meaning: str
    kind: MetricKind
    labels: tuple[str, ...] = ()
    initial_labels: tuple[Labels, ...] = ((),)
    buckets: tuple[float, ...] = ()


_DURATIONS = tuple(0.01 * 2**n for n in range(14))  # these three as OpenTelemetry has them
_FIRST_TOKENS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_ENGINE_ERRORS: tuple[type, ...] = (EngineError, *EngineError.__subclasses__())
_REASONS = {
    Outcome.SUCCESS: [reason.value for reason in list(FinishReason)[:3]],
    Outcome.CANCELLED: [cause.value for cause in CancelCause],
    Outcome.OVERLOADED: ["max_queued_requests", "max_queue_seconds", Overloaded.__name__],
    Outcome.FAILED: [error.__name__ for error in _ENGINE_ERRORS],
}


def _outcome_labels() -> tuple[Labels, ...]:
    """Return the outcome and the reason of each pair that requests end with."""
    labels: list[Labels] = []
    for outcome, reasons in _REASONS.items():
        labels += itertools.product([outcome.value], reasons)
    return tuple(labels)


METRICS: list[Metric] = []  # in the order in which ``/metrics`` shows them


def _declare(kind: MetricKind, name: str, meaning: str, **options: Any) -> Metric:
    """Return a new row of the table."""
    metric = Metric(name, meaning, kind, **options)
    METRICS.append(metric)
    return metric


_counter = partial(_declare, "counter")
_gauge = partial(_declare, "gauge")
_seconds = partial(_declare, "histogram", buckets=_FIRST_TOKENS)

REQUESTS = _counter(
    "trtllm_bls_requests_total",
    "Requests that are over, by outcome and its reason",
    labels=("outcome", "reason"),
    initial_labels=_outcome_labels(),
)
API_REQUESTS = _counter(
    "trtllm_bls_api_requests_total",
    "Requests of the OpenAI API that are over, by the kind of answer and the outcome",
    labels=("api", "outcome"),
    initial_labels=(),
)
INTERNAL_ERRORS = _counter(
    "trtllm_bls_internal_errors_total", "Requests that ended by a defect of this program"
)
UNREADABLE_CONTENT = _counter(
    "trtllm_bls_unreadable_content_total",
    "Images, files and the like in requests of the OpenAI API, in whose place the model reads a "
    "sentence",
    labels=("kind",),
    initial_labels=(),
)
TOOL_CALLS = _counter(
    "trtllm_bls_tool_calls_total",
    "Calls of tools that models wrote: begun, and how each ended, whole, cut or unreadable",
    labels=("format", "result"),
    initial_labels=(),
)
UNREADABLE_ARGUMENTS = _counter(
    "trtllm_bls_unreadable_arguments_total",
    "Calls of tools whose arguments, as the model wrote them, are no JSON object",
    labels=("format",),
    initial_labels=(),
)
RUNNING = _gauge("trtllm_bls_num_requests_running", "Requests that have a token and are not over")
WAITING = _gauge("trtllm_bls_num_requests_waiting", "Requests that have no token yet")
DURATION = _seconds(
    "gen_ai_server_request_duration_seconds",
    "From a request's arrival to its end",
    labels=("outcome",),
    initial_labels=((Outcome.SUCCESS.value,),),
    buckets=_DURATIONS,
)
FIRST_TOKEN = _seconds(
    "gen_ai_server_time_to_first_token_seconds", "From a stream's arrival to its first response"
)
PER_TOKEN = _seconds(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time between two tokens of a stream, after its first response",
    buckets=_TOKEN_BUCKETS,
)
LONGEST_GAP = _seconds(
    "trtllm_bls_longest_response_gap_seconds", "Longest time between two responses of a stream"
)
QUEUE = _seconds(
    "trtllm_bls_request_queue_time_seconds", "From a request's arrival until the engine is given it"
)
ENGINE_SEQUENCES = _gauge(
    "trtllm_bls_engine_sequences",
    "Sequences that one of several engines was given and that are not over",
    labels=("engine",),
    initial_labels=(),
)
PROMPT_TOKENS = _counter("trtllm_bls_prompt_tokens_total", "Tokens of prompts given to the engine")
GENERATION_TOKENS = _counter(
    "trtllm_bls_generation_tokens_total", "Tokens generated, also for requests that ended early"
)
RESPONSES = _counter("trtllm_bls_responses_total", "Responses sent")
LOOP_LAG = _seconds(
    "trtllm_bls_event_loop_lag_seconds",
    "How long a callback waits for the event loop, asked once a second",
)


def _speculation(name: str, meaning: str) -> Metric:
    return _counter(f"trtllm_bls_speculation_{name}_total", meaning)


SPECULATION = {  # by the fields of ``SpeculationStats``
    "rounds": _speculation("rounds", "Verification rounds of speculative decoding"),
    "drafted": _speculation("drafted", "Tokens drafted"),
    "accepted": _speculation("accepted", "Drafted tokens that the target accepted"),
    "draft_failures": _speculation(
        "draft_failures", "Requests that went on without drafts, because drafting failed"
    ),
}
_MAX_REASONS = 100
_MAX_REASON_CHARS = 64


class RequestMetrics:
    """The metrics of one process, in memory, by metric and label values.

    ``histograms`` count the values in each bucket, the last of which has no bound; their last item
    is the sum of the values.
    """

    _reasons = frozenset(("other",))  # the reasons that were counted

    def __init__(self) -> None:
        self.numbers: dict[tuple[Metric, Labels], float] = {}
        self.histograms: dict[tuple[Metric, Labels], list[float]] = {}
        for metric in METRICS:
            for labels in metric.initial_labels:
                if metric.buckets:
                    self._histogram(metric, labels)
                else:
                    self.record(metric, labels, 0)

    def _histogram(self, metric: Metric, labels: Labels) -> list[float]:
        return self.histograms.setdefault((metric, labels), [0] * (len(metric.buckets) + 2))

    def record(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add ``value`` to a counter or gauge, or observe it in a histogram."""
        if metric.buckets:
            histogram = self._histogram(metric, labels)
            histogram[bisect.bisect_left(metric.buckets, value)] += 1  # a bound is in its bucket
            histogram[-1] += value
        else:
            self.numbers[metric, labels] = self.numbers.get((metric, labels), 0) + value

    def publish(self) -> None:
        """Show all that has been recorded; called every now and then."""

    def add(self, stats: RequestStats) -> None:
        """Count one request that is over."""
        reason = stats.reason[:_MAX_REASON_CHARS]  # an engine may have written it
        if reason not in self._reasons and len(self._reasons) >= _MAX_REASONS:
            reason = "other"
        self._reasons |= {reason}
        self.record(REQUESTS, (stats.outcome.value, reason), 1)
        if stats.api is not None:
            self.record(API_REQUESTS, (stats.api, stats.outcome.value), 1)
        self.record(DURATION, (stats.outcome.value,), stats.duration_s)
        for metric, value in (
            (PROMPT_TOKENS, stats.prompt_tokens),
            (GENERATION_TOKENS, stats.completion_tokens),
            (RESPONSES, stats.responses),
            (QUEUE, stats.queue_s),
            (FIRST_TOKEN, stats.ttft_s),
            (PER_TOKEN, stats.inter_token_s),
            (LONGEST_GAP, stats.longest_gap_s),
        ):
            if value is not None:
                self.record(metric, (), value)
        if stats.speculation is not None and not stats.speculation.rounds:
            # An engine that speculates by itself reports no rounds. Those of a router of ours come
            # through ``RequestReports.add_speculation``.
            self.add_speculation(stats.speculation)

    def add_speculation(self, stats: SpeculationStats) -> None:
        """Count the speculation of one request."""
        for name, metric in SPECULATION.items():
            self.record(metric, (), getattr(stats, name))


class TritonMetrics(RequestMetrics):
    """The metrics on Triton's ``/metrics``, with the label ``model``; used by one thread.

    Each metric call is a round trip to the server, so counters are added up until ``publish``.
    Triton adds up series of the same name and labels over all processes. Gauges are therefore
    changed by differences and never set.
    """

    def __init__(self, pb_utils: Any, model_name: str, metrics: Iterable[Metric] = METRICS) -> None:
        self._pb = pb_utils
        self._model_name = model_name
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[Metric, Labels], Any] = {}
        # Since the last ``publish``. If Triton takes nothing for long, old observations go.
        self.numbers = {}
        self._observations: collections.deque[tuple[Metric, Labels, float]]
        self._observations = collections.deque(maxlen=_MAX_REPORTS)
        self._has_histograms = hasattr(pb_utils.MetricFamily, "HISTOGRAM")  # from Triton 24.08 on
        for metric in metrics:
            if self._has_histograms or not metric.buckets:
                for labels in metric.initial_labels:
                    self._series_of(metric, labels)

    def record(self, metric: Metric, labels: Labels, value: float) -> None:
        """Record as ``RequestMetrics`` does; what is recorded appears with ``publish``."""
        if not metric.buckets:
            super().record(metric, labels, value)
        elif self._has_histograms:
            self._observations.append((metric, labels, value))

    def publish(self) -> None:
        """Show what was recorded.

        Raises what Triton raised last. What it did not take is shown by a later call: a gauge that
        missed a change would be wrong from then on.
        """
        failure: Exception | None = None
        try:
            while self._observations:
                metric, labels, observed = self._observations[0]
                self._series_of(metric, labels).observe(observed)
                self._observations.popleft()
        except Exception as error:
            failure = error
        for key, value in list(self.numbers.items()):
            try:
                if value:
                    self._series_of(*key).increment(value)
            except Exception as error:
                failure = error
            else:
                del self.numbers[key]
        if failure is not None:
            raise failure

    def _series_of(self, metric: Metric, labels: Labels) -> Any:
        series = self._series.get((metric, labels))
        if series is not None:
            return series
        if metric.name not in self._families:
            kind = getattr(self._pb.MetricFamily, metric.kind.upper())
            family = self._pb.MetricFamily(name=metric.name, description=metric.meaning, kind=kind)
            keep_for_ever(family)
            self._families[metric.name] = family
        options: dict[str, Any] = {"labels": dict(zip(metric.labels, labels, strict=True))}
        options["labels"]["model"] = self._model_name
        if metric.buckets:
            options["buckets"] = list(metric.buckets)
        series = self._families[metric.name].Metric(**options)
        keep_for_ever(series)
        self._series[metric, labels] = series
        return series


def keep_for_ever(metric: object) -> None:
    """Take a reference to a family or a series of Triton's that is never given back.

    A process that frees one after ``finalize`` crashes (Triton 24.10), since the memory that it
    shares with the server is gone by then. One that frees it before takes it from the other
    processes of the model, and the server crashes when one of them adds to it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(metric))


# --- the thread -------------------------------------------------------------------------------


def unreported_id() -> str:
    """Return an id for a request of this process's own, which is neither counted nor logged."""
    return f"{_canary()}-{uuid.uuid4().hex}"


def _canary() -> str:
    return os.environ.setdefault(CANARY_ID, uuid.uuid4().hex)  # as ``serve`` has set it, if it has


class RequestReports:
    """Gives the figures of requests to ``metrics`` and to each of ``readers``.

    ``add`` and ``add_speculation`` may be called at any time, on any thread, and never wait. What
    is added is read from ``start`` to ``close``.
    """

    def __init__(
        self, metrics: RequestMetrics, readers: Sequence[Callable[[RequestStats], object]] = ()
    ) -> None:
        self.metrics = metrics
        self._readers = (metrics.add, *readers)
        # The last kind of item is the event loop's lag.
        self._queue: collections.deque[RequestStats | SpeculationStats | float]
        self._queue = collections.deque(maxlen=_MAX_REPORTS)
        self.add: Callable[[RequestStats], None] = self._queue.append
        self.add_speculation: Callable[[SpeculationStats], None] = self._queue.append
        self._published_load = {RUNNING: 0, WAITING: 0}
        self._is_late = False  # Triton did not take all metrics
        self._canary = _canary()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop, load: Callable[[], tuple[int, ...]]) -> None:
        """Begin to read. The first two numbers of ``load`` are requests that run and that wait."""
        self._thread = threading.Thread(
            target=self._run, args=(loop, load), name="request-reports", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Read what is left, then end the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, load: Callable[[], tuple[int, ...]]) -> None:
        turn = 0
        while not self._closing.wait(EVERY_SECONDS):
            self._turn(load)
            turn += 1
            if turn % _LAG_TURNS == 0 and not loop.is_closed():
                loop.call_soon_threadsafe(self._note_lag, time.perf_counter())
        self._turn(load)

    def _note_lag(self, asked_at: float) -> None:
        self._queue.append(time.perf_counter() - asked_at)

    def _turn(self, load: Callable[[], tuple[int, ...]]) -> None:
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, float):
                self._do(partial(self.metrics.record, LOOP_LAG, (), item))
            elif isinstance(item, SpeculationStats):
                self._do(partial(self.metrics.add_speculation, item))
            elif item.request_id.rpartition("-")[0] != self._canary:
                for read in self._readers:
                    self._do(partial(read, item))
        while defects:
            defects.popleft()
            self.metrics.record(INTERNAL_ERRORS, (), 1)
        running, waiting = load()[:2]
        for metric, value in ((RUNNING, running), (WAITING, waiting)):
            change = value - self._published_load[metric]
            if change:
                self.metrics.record(metric, (), change)
                self._published_load[metric] = value
        self._publish()

    def _publish(self) -> None:
        was_late = self._is_late
        self._is_late = True
        try:
            self.metrics.publish()
            self._is_late = False
        except Exception:
            if not was_late:  # the next turn tries again, a quarter of a second later
                log.exception("metrics are late; Triton did not take them")

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # whatever Triton raises, requests go on and so do their figures
            log.exception("the figures of a request could not be published")


# --- the log ---------------------------------------------------------------------------------

# Characters of a value, as written, so that no line is too long for ``TritonLogHandler``.
_MAX_VALUE_CHARS = 250
_MAX_PROMPT_CHARS = 900
_BARE_VALUE = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RequestLog:
    """Logs one line per request that is over, as ``key=value`` pairs (logfmt) or as JSON.

    Failures are warnings. ``prompts``: with what the caller sent. Callers choose ids, and errors
    quote their values, so each value is cut, and escaped: it can neither end the line nor reach a
    terminal as a command.
    """

    as_json: bool = False
    prompts: bool = False

    def add(self, stats: RequestStats) -> None:
        """Write one request's line."""
        level = logging.WARNING if stats.outcome is Outcome.FAILED else logging.INFO
        log.log(level, "%s", self.line(stats))

    def line(self, stats: RequestStats) -> str:
        """Return the line; fields that the request does not have are left out."""
        fields: dict[str, Any] = {
            "id": _cut(stats.request_id, _MAX_VALUE_CHARS),
            "api": stats.api,
            "outcome": stats.outcome.value,
            "reason": stats.reason,
        }
        for name in ("prompt_tokens", "completion_tokens", "sequences", "responses"):
            fields[name] = getattr(stats, name)
        for name in ("duration", "queue", "ttft", "inter_token", "longest_gap"):
            seconds = getattr(stats, f"{name}_s")
            if seconds is not None:
                fields[f"{name}_ms"] = round(seconds * 1000, 1)
        if stats.speculation is not None:
            for name in ("rounds", "drafted", "accepted"):
                fields[name] = getattr(stats.speculation, name)
            rate = stats.speculation.acceptance_rate
            if rate is not None:
                fields["acceptance"] = round(rate, 3)
        if stats.traceparent:
            fields["trace_id"] = stats.traceparent.split("-")[1]
        fields["error"] = _cut(stats.error, _MAX_VALUE_CHARS)
        if self.prompts:
            fields["prompt"] = _cut(stats.prompt, _MAX_PROMPT_CHARS)
        fields = {key: value for key, value in fields.items() if value is not None}
        if self.as_json:
            return json.dumps(fields)
        pairs = ["request"]
        for key, value in fields.items():
            text = str(value)
            if not _BARE_VALUE.fullmatch(text):
                text = json.dumps(text)
            pairs.append(f"{key}={text}")
        return " ".join(pairs)


def _cut(text: str | None, max_chars: int) -> str | None:
    """Cut a text so that it has at most so many characters as JSON."""
    if text is None:
        return None
    cut = text[:max_chars]
    while len(json.dumps(cut)) > max_chars:
        cut = cut[: len(cut) * 7 // 8]
    return cut if cut == text else cut + "..."
