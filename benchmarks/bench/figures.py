"""From answers to the numbers of one line of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.answers import Answer, steady_window
from bench.processes import Processes
from bench.repository import roles_of


@dataclass
class Row:
    """One target under one load. Times in ms, CPU in µs per token, memory in MB.

    ``itl_*``: inter-token latency as NVIDIA's AIPerf and GenAI-Perf define it, one value for each
    request: the time from its first text to its last, divided by the tokens after the first text.
    ``token_*``: time between a response and the one before it, divided by the tokens in it, each
    token counted. ``gap_*``: the time between responses itself. Responses without text, such as an
    empty final one, are not counted.
    """

    mode: str  # "steady": all streams busy all the time, or "burst": all arrive at once
    target: str
    streams: int
    answers: int
    bad: int
    ttft_p50: float
    ttft_p99: float
    step_ms: float = 0.0
    tokens_per_s: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    token_p50: float | None = None
    token_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    responses_per_token: float | None = None
    cpu: dict[str, float] = field(default_factory=dict)  # server, model, engine
    rss_mb: float | None = None  # the model's largest process
    pss_mb: float | None = None  # of all a server's processes, what they share counted once
    shm_mb: float | None = None  # /dev/shm, all models
    problems: dict[str, int] = field(default_factory=dict)


def burst_row(target: str, streams: int, answers: Sequence[Answer]) -> Row:
    """Only the time to the first text counts."""
    bad = _problems(answers)
    p50, p99 = _percentiles([_first(answer) for answer in answers if answer.arrived])
    count = sum(bad.values())
    return Row("burst", target, streams, len(answers), count, p50, p99, problems=dict(bad))


def steady_row(
    target: str, streams: int, answers: Sequence[Answer], processes: Processes | None
) -> Row:
    begin, end = steady_window(answers, streams)
    bad = _problems(answers)
    firsts = [_first(a) for a in answers if a.arrived and begin <= a.started <= end]
    ttft_p50, ttft_p99 = _percentiles(firsts)
    tokens, responses = 0.0, 0
    each: list[float] = []
    gaps: list[float] = []
    counts: list[float] = []
    for answer in answers:
        before = None
        for arrived, count in zip(answer.arrived, answer.tokens(), strict=True):
            if not count:
                continue
            if begin <= arrived <= end:
                tokens += count
                responses += 1
                if before is not None:
                    gaps.append((arrived - before) / 1e6)
                    each.append(gaps[-1] / count)
                    counts.append(count)
            before = arrived
    token_p50, token_p99 = _percentiles(np.repeat(each, np.rint(counts).astype(int)))
    gap_p50, gap_p99 = _percentiles(gaps)
    whole = [a for a in answers if begin <= a.ended <= end]
    itl_p50, itl_p99 = _percentiles([each for a in whole for each in _inter_token_latency(a)])
    row = Row("steady", target, streams, len(answers), sum(bad.values()), ttft_p50, ttft_p99)
    row.tokens_per_s = tokens / (end - begin) * 1e9
    row.token_p50, row.token_p99, row.gap_p50, row.gap_p99 = token_p50, token_p99, gap_p50, gap_p99
    row.itl_p50, row.itl_p99 = itl_p50, itl_p99
    row.responses_per_token = responses / tokens if tokens else None
    row.problems = dict(bad)
    if processes is not None:
        roles = roles_of(target)
        known = {role: tuple(n for n in roles[role] if n in processes.ids) for role in roles}
        for role, names in known.items():
            used = processes.cpu_seconds(names, begin, end)
            row.cpu[role] = used / tokens * 1e6 if tokens else float("nan")
        row.rss_mb = processes.largest_mb(known["model"] or known["engine"])
        row.shm_mb = processes.shared_mb()
        if target in processes.ids:
            row.pss_mb = processes.together_mb(target)
    return row


def _first(answer: Answer) -> float:
    """Milliseconds to the first response with text in it."""
    full = (time for time, part in zip(answer.arrived, answer.parts, strict=True) if part)
    return (next(full, answer.ended) - answer.started) / 1e6


def _inter_token_latency(answer: Answer) -> list[float]:
    """The answer's one value, none where all text came at once."""
    full = [pair for pair in zip(answer.arrived, answer.tokens(), strict=True) if pair[1]]
    after_first = sum(count for _, count in full[1:])
    return [(full[-1][0] - full[0][0]) / 1e6 / after_first] if after_first else []


def _problems(answers: Sequence[Answer]) -> Counter[str]:
    return Counter(answer.problem for answer in answers if answer.problem)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)
