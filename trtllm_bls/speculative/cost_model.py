"""What a draft costs and gains: measured times, observed acceptance, the best length of a draft.

If each token is accepted with probability a, a draft of k tokens yields E = 1 + a + ... + a^k
tokens on average, in the time of k drafted tokens, one verification and the overhead of a round.
The length with the most tokens per second wins; length 0 wins where plain decoding is faster.

Knows numbers alone: it is fed with seconds and counts, and asked for a length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_WINDOW = 15  # samples per length; a median of these forgets a load within seconds
_MEMORY = 0.97  # weight kept per guessed token: about the last 33 count
# Small, so that the first answer of a process finds out whether drafts pay and loses little if they
# do not.
_PRIOR_WEIGHT = 3.0  # guessed tokens that the prior counts for
FIRST_LENGTH = 2  # of a draft, before any cost is known


class Acceptance:
    """The chance that one more drafted token is accepted, remembered for a while."""

    def __init__(self, prior: float = 0.5) -> None:
        self._hits = prior * _PRIOR_WEIGHT
        self._trials = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._hits / self._trials

    def add(self, drafted: int, accepted: int) -> None:
        """A round accepted so many; only the first refused token was a trial, the rest unseen."""
        trials = min(drafted, accepted + 1)
        kept = _MEMORY**trials
        self._hits = self._hits * kept + accepted
        self._trials = self._trials * kept + trials


class RunningTimes:
    """Seconds as a straight line over a length, through the medians of recent samples.

    With one length seen, the line is flat, or ``proportional``: through zero.
    """

    def __init__(self, *, proportional: bool = False) -> None:
        self._proportional = proportional
        self._samples: dict[int, deque[float]] = {}
        self._line: tuple[float, float] | None = None  # at zero, per unit; None = not fitted

    def add(self, length: int, seconds: float) -> None:
        self._samples.setdefault(length, deque(maxlen=_WINDOW)).append(seconds)
        self._line = None

    def at(self, length: int) -> float | None:
        """Expected seconds; ``None`` before the first sample."""
        if not self._samples:
            return None
        if self._line is None:
            self._line = self._fit()
        return max(0.0, self._line[0] + self._line[1] * length)

    def _fit(self) -> tuple[float, float]:
        """Least squares, each median weighing as much as it has samples; never falling."""
        points = [(n, median(seen), len(seen)) for n, seen in self._samples.items()]
        weight = sum(count for _, _, count in points)
        mean_n = sum(n * count for n, _, count in points) / weight
        mean_s = sum(seconds * count for _, seconds, count in points) / weight
        spread = sum(count * (n - mean_n) ** 2 for n, _, count in points)
        if spread == 0:
            slope = mean_s / mean_n if self._proportional and mean_n else 0.0
        else:
            slope = sum(c * (n - mean_n) * (s - mean_s) for n, s, c in points) / spread
        slope = max(0.0, slope)
        return mean_s - slope * mean_n, slope


class Stopwatch:
    """Seconds per token of a plain request, without the prefill of its prompt."""

    def __init__(self, begun: float, *, reads_prompt: bool) -> None:
        self.tokens = 0
        self._since = begun
        self._counted = 0
        self._last = begun
        self._skip = reads_prompt

    def add(self, tokens: int, now: float) -> None:
        self.tokens += tokens
        if self._skip:
            self._skip, self._since = False, now
        else:
            self._counted += tokens
        self._last = now

    def seconds_per_token(self) -> float | None:
        return (self._last - self._since) / self._counted if self._counted else None


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts; ``draft`` is ``None`` where drafting costs nothing."""

    draft: RunningTimes | None
    verify: RunningTimes
    overhead: RunningTimes
    plain: RunningTimes  # one token of plain decoding


def best_length(rate: float, costs: Costs, most: int) -> int:
    """The draft length in ``0 .. most`` with the most expected tokens per second."""
    verify = costs.verify.at(0)
    drafting = 0.0 if costs.draft is None else costs.draft.at(1)
    if verify is None or drafting is None:
        return min(most, FIRST_LENGTH)
    plain = costs.plain.at(0)
    best, fastest = 0, 1.0 / max(plain if plain is not None else verify, 1e-9)
    overhead, expected = costs.overhead.at(0) or 0.0, 1.0
    for length in range(1, most + 1):
        expected += rate**length
        seconds = (costs.draft.at(length) or 0.0) if costs.draft else 0.0
        seconds += (costs.verify.at(length) or 0.0) + overhead
        if expected > fastest * seconds:
            best, fastest = length, expected / max(seconds, 1e-9)
    return best


def overlap_gains(rate: float, length: int, costs: Costs, overlapped: RunningTimes) -> bool | None:
    """Whether drafting on while ``length`` tokens are verified saves more than it slows.

    A draft begun early is of use where all ``length`` tokens and the next one are accepted: then
    it saves its whole time. On a device of its own it slows nothing; on the target's,
    ``overlapped`` tells how much. ``None`` before both kinds of verification have been seen.
    """
    drafting = costs.draft.at(length) if costs.draft else None
    alone, beside = costs.verify.at(length), overlapped.at(length)
    if drafting is None or alone is None or beside is None:
        return None
    return rate ** (length + 1) * drafting > beside - alone


def most_at_load(schedule: Sequence[tuple[int, int]], in_flight: int) -> int:
    """The longest draft allowed beside so many requests; 0 above the schedule's last row."""
    return next((length for requests, length in schedule if in_flight <= requests), 0)
