"""From what requests took to the figures of a run. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_bls.commands.reply import Reply
from trtllm_bls.commands.servers import Question

_ENDS = {"stop", "length", "end_id", "tool_calls", None}  # None: a server that does not tell


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One request. Times in seconds; ``None`` where nothing came. ``problem``: why it counts as
    failed, then its times are in no figure."""

    target: int  # which of the servers
    place: int  # which of the prompts
    sent: float  # on the clock of the run
    ttft_s: float | None
    whole_s: float  # from sending to the end of the answer
    tokens: int | None
    finish_reason: str | None
    problem: str | None = None


def problem_of(reply: Reply, question: Question) -> str | None:
    """What is wrong with an answer that came to its end; nothing, if all is well."""
    reason, tokens, max_tokens = reply.finish_reason, reply.completion_tokens, question.max_tokens
    if reason not in _ENDS:
        return f"ended by {reason!r}"
    if not reply.text:
        return "no text came"
    if tokens is not None and tokens > max_tokens:
        return f"{tokens} tokens, more than the {max_tokens} asked for"
    if question.fields.get("ignore_eos") and tokens is not None and tokens < max_tokens:
        return f"{tokens} tokens where {max_tokens} were asked for with --ignore-eos"
    return None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one server in one run; times in milliseconds, ``None`` where nothing was measured.

    ``tokens_per_s`` and ``requests_per_s`` are those of the server while it had requests to answer;
    ``stream_tokens_per_s`` is the median of single answers, from sending to the end.
    """

    requests: int
    failed: int
    problems: dict[str, int]
    seconds: float
    tokens: int | None
    tokens_per_s: float | None
    requests_per_s: float | None
    stream_tokens_per_s: float | None
    ttft_ms: dict[str, float] | None
    whole_ms: dict[str, float] | None


def figures(outcomes: Sequence[Outcome], seconds: float) -> Figures:
    """``seconds``: how long the server worked on them."""
    good = [outcome for outcome in outcomes if outcome.problem is None]
    counts = [outcome.tokens for outcome in good if outcome.tokens is not None]
    counted = len(counts) == len(good) and good
    rates = [o.tokens / o.whole_s for o in good if o.tokens is not None and o.whole_s > 0]
    return Figures(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        problems=dict(Counter(o.problem for o in outcomes if o.problem is not None)),
        seconds=seconds,
        tokens=sum(counts) if counted else None,
        tokens_per_s=sum(counts) / seconds if counted and seconds > 0 else None,
        requests_per_s=len(good) / seconds if good and seconds > 0 else None,
        stream_tokens_per_s=float(np.median(rates)) if rates else None,
        ttft_ms=percentiles([o.ttft_s * 1000 for o in good if o.ttft_s is not None]),
        whole_ms=percentiles([o.whole_s * 1000 for o in good]),
    )


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, p90 and p99."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    mean = float(np.mean(values))
    return {"mean": mean, "p50": float(p50), "p90": float(p90), "p99": float(p99)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A server beside the first one, over the prompts that both answered in the same round of one
    interleaved run: medians of its time divided by the first one's."""

    pairs: int
    ttft_ratio: float | None
    whole_ratio: float | None


def compare(first: Sequence[Outcome], other: Sequence[Outcome]) -> Comparison:
    """Both in the order of asking."""
    pairs = [
        (a, b) for a, b in zip(first, other, strict=True) if a.problem is None and b.problem is None
    ]
    ttft = [b.ttft_s / a.ttft_s for a, b in pairs if a.ttft_s and b.ttft_s]
    whole = [b.whole_s / a.whole_s for a, b in pairs if a.whole_s]
    return Comparison(
        pairs=len(pairs),
        ttft_ratio=float(np.median(ttft)) if ttft else None,
        whole_ratio=float(np.median(whole)) if whole else None,
    )


@dataclass(frozen=True)
class Histogram:
    """Counts of each series in bins of equal width; ``edges`` are one more than the bins."""

    edges: list[float]
    counts: list[list[int]]


def histogram(series: Sequence[Sequence[float]], bins: int = 20) -> Histogram | None:
    """Shared bins, up to the 99th percentile of all; the last bin has all that is above."""
    values = [value for each in series for value in each]
    if not values:
        return None
    low, high = min(values), float(np.percentile(values, 99))
    high = high if high > low else low + max(low, 1.0) * 0.01
    edges = np.linspace(low, high, bins + 1)
    counts = [np.histogram(np.clip(each, low, high), edges)[0].tolist() for each in series]
    return Histogram(edges.tolist(), counts)
