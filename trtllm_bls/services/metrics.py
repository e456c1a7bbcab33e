"""Speculation's counters on Triton's ``/metrics``; added to once per request, never per token."""

from __future__ import annotations

from typing import Any

from trtllm_bls.speculative import SpeculationStats

_COUNTERS = {
    "rounds": "Verification rounds of speculative decoding",
    "drafted": "Tokens drafted",
    "accepted": "Drafted tokens that the target accepted",
    "draft_failures": "Requests that went on without drafts, because drafting failed",
}


class SpeculationMetrics:
    """Families ``trtllm_bls_speculation_*_total``; acceptance rate = accepted / drafted.

    Without ``pb_utils``, outside of Triton, there is nothing to count into.
    """

    def __init__(self, pb_utils: Any) -> None:
        # Families and metrics must both stay referenced, or Triton drops them.
        counters = {} if pb_utils is None else _COUNTERS
        self._families = {
            name: pb_utils.MetricFamily(
                name=f"trtllm_bls_speculation_{name}_total",
                description=text,
                kind=pb_utils.MetricFamily.COUNTER,
            )
            for name, text in counters.items()
        }
        self._metrics = {
            name: family.Metric(labels={"model": "tensorrt_llm_bls"})
            for name, family in self._families.items()
        }

    def add(self, stats: SpeculationStats) -> None:
        """Add one request's figures."""
        for name, metric in self._metrics.items():
            if value := getattr(stats, name):
                metric.increment(value)
