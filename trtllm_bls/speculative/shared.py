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

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from trtllm_bls.speculative.cost_model import Acceptance, RunningTimes
from trtllm_bls.speculative.memory import DraftMemory
from trtllm_bls.speculative.ngrams import NgramAcceptance
from trtllm_bls.types import EngineCapacity

DRAFT_COOL_DOWN_S = 5.0
FIRST_LENGTH = 2  # of a draft, before any cost is known
# Of a round over plain decoding, for n-grams, which nearly always match somewhere. Asking for less
# makes twice as many rounds, each with CPU of its own, for 1 % in all.
NGRAM_GAIN = 1.1


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
    answers of each tenant.
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
    memories: dict[str, DraftMemory] = field(default_factory=dict)
    overlap_rounds: int = 0
    pauses: int = 0
    _draft_off_until: float = 0.0

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

    def memory(self, tenant: str | None, tokens: int) -> DraftMemory | None:
        """The finished answers of ``tenant``, at most ``tokens``; ``None`` without either."""
        if tenant is None or not tokens:
            return None
        return self.memories.setdefault(tenant, DraftMemory(tokens))

    def draft_usable(self, now: float) -> bool:
        return not self.draining and now >= self._draft_off_until

    def pause_draft(self, now: float, *, for_ever: bool = False) -> None:
        """Ask the draft nothing for a while, so that not every request waits for its deadline."""
        self._draft_off_until = float("inf") if for_ever else now + DRAFT_COOL_DOWN_S
