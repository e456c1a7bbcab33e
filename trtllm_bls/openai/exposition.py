"""``/metrics`` in Prometheus' text format, of one process or summed over all workers.

A scrape reaches any worker. Each worker writes its samples to a file in a shared directory, and the
worker that is asked adds them up. The counts of a worker that has ended stay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import httpx
import msgspec

from trtllm_bls.services.request_metrics import METRICS, Labels, Metric, RequestMetrics

_TRITON_S = 2.0
_OF_TRITON = re.compile(r"(# (HELP|TYPE) )?nv_")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def samples(metrics: RequestMetrics, model: str) -> dict[str, float]:
    """Each sample, as it is written, with its value; those of two processes may be added."""
    found: dict[str, float] = {}
    for (metric, labels), value in list(metrics.numbers.items()):
        found[_sample(metric, "", labels, model)] = value
    for (metric, labels), histogram in list(metrics.histograms.items()):
        ends = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for end, count in zip(ends, accumulate(histogram.counts), strict=True):
            found[_sample(metric, "_bucket", labels, model, end)] = count
        found[_sample(metric, "_sum", labels, model)] = histogram.sum
        found[_sample(metric, "_count", labels, model)] = sum(histogram.counts)
    return found


def written(found: Mapping[str, float]) -> str:
    """The text format: the samples after each metric's HELP and TYPE."""
    lines = []
    for metric in METRICS:
        names = {metric.name + end for end in ("", "_bucket", "_sum", "_count")}
        own = [f"{key} {value:.17g}" for key, value in found.items() if _name(key) in names]
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}"]
        lines += own
    return "\n".join([*lines, ""])


def triton_metrics(url: str) -> str:
    """Triton's own metrics (``nv_…``) at ``url``; none while they cannot be read.

    Our models' metrics, which Triton shows too, count requests of other ports.
    """
    try:
        told = httpx.get(url, timeout=_TRITON_S, trust_env=False).text
    except httpx.HTTPError:
        return ""
    return "".join(line for line in told.splitlines(keepends=True) if _OF_TRITON.match(line))


class SharedSamples:
    """The samples of all workers, each in a file named by its process in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, found: Mapping[str, float]) -> None:
        """Replace this process's file."""
        own = self._directory / str(os.getpid())
        new = own.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(found))
        new.replace(own)

    def total(self) -> dict[str, float]:
        """The sum over all processes; of gauges, over those that are alive."""
        gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
        total: dict[str, float] = {}
        for file in self._directory.iterdir():
            if not file.suffix:
                found: dict[str, float] = msgspec.json.decode(file.read_bytes())
                alive = Path("/proc", file.name).exists()
                for sample, value in found.items():
                    if alive or _name(sample) not in gauges:
                        total[sample] = total.get(sample, 0) + value
        return total


def _sample(metric: Metric, part: str, labels: Labels, model: str, end: str = "") -> str:
    pairs = [*zip(metric.labels, labels, strict=True), ("model", model)]
    pairs += [("le", end)] if end else []
    text = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{metric.name}{part}{{{text}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _name(sample: str) -> str:
    return sample.partition("{")[0]
