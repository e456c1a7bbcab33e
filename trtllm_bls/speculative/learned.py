"""Figures that requests share: times, acceptance, and the health of the draft engine.

The draft length with the most tokens per second follows from them.

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
FIRST_LENGTH = 2  # length of a draft before any cost is known
# Gain over plain decoding that makes a round with n-grams worth while. They nearly always match
# somewhere: a smaller gain would make twice as many rounds, each with its CPU time, for 1 % in all.
NGRAM_GAIN = 1.1
# Plain tokens before drafting is tried again; more while it does not pay.
PAUSE_TOKENS = Backoff(64, 256)
# One pausing request in 8 drafts again after 16 tokens. Otherwise answers shorter than the pause
# would never show that drafting has begun to pay.
EARLY_INTERVAL = 8
EARLY_PAUSE = 16
# Measuring overlap takes rounds with and without it. Of the first 8 rounds every second one
# overlaps; later, one round in 16 does the opposite of the better choice.
TRIAL_ROUNDS = 8
TRIAL_INTERVAL = 16
PROBE = 2  # tokens drafted to see whether acceptance has changed
_WINDOW = 15  # samples per length; a median of these forgets a load within seconds


class RunningTimes:
    """Seconds as a straight line over a length, through the medians of recent samples.

    With one length seen, the line is flat, or ``proportional``: through zero.
    """

    def __init__(self, *, proportional: bool = False) -> None:
        self._proportional = proportional
        self._samples: dict[int, deque[float]] = {}
        # Sums for the line of least squares through each length's median, which weighs as much as
        # it has samples: the weights, n (the length), s (the seconds), n * n and n * s.
        self._weight = 0
        self._n = 0
        self._nn = 0
        self._s = 0.0
        self._ns = 0.0

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
        """Return the expected seconds, which never fall with the length.

        ``None`` before the first sample.
        """
        if not self._samples:
            return None
        spread = self._weight * self._nn - self._n * self._n
        if spread:
            slope = max(0.0, (self._weight * self._ns - self._n * self._s) / spread)
        elif self._proportional and self._n:
            slope = self._s / self._n
        else:
            slope = 0.0
        return max(0.0, (self._s - slope * self._n) / self._weight + slope * length)


class Stopwatch:
    """Seconds per token of a plain request.

    ``since``: when it began; ``None`` where it reads the prompt, since its time then counts from
    its first chunk.
    """

    def __init__(self, since: float | None) -> None:
        self.num_tokens = 0
        self._since = since
        self._num_timed_tokens = 0
        self._until = 0.0  # when the latest token came

    def add(self, tokens: int, now: float) -> None:
        self.num_tokens += tokens
        if self._since is None:
            self._since = now
        else:
            self._num_timed_tokens += tokens
        self._until = now

    def seconds_per_token(self) -> float | None:
        if self._since is None or not self._num_timed_tokens:
            return None
        return (self._until - self._since) / self._num_timed_tokens


@dataclass
class SpeculationShared:
    """Figures that all requests share: seconds, acceptance, the state of the draft model.

    ``one_step``: true if the target ends every request after one step, as engines built for
    external drafts do; ``None`` until it is known. ``overlapped_times`` measure verifications
    during which the draft model worked, ``verify_times`` all others; ``overlap_rounds`` counts
    both. ``sending`` counts the requests of ``in_flight`` that will send further engine requests.
    Once ``draining`` is set, each sends one more: a plain one, for the remainder of its answer.
    ``pauses`` counts the requests that have stopped drafting for a while. ``memories``: finished
    answers of each tenant. The draft model gets no request before ``draft_off_until``.
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
        self,
        rates: Iterable[float],
        limit: int,
        *,
        by_model: bool = False,
        rival_speed: float = 0.0,
    ) -> tuple[int, float]:
        """Return the draft length up to ``limit`` with the most tokens per second, and that speed.

        ``rates``: the chance of each token that it is accepted after those before it.
        ``rival_speed``: tokens per second that drafts of another source give.
        """
        work = [self.verify_times]
        if by_model:
            work.append(self.draft_times)
        # Since all times are lines, each further token adds as much as the first one.
        without_draft = 0.0
        with_one_token = 0.0
        for times in work:
            start = times.at(0)
            step = times.at(1)
            if start is None or step is None:
                return min(limit, FIRST_LENGTH), inf
            without_draft += start
            with_one_token += step
        seconds_per_token = with_one_token - without_draft
        plain = self.plain_times.at(0)
        if plain is None:
            plain = self.verify_times.at(0)
        gain = 1.0
        if not by_model:
            gain = NGRAM_GAIN
        highest_speed = gain * max(rival_speed, 1 / max(plain or 0.0, 1e-9))
        fastest_length = 0
        seconds = without_draft + (self.overhead_times.at(0) or 0.0)
        expected = 1.0
        all_accepted = 1.0
        shorter_speed = 0.0
        for length, rate in zip(range(1, limit + 1), rates, strict=False):
            all_accepted *= rate
            expected += all_accepted
            seconds += seconds_per_token
            speed = expected / max(seconds, 1e-9)
            if speed > highest_speed:
                fastest_length = length
                highest_speed = speed
            elif speed < shorter_speed:
                break  # each further token adds less, and costs as much
            shorter_speed = speed
        return fastest_length, highest_speed

    def overlap_gains(self, rate: float, length: int) -> bool | None:
        """Return true if drafting while ``length`` tokens are verified saves more than it slows.

        A draft begun early is of use if all ``length`` tokens and the next one are accepted: then
        it saves its whole time. It slows nothing on a device of its own; on the target's,
        ``overlapped_times`` tell how much. ``None`` before both kinds of verification have been
        measured.
        """
        drafting = self.draft_times.at(length)
        verifying = self.verify_times.at(length)
        overlapping = self.overlapped_times.at(length)
        if drafting is None or verifying is None or overlapping is None:
            return None
        return rate ** (length + 1) * drafting > overlapping - verifying


class DraftLength:
    """The number of tokens to draft next, within the limits of options and engine.

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
        self.ceiling = options.max_draft_tokens
        if options.num_draft_tokens is not None:
            self.ceiling = min(self.ceiling, options.num_draft_tokens)
        capacity = shared.target_capacity
        if capacity is not None and capacity.max_draft_tokens is not None:
            self.ceiling = min(self.ceiling, capacity.max_draft_tokens)

    def limit(self) -> int:
        """Return the longest draft allowed at this load, from any source, whatever it is worth."""
        if self._options.num_draft_tokens is not None:
            return self.ceiling
        for num_requests, length in LOAD_SCHEDULE:
            if self._shared.in_flight <= num_requests:
                return min(self.ceiling, length)
        return 0

    def length(self, generated: int, room: int) -> int:
        """Return the length of the draft after ``generated`` tokens, up to ``room``; 0 for none."""
        self.speed = 0.0
        limit = min(room, self.limit())
        if limit < 1 or generated < self.paused_until:
            return 0
        if self._options.num_draft_tokens is not None:
            return limit
        length = self._fastest_length(limit)
        if length == 0 and self._pause == 0:
            pause = PAUSE_TOKENS.shortest
            if self._shared.pauses % EARLY_INTERVAL == 0:
                pause = EARLY_PAUSE
            self._shared.pauses += 1
            self._begin_pause(generated, pause)
        elif length == 0:
            return min(PROBE, limit)
        return length

    def overlaps(self, length: int) -> bool:
        """Return true if the draft model should work while the target verifies ``length`` tokens.

        Where that is measured, some rounds do the opposite, so that both times stay known. With
        many requests in flight there is no overlap: drafts in vain would slow other requests.
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

    def add_round(self, num_drafted: int, num_accepted: int, generated: int) -> None:
        """Learn from a round that ended at ``generated`` tokens."""
        self._acceptance.add(num_drafted, num_accepted)
        self._shared.model_acceptance.add(num_drafted, num_accepted)
        if self._pause == 0:
            return
        if self._fastest_length(max(1, self.limit())):
            self._pause = 0
        else:
            self._begin_pause(generated, PAUSE_TOKENS.after(self._pause))

    def _fastest_length(self, limit: int) -> int:
        """Return the length with the most tokens per second, and note that ``speed``."""
        rates = repeat(self._acceptance.rate)
        length, self.speed = self._shared.best_length(rates, limit, by_model=True)
        return length

    def _begin_pause(self, generated: int, tokens: int) -> None:
        self._pause = tokens
        self.paused_until = generated + tokens
