"""What requests learn from one another: times, acceptance, the health of the draft engine; and the
best length of a draft, which follows from them.

If a draft's token i is accepted with probability a_i after those before it, a draft of k tokens
yields E = 1 + a_1 + a_1 a_2 + ... tokens on average, in the time of k drafted tokens, one
verification and the overhead of a round. The length with the most tokens per second wins; length 0
wins where plain decoding is faster.

One object per pair of engines, long-lived, on one event loop. Owns no engine and no clock: times
are handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from statistics import median

from trtllm_bls.speculative.ngrams import Acceptance, DraftMemories, NgramAcceptance
from trtllm_bls.speculative.options import SpeculationOptions
from trtllm_bls.types import Backoff, EngineCapacity

# In-flight requests -> longest draft, read as "up to so many requests"; none above the last row.
# The shape of TensorRT-LLM's draft_len_schedule and vLLM's table, at the small end of both:
# a verified token costs a batch row that a waiting request could have used.
LOAD_SCHEDULE = ((4, 32), (8, 4), (16, 2), (32, 1))
DRAFT_COOL_DOWN_S = 5.0
FIRST_LENGTH = 2  # of a draft, before any cost is known
# Of a round over plain decoding, for n-grams, which nearly always match somewhere. Asking for less
# makes twice as many rounds, each with CPU of its own, for 1 % in all.
NGRAM_GAIN = 1.1
# Plain tokens before drafting is tried again; more while it does not pay.
PAUSE_TOKENS = Backoff(64, 256)
# One pausing request in 8 drafts again after 16 tokens. Otherwise answers shorter than the pause
# would never show that drafting has begun to pay.
EARLY_INTERVAL, EARLY_PAUSE = 8, 16
# Measuring overlap takes rounds with and without it. Of the first 8 rounds every second one
# overlaps; later, one round in 16 does the opposite of the better choice.
TRIAL_ROUNDS, TRIAL_INTERVAL = 8, 16
PROBE = 2  # tokens drafted to see whether acceptance has changed
_WINDOW = 15  # samples per length; a median of these forgets a load within seconds


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
        samples = self._samples.setdefault(length, deque(maxlen=_WINDOW))
        if samples:
            self._count(length, -len(samples), median(samples))
        samples.append(seconds)
        self._count(length, len(samples), median(samples))

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


@dataclass
class SpeculationShared:
    """Measured seconds, acceptance of the draft model and of n-grams, and whether the draft model
    may be asked.

    ``one_step`` tells whether the target ends every request after one step, as engines built for
    external drafts do; ``None`` until it is known. ``overlapped_times`` are of verifications beside
    which the draft model worked, ``verify_times`` of the others; ``overlap_rounds`` counts both.
    ``sending`` counts the requests of ``in_flight`` that will send further engine requests. Once
    ``draining`` is set, each sends one more: a plain one, for all that is left of its answer.
    ``pauses`` counts the requests that have stopped drafting for a while. ``memories``: finished
    answers of each tenant. Until ``draft_off_until`` the draft model is asked nothing.
    """

    in_flight: int = 0
    sending: int = 0
    draining: bool = False
    one_step: bool | None = None
    target_capacity: EngineCapacity | None = None
    draft_capacity: EngineCapacity | None = None
    draft_times: RunningTimes = field(default_factory=lambda: RunningTimes(proportional=True))
    verify_times: RunningTimes = field(default_factory=RunningTimes)
    overlapped_times: RunningTimes = field(default_factory=RunningTimes)
    overhead_times: RunningTimes = field(default_factory=RunningTimes)
    plain_times: RunningTimes = field(default_factory=RunningTimes)
    model_acceptance: Acceptance = field(default_factory=Acceptance)
    ngram_acceptance: NgramAcceptance = field(default_factory=dict)
    memories: DraftMemories = field(default_factory=DraftMemories)
    overlap_rounds: int = 0
    pauses: int = 0
    draft_off_until: float = 0.0

    def best_length(
        self, rates: Iterable[float], most: int, *, by_model: bool = False, beside: float = 0.0
    ) -> tuple[int, float]:
        """The draft length in ``0 .. most`` with the most expected tokens per second, and these.

        ``rates``: of each token, the chance that it is accepted after those before it. ``beside``:
        tokens per second that drafts of another source give.
        """
        work = [self.verify_times, self.draft_times] if by_model else [self.verify_times]
        # Of no token and of one; more add the same each, since all times are lines.
        none, one = ([times.at(length) for times in work] for length in (0, 1))
        verify = none[0]
        if verify is None or None in one:
            return min(most, FIRST_LENGTH), inf
        plain = self.plain_times.at(0)
        least = 1.0 if by_model else NGRAM_GAIN
        fastest = least * max(beside, 1 / max(plain if plain is not None else verify, 1e-9))
        best = 0
        seconds = sum(filter(None, none)) + (self.overhead_times.at(0) or 0.0)
        each = sum(filter(None, one)) - sum(filter(None, none))
        expected, all_accepted, last = 1.0, 1.0, 0.0
        for length, rate in zip(range(1, most + 1), rates, strict=False):
            all_accepted *= rate
            expected += all_accepted
            seconds += each
            speed = expected / max(seconds, 1e-9)
            if speed > fastest:
                best, fastest = length, speed
            elif speed < last:
                break  # each further token adds less, and costs as much
            last = speed
        return best, fastest

    def overlap_gains(self, rate: float, length: int) -> bool | None:
        """Whether drafting on while ``length`` tokens are verified saves more than it slows.

        A draft begun early is of use where all ``length`` tokens and the next one are accepted:
        then it saves its whole time. On a device of its own it slows nothing; on the target's,
        ``overlapped_times`` tell how much. ``None`` before both kinds of verification have been
        seen.
        """
        drafting = self.draft_times.at(length)
        alone, beside = self.verify_times.at(length), self.overlapped_times.at(length)
        if drafting is None or alone is None or beside is None:
            return None
        return rate ** (length + 1) * drafting > beside - alone


class DraftLength:
    """How many tokens to draft next, within what options and engine allow.

    ``paused_until``: the number of generated tokens before which ``length`` stays 0. ``speed``:
    tokens per second by the length that was chosen last; infinite until that has been measured.
    ``ceiling``: the longest draft at any load.
    """

    def __init__(self, options: SpeculationOptions, shared: SpeculationShared) -> None:
        self._options = options
        self._shared = shared
        self._acceptance = Acceptance(shared.model_acceptance.rate)
        self._pause = 0  # length of the current or last pause; 0: none since drafting paid off
        self.paused_until = 0
        self.speed = 0.0
        capacity = shared.target_capacity
        engine_most = capacity.max_draft_tokens if capacity else None
        limits = options.max_draft_tokens, options.num_draft_tokens, engine_most
        self.ceiling = min(limit for limit in limits if limit is not None)

    def most(self) -> int:
        """The longest draft allowed at this load, of any source, whatever it is worth."""
        if self._options.num_draft_tokens is not None:
            return self.ceiling
        rows = (most for requests, most in LOAD_SCHEDULE if self._shared.in_flight <= requests)
        return min(self.ceiling, next(rows, 0))

    def length(self, generated: int, room: int) -> int:
        """Tokens to draft after ``generated`` ones, at most ``room``; 0 = decode plainly."""
        self.speed = 0.0
        most = min(room, self.most())
        if most < 1 or generated < self.paused_until:
            return 0
        if self._options.num_draft_tokens is not None:
            return most
        best = self._best(most)
        if best == 0 and self._pause == 0:
            early = self._shared.pauses % EARLY_INTERVAL == 0
            self._shared.pauses += 1
            self._begin_pause(generated, EARLY_PAUSE if early else PAUSE_TOKENS.first)
        elif best == 0:
            return min(PROBE, most)
        return best

    def overlaps(self, length: int) -> bool:
        """Whether the draft model should work on while the target verifies ``length`` tokens.

        Where that is measured, some rounds do the opposite, so that both times stay known. With
        many requests in flight there is no overlap: drafts in vain would take time from others.
        """
        shared = self._shared
        if self._options.overlap is not None:
            return self._options.overlap
        if shared.in_flight > LOAD_SCHEDULE[0][0]:
            return False
        shared.overlap_rounds += 1
        if shared.overlap_rounds <= TRIAL_ROUNDS:
            return shared.overlap_rounds % 2 == 0
        gains = shared.overlap_gains(self._acceptance.rate, length)
        return bool(gains) != (shared.overlap_rounds % TRIAL_INTERVAL == 0)

    def add_round(self, drafted: int, accepted: int, generated: int) -> None:
        """Learn from a round that ended at ``generated`` tokens."""
        self._acceptance.add(drafted, accepted)
        self._shared.model_acceptance.add(drafted, accepted)
        if self._pause == 0:
            return
        if self._best(max(1, self.most())):
            self._pause = 0
        else:
            self._begin_pause(generated, PAUSE_TOKENS.after(self._pause))

    def _best(self, most: int) -> int:
        rates = repeat(self._acceptance.rate)
        best, self.speed = self._shared.best_length(rates, most, by_model=True)
        return best

    def _begin_pause(self, generated: int, tokens: int) -> None:
        self._pause = tokens
        self.paused_until = generated + tokens
