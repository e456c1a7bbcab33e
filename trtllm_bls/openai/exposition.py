"""``/metrics`` in Prometheus' text format, of one process or summed over all workers.

A scrape reaches any worker. Each worker writes its samples to memory that all share, and the worker
that answers the scrape adds them up. The counts of a worker that has ended stay.
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
_TRITON_LINE = re.compile(r"(# (HELP|TYPE) )?nv_")
# By the metric's name: its samples, as they are printed, with their values.
Samples: TypeAlias = dict[str, dict[str, float]]
_PLACE = struct.Struct("QQ")  # the start of the latest version, and its length, in bytes
_ENDED_WORKERS = ""  # the name of the counts of workers that have ended


def samples(metrics: RequestMetrics, model: str) -> Samples:
    """Return the samples of one process, which may be added to those of another."""
    values: Samples = {metric.name: {} for metric in METRICS}
    for (metric, labels), value in list(metrics.numbers.items()):
        values[metric.name][_sample(metric, "", labels, model)] = value
    for (metric, labels), (*counts, total) in list(metrics.histograms.items()):
        metric_samples = values[metric.name]
        ends = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
        for end, count in zip(ends, accumulate(counts), strict=True):
            metric_samples[_sample(metric, "_bucket", labels, model, end)] = count
        metric_samples[_sample(metric, "_sum", labels, model)] = total
        metric_samples[_sample(metric, "_count", labels, model)] = sum(counts)
    return values


def exposition(values: Samples) -> str:
    """Return the text format: the samples after each metric's HELP and TYPE."""
    lines: list[str] = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{key} {value:.17g}" for key, value in values[metric.name].items()]
    return "\n".join([*lines, ""])


def triton_metrics(url: str) -> str:
    """Read Triton's own metrics (``nv_…``) at ``url``; empty while they cannot be read.

    The metrics of our models, which Triton has too, count requests of other ports.
    """
    try:
        text = httpx.get(url, timeout=_TRITON_S, trust_env=False).text
    except httpx.HTTPError:
        return ""
    return "".join(line for line in text.splitlines(keepends=True) if _TRITON_LINE.match(line))


class SharedSamples:
    """Samples in memory of one process and the workers that it forks; freed with the last of them.

    A worker may be killed at any moment, also while it writes. So a new version is written beside
    the old one, and the few bytes with its place are written last.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("trtllm-bls-samples")
        os.pwrite(self._file, _PLACE.pack(_PLACE.size, 0), 0)

    def put(self, values: Samples) -> Samples:
        """Replace this process's samples; return the sums over all, of gauges over running ones."""
        pid = os.getpid()
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            start, length = _PLACE.unpack(os.pread(self._file, _PLACE.size, 0))
            workers: dict[str, Samples] = {}
            if length:
                workers = msgspec.json.decode(os.pread(self._file, length, start))
            workers[f"{pid}-{start_of(pid)}"] = values
            ended_names = [name for name in workers if not _runs(name)]
            ended = [workers.pop(name) for name in ended_names]
            workers[_ENDED_WORKERS] = _sum(ended, gauges=False)
            text = msgspec.json.encode(workers)
            if _PLACE.size + len(text) <= start:  # it fits in front of the latest version
                start = _PLACE.size
            else:
                start += length
            os.pwrite(self._file, text, start)
            os.pwrite(self._file, _PLACE.pack(start, len(text)), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return _sum(workers.values())


def _runs(name: str) -> bool:
    pid, _, start = name.partition("-")
    return name != _ENDED_WORKERS and start_of(int(pid)) == int(start)


def _sum(processes: Iterable[Samples], *, gauges: bool = True) -> Samples:
    total: Samples = {metric.name: {} for metric in METRICS}
    for process in processes:
        for metric in METRICS:
            if gauges or metric.kind != "gauge":
                sums = total[metric.name]
                for sample, value in process[metric.name].items():
                    sums[sample] = sums.get(sample, 0) + value
    return total


def _sample(metric: Metric, part: str, labels: Labels, model: str, end: str = "") -> str:
    pairs = [*zip(metric.labels, labels, strict=True), ("model", model)]
    if end:
        pairs.append(("le", end))
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    text = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in pairs)
    return f"{metric.name}{part}{{{text}}}"
