"""The metrics of ``services.request_metrics`` on Triton's ``/metrics``.

A metric call is a round trip to the server, so the thread of ``RequestReports`` makes them, with
counters added up between two turns. Triton adds up series of the same name and labels, of all
processes; gauges are therefore changed by differences, never set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtllm_bls.services.request_metrics import METRICS, Labels, Metric, Metrics


class TritonMetrics(Metrics):
    """Custom metrics of the model ``model_name``, by ``pb_utils``; used by one thread."""

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        self._pb = pb_utils
        self._model_name = model_name
        # Families and series must both stay referenced, or Triton drops them.
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[Metric, Labels], Any] = {}
        self._counted: dict[tuple[Metric, Labels], float] = {}
        self._instead: dict[Metric, tuple[Metric, Metric]] = {}
        if not hasattr(pb_utils.MetricFamily, "HISTOGRAM"):  # before Triton 24.08
            self._instead = {metric: _sum_and_count(metric) for metric in METRICS if metric.buckets}
        for metric in METRICS:
            for labels in metric.known:
                for made in self._instead.get(metric, (metric,)):
                    self._series_of(made, labels)

    def record(self, metric: Metric, labels: Labels, value: float) -> None:
        """See ``Metrics``; counters and gauges appear with the next ``publish``."""
        if metric in self._instead:
            total, count = self._instead[metric]
            self.record(total, labels, value)
            self.record(count, labels, 1)
        elif metric.buckets:
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


def _sum_and_count(histogram: Metric) -> tuple[Metric, Metric]:
    """What is left of a histogram where there are none: enough for means."""
    total, count = (
        replace(histogram, name=f"{histogram.name}_{part}", kind="counter", buckets=())
        for part in ("sum", "count")
    )
    return total, count
