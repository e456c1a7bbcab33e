"""How ``serve`` finds its server, in Prometheus' text format; docs/metrics.md has the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerMetric:
    """``labels`` are the names of its labels, ``kind`` is Prometheus' type."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


READY = ServerMetric("trtllm_bls_server_ready", "gauge", "1 while /health/ready says so, else 0")
PROCESSES = ServerMetric(
    "trtllm_bls_server_processes",
    "gauge",
    "Processes of the server and its models that run, by name; the server's own is tritonserver",
    ("process",),
)
RESTARTS = ServerMetric(
    "trtllm_bls_server_restarts_total", "counter", "Times that the server was started again"
)
API_RESTARTS = ServerMetric(
    "trtllm_bls_openai_restarts_total", "counter", "Times that the OpenAI API was started again"
)
SERVER_METRICS = (READY, PROCESSES, RESTARTS, API_RESTARTS)


def written(ready: bool, processes: Mapping[str, int], restarts: int, api_restarts: int) -> str:
    """The text of ``/metrics``; ``processes``: how many run, by name."""
    samples = {
        READY: {"": int(ready)},
        PROCESSES: {f'{{process="{name}"}}': count for name, count in processes.items()},
        RESTARTS: {"": restarts},
        API_RESTARTS: {"": api_restarts},
    }
    lines = []
    for metric, values in samples.items():
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{labels} {value}" for labels, value in values.items()]
    return "\n".join([*lines, ""])
