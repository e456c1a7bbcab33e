"""What drafts cost and gain: measured times, observed acceptance.

Knows numbers alone: it is fed with seconds and counts. ``shared`` chooses by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

_WINDOW = 15  # samples per length; a median of these forgets a load within seconds
_MEMORY = 0.97  # weight kept per guessed token: about the last 33 count
# Small, so that the first answer of a process finds out whether drafts pay and loses little if they
# do not.
_PRIOR_WEIGHT = 3.0  # guessed tokens that the prior counts for


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


def most_at_load(schedule: Sequence[tuple[int, int]], in_flight: int) -> int:
    """The longest draft allowed beside so many requests; 0 above the schedule's last row."""
    return next((length for requests, length in schedule if in_flight <= requests), 0)
