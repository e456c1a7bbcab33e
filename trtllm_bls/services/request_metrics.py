"""The table of all metrics, what a request adds to each, and two registries for them.

``RequestMetrics`` adds up in memory, ``TritonMetrics`` on Triton's ``/metrics``. Names are
OpenTelemetry's where it has one, in Prometheus' spelling, and vLLM's elsewhere. ``docs/metrics.md``
describes them to users.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from trtllm_bls.errors import CancelCause, EngineError, Overloaded
from trtllm_bls.types import FinishReason, Outcome, RequestStats, SpeculationStats

Labels: TypeAlias = tuple[str, ...]  # values, in the order of the metric's label names


@dataclass(frozen=True, eq=False)
class Metric:
    """One row of the table. Every series also has the label ``model``.

    ``known``: label values of series that are there from the start, so that their first increase is
    seen. ``buckets``: the upper bounds of a histogram's.
    """

    name: str
    meaning: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()
    known: tuple[Labels, ...] = ((),)
    buckets: tuple[float, ...] = ()


_DURATIONS = tuple(0.01 * 2**n for n in range(14))  # these three as OpenTelemetry has them
_FIRST_TOKENS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_ENGINE_ERRORS: tuple[type, ...] = (EngineError, *EngineError.__subclasses__())
_OUTCOMES = (
    *((Outcome.SUCCESS.value, reason.value) for reason in list(FinishReason)[:3]),
    *((Outcome.CANCELLED.value, cause.value) for cause in CancelCause),
    *(
        (Outcome.OVERLOADED.value, reason)
        for reason in ("max_queued_requests", "max_queue_seconds", Overloaded.__name__)
    ),
    *((Outcome.FAILED.value, kind.__name__) for kind in _ENGINE_ERRORS),
)


_counter = partial(Metric, kind="counter")
_gauge = partial(Metric, kind="gauge")
_seconds = partial(Metric, kind="histogram", buckets=_FIRST_TOKENS)

REQUESTS = _counter(
    "trtllm_bls_requests_total",
    "Requests that are over, by outcome and its reason",
    labels=("outcome", "reason"),
    known=_OUTCOMES,
)
API_REQUESTS = _counter(
    "trtllm_bls_api_requests_total",
    "Requests of the OpenAI API that are over, by the kind of answer and the outcome",
    labels=("api", "outcome"),
    known=(),
)
RUNNING = _gauge("trtllm_bls_num_requests_running", "Requests that have a token and are not over")
WAITING = _gauge("trtllm_bls_num_requests_waiting", "Requests that have no token yet")
DURATION = _seconds(
    "gen_ai_server_request_duration_seconds",
    "From a request's arrival to its end",
    labels=("outcome",),
    known=((Outcome.SUCCESS.value,),),
    buckets=_DURATIONS,
)
FIRST_TOKEN = _seconds(
    "gen_ai_server_time_to_first_token_seconds", "From a stream's arrival to its first response"
)
PER_TOKEN = _seconds(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time between two tokens of a stream, after its first response",
    buckets=_TOKENS,
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
    known=(),
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
SPECULATION = {
    name: _counter(f"trtllm_bls_speculation_{name}_total", meaning)
    for name, meaning in {
        "rounds": "Verification rounds of speculative decoding",
        "drafted": "Tokens drafted",
        "accepted": "Drafted tokens that the target accepted",
        "draft_failures": "Requests that went on without drafts, because drafting failed",
    }.items()
}
METRICS = (
    *(
        REQUESTS,
        API_REQUESTS,
        RUNNING,
        WAITING,
        DURATION,
        FIRST_TOKEN,
        PER_TOKEN,
        LONGEST_GAP,
        QUEUE,
    ),
    *(ENGINE_SEQUENCES, PROMPT_TOKENS, GENERATION_TOKENS, RESPONSES, LOOP_LAG),
    *SPECULATION.values(),
)


class Metrics(ABC):
    """Takes what requests report; ``record`` is where it goes."""

    @abstractmethod
    def record(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add ``value`` to a counter or gauge, or observe it in a histogram."""

    def publish(self) -> None:  # noqa: B027, where there is nothing to do
        """Show what has been recorded; called every now and then."""

    def add(self, stats: RequestStats) -> None:
        """Count one request that is over."""
        for metric, labels, value in _samples(stats):
            self.record(metric, labels, value)
        if stats.speculation is not None and not stats.speculation.rounds:
            self.add_speculation(stats.speculation)  # the engine's own, not of a router of ours

    def add_speculation(self, stats: SpeculationStats) -> None:
        """Count what speculation did for one request."""
        for name, metric in SPECULATION.items():
            self.record(metric, (), getattr(stats, name))


def _samples(stats: RequestStats) -> Iterator[tuple[Metric, Labels, float]]:
    yield REQUESTS, (stats.outcome.value, stats.reason), 1
    if stats.api is not None:
        yield API_REQUESTS, (stats.api, stats.outcome.value), 1
    yield DURATION, (stats.outcome.value,), stats.duration_s
    yield PROMPT_TOKENS, (), stats.prompt_tokens
    yield GENERATION_TOKENS, (), stats.completion_tokens
    yield RESPONSES, (), stats.responses
    for metric, seconds in (
        (QUEUE, stats.queue_s),
        (FIRST_TOKEN, stats.ttft_s),
        (PER_TOKEN, stats.inter_token_s),
        (LONGEST_GAP, stats.longest_gap_s),
    ):
        if seconds is not None:
            yield metric, (), seconds


class RequestMetrics(Metrics):
    """The metrics of one process, in memory, by metric and label values.

    ``histograms`` count the values in each bucket, the last of which has no bound; their last item
    is the sum of the values.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[Metric, Labels], float] = {}
        self.histograms: dict[tuple[Metric, Labels], list[float]] = {}
        for metric in METRICS:
            for labels in metric.known:
                if metric.buckets:
                    self._of(metric, labels)
                else:
                    self.record(metric, labels, 0)

    def record(self, metric: Metric, labels: Labels, value: float) -> None:
        """See ``Metrics``."""
        if metric.buckets:
            histogram = self._of(metric, labels)
            histogram[bisect.bisect_left(metric.buckets, value)] += 1  # a bound is in its bucket
            histogram[-1] += value
        else:
            self.numbers[metric, labels] = self.numbers.get((metric, labels), 0) + value

    def _of(self, metric: Metric, labels: Labels) -> list[float]:
        return self.histograms.setdefault((metric, labels), [0] * (len(metric.buckets) + 2))


# --- on Triton -------------------------------------------------------------------------------


class TritonMetrics(Metrics):
    """The metrics on Triton's ``/metrics``, with the label ``model_name``; used by one thread.

    Each metric call is a round trip to the server, so counters are added up until ``publish``.
    Triton adds up series of the same name and labels over all processes. Gauges are therefore
    changed by differences and never set.
    """

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        self._pb = pb_utils
        self._model_name = model_name
        # Triton drops a family or a series that is no longer referenced.
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[Metric, Labels], Any] = {}
        self._counted: dict[tuple[Metric, Labels], float] = {}
        self._has_histograms = hasattr(pb_utils.MetricFamily, "HISTOGRAM")  # from Triton 24.08 on
        for metric in METRICS:
            if self._has_histograms or not metric.buckets:
                for labels in metric.known:
                    self._series_of(metric, labels)

    def record(self, metric: Metric, labels: Labels, value: float) -> None:
        """See ``Metrics``; counters and gauges appear with the next ``publish``."""
        if metric.buckets:
            if self._has_histograms:
                self._series_of(metric, labels).observe(value)
        else:
            self._counted[metric, labels] = self._counted.get((metric, labels), 0) + value

    def publish(self) -> None:
        """Show what counters and gauges have become."""
        while self._counted:
            key, value = self._counted.popitem()
            if value:
                self._series_of(*key).increment(value)

    def _series_of(self, metric: Metric, labels: Labels) -> Any:
        series = self._series.get((metric, labels))
        if series is None:
            series = self._series[metric, labels] = self._made(metric, labels)
        return series

    def _made(self, metric: Metric, labels: Labels) -> Any:
        family = self._families.get(metric.name)
        if family is None:
            kind = getattr(self._pb.MetricFamily, metric.kind.upper())
            family = self._families[metric.name] = self._pb.MetricFamily(
                name=metric.name, description=metric.meaning, kind=kind
            )
        named = dict(zip(metric.labels, labels, strict=True)) | {"model": self._model_name}
        if metric.buckets:
            return family.Metric(labels=named, buckets=list(metric.buckets))
        return family.Metric(labels=named)
