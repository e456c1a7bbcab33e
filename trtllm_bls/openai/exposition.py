"""``/metrics`` in Prometheus' text format, of one process or summed over all workers.

A scrape reaches any worker. Each worker writes its samples to a file in a shared directory, and the
worker that is asked adds them up. The counts of a worker that has ended stay.
"""

from __future__ import annotations

import os
import re
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import httpx
import msgspec

from trtllm_bls.services.request_reports import METRICS, Labels, Metric, RequestMetrics

_TRITON_S = 2.0
_OF_TRITON = re.compile(r"(# (HELP|TYPE) )?nv_")
# By the metric's name, each sample, as it is written, with its value.
Samples: TypeAlias = dict[str, dict[str, float]]


def samples(metrics: RequestMetrics, model: str) -> Samples:
    """Those of one process, which may be added to those of another."""
    found: Samples = {metric.name: {} for metric in METRICS}
    for (metric, labels), value in list(metrics.numbers.items()):
        found[metric.name][_sample(metric, "", labels, model)] = value
    for (metric, labels), (*counts, total) in list(metrics.histograms.items()):
        own = found[metric.name]
        ends = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
        for end, count in zip(ends, accumulate(counts), strict=True):
            own[_sample(metric, "_bucket", labels, model, end)] = count
        own[_sample(metric, "_sum", labels, model)] = total
        own[_sample(metric, "_count", labels, model)] = sum(counts)
    return found


def written(found: Samples) -> str:
    """The text format: the samples after each metric's HELP and TYPE."""
    lines = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{key} {value:.17g}" for key, value in found[metric.name].items()]
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


def share(found: Samples, directory: Path) -> None:
    """Replace this process's file of samples in ``directory``, which all workers have."""
    own = directory / str(os.getpid())
    new = own.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(found))
    new.replace(own)


def shared(directory: Path) -> Samples:
    """The sum over all processes; of gauges, over those that are alive."""
    total: Samples = {metric.name: {} for metric in METRICS}
    for file in directory.iterdir():
        if not file.suffix:
            found: Samples = msgspec.json.decode(file.read_bytes())
            alive = Path("/proc", file.name).exists()
            for metric in METRICS:
                if alive or metric.kind != "gauge":
                    own = total[metric.name]
                    for sample, value in found[metric.name].items():
                        own[sample] = own.get(sample, 0) + value
    return total


def _sample(metric: Metric, part: str, labels: Labels, model: str, end: str = "") -> str:
    pairs = [*zip(metric.labels, labels, strict=True), ("model", model)]
    pairs += [("le", end)] if end else []
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    text = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in pairs)
    return f"{metric.name}{part}{{{text}}}"
