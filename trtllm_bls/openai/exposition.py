"""``/metrics`` in Prometheus' text format, of one process or summed over all workers.

A scrape reaches any worker. Each worker writes its samples to memory that all share, and the worker
that is asked adds them up. The counts of a worker that has ended stay.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterable
from itertools import accumulate
from typing import TypeAlias

import httpx
import msgspec

from trtllm_bls.orchestrator.reports import METRICS, Labels, Metric, RequestMetrics
from trtllm_bls.orchestrator.status import start_of

_TRITON_S = 2.0
_OF_TRITON = re.compile(r"(# (HELP|TYPE) )?nv_")
# By the metric's name, each sample, as it is written, with its value.
Samples: TypeAlias = dict[str, dict[str, float]]
_PLACE = struct.Struct("QQ")  # where the latest version begins, and its length in bytes
_ENDED = ""  # the name of what workers that have ended counted


def samples(metrics: RequestMetrics, model: str) -> Samples:
    """Those of one process, which may be added to those of another."""
    values: Samples = {metric.name: {} for metric in METRICS}
    for (metric, labels), value in list(metrics.numbers.items()):
        values[metric.name][_sample(metric, "", labels, model)] = value
    for (metric, labels), (*counts, total) in list(metrics.histograms.items()):
        own = values[metric.name]
        ends = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
        for end, count in zip(ends, accumulate(counts), strict=True):
            own[_sample(metric, "_bucket", labels, model, end)] = count
        own[_sample(metric, "_sum", labels, model)] = total
        own[_sample(metric, "_count", labels, model)] = sum(counts)
    return values


def written(values: Samples) -> str:
    """The text format: the samples after each metric's HELP and TYPE."""
    lines = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{key} {value:.17g}" for key, value in values[metric.name].items()]
    return "\n".join([*lines, ""])


def triton_metrics(url: str) -> str:
    """Triton's own metrics (``nv_…``) at ``url``; none while they cannot be read.

    Our models' metrics, which Triton shows too, count requests of other ports.
    """
    try:
        text = httpx.get(url, timeout=_TRITON_S, trust_env=False).text
    except httpx.HTTPError:
        return ""
    return "".join(line for line in text.splitlines(keepends=True) if _OF_TRITON.match(line))


class SharedSamples:
    """Samples in memory of one process and the workers that it forks, which ends with the last.

    A worker may be killed at any moment, also while it writes. So a new version is written beside
    the old one, and the few bytes that say where it is come last.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("trtllm-bls-samples")
        os.pwrite(self._file, _PLACE.pack(_PLACE.size, 0), 0)

    def put(self, values: Samples) -> Samples:
        """Replace this process's samples; the sum over all, of gauges over those that run."""
        pid = os.getpid()
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            start, length = _PLACE.unpack(os.pread(self._file, _PLACE.size, 0))
            kept: dict[str, Samples] = {}
            if length:
                kept = msgspec.json.decode(os.pread(self._file, length, start))
            kept[f"{pid}-{start_of(pid)}"] = values
            ended = [name for name in kept if not _runs(name)]
            kept[_ENDED] = _sum((kept.pop(name) for name in ended), gauges=False)
            text = msgspec.json.encode(kept)
            fits = _PLACE.size + len(text) <= start
            start = _PLACE.size if fits else start + length
            os.pwrite(self._file, text, start)
            os.pwrite(self._file, _PLACE.pack(start, len(text)), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return _sum(kept.values())


def _runs(name: str) -> bool:
    pid, _, start = name.partition("-")
    return name != _ENDED and start_of(int(pid)) == int(start)


def _sum(processes: Iterable[Samples], *, gauges: bool = True) -> Samples:
    total: Samples = {metric.name: {} for metric in METRICS}
    for process in processes:
        for metric in METRICS:
            if gauges or metric.kind != "gauge":
                own = total[metric.name]
                for sample, value in process[metric.name].items():
                    own[sample] = own.get(sample, 0) + value
    return total


def _sample(metric: Metric, part: str, labels: Labels, model: str, end: str = "") -> str:
    pairs = [*zip(metric.labels, labels, strict=True), ("model", model)]
    pairs += [("le", end)] if end else []
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    text = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in pairs)
    return f"{metric.name}{part}{{{text}}}"
