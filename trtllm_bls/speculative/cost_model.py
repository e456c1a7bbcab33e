"""What drafts cost and gain: measured times, observed acceptance.

Knows numbers alone: it is fed with seconds and counts. ``shared`` chooses by them.
"""

from __future__ import annotations

from collections import deque
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
        # For the line of least squares through each length's median, weighing as much as that has
        # samples: sums of the weights, of n and s (length, seconds), of n * n and n * s.
        self._weight = self._n = self._nn = 0
        self._s = self._ns = 0.0

    def add(self, length: int, seconds: float) -> None:
        seen = self._samples.setdefault(length, deque(maxlen=_WINDOW))
        if seen:
            self._count(length, -len(seen), median(seen))
        seen.append(seconds)
        self._count(length, len(seen), median(seen))

    def _count(self, length: int, weight: int, seconds: float) -> None:
        self._weight += weight
        self._n += weight * length
        self._nn += weight * length * length
        self._s += weight * seconds
        self._ns += weight * length * seconds

    def at(self, length: int) -> float | None:
        """Expected seconds; ``None`` before the first sample. They never fall with the length."""
        if not self._samples:
            return None
        if spread := self._weight * self._nn - self._n * self._n:
            slope = max(0.0, (self._weight * self._ns - self._n * self._s) / spread)
        else:
            slope = self._s / self._n if self._proportional and self._n else 0.0
        return max(0.0, (self._s - slope * self._n) / self._weight + slope * length)


class Stopwatch:
    """Seconds per token of a plain request. ``since``: when it began; ``None`` where it reads the
    prompt, as its time then counts from its first chunk."""

    def __init__(self, since: float | None) -> None:
        self.tokens = 0
        self._since = since
        self._timed = 0
        self._last = 0.0

    def add(self, tokens: int, now: float) -> None:
        self.tokens += tokens
        if self._since is None:
            self._since = now
        else:
            self._timed += tokens
        self._last = now

    def seconds_per_token(self) -> float | None:
        if self._since is None or not self._timed:
            return None
        return (self._last - self._since) / self._timed
