"""What requests learn from one another: times, acceptance, the health of the draft engine; and the
best length of a draft, which follows from them.

If each token is accepted with probability a, a draft of k tokens yields E = 1 + a + ... + a^k
tokens on average, in the time of k drafted tokens, one verification and the overhead of a round.
The length with the most tokens per second wins; length 0 wins where plain decoding is faster.

One object per pair of engines, long-lived, on one event loop. Owns no engine and no clock: times
are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_bls.speculative.cost_model import Acceptance, RunningTimes
from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import EngineCapacity

DRAFT_COOL_DOWN_S = 5.0
FIRST_LENGTH = 2  # of a draft, before any cost is known


@dataclass
class SpeculationShared:
    """Measured seconds, acceptance per source, and whether the draft may be asked.

    ``one_step`` tells whether the target ends every request after one step, as engines built for
    external drafts do; ``None`` until it is known. ``overlapped_times`` are of verifications beside
    which the draft model worked, ``verify_times`` of the others; ``overlap_rounds`` counts both.
    ``sending`` counts the requests of ``in_flight`` that will send further engine requests. Once
    ``draining`` is set, each sends one more: a plain one, for all that is left of its answer.
    ``pauses`` counts the requests that have stopped drafting for a while.
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
    rates: dict[DraftSource, Acceptance] = field(
        default_factory=lambda: {source: Acceptance() for source in DraftSource}
    )
    overlap_rounds: int = 0
    pauses: int = 0
    _draft_off_until: float = 0.0

    def best_length(self, source: DraftSource, rate: float, most: int) -> int:
        """The draft length in ``0 .. most`` with the most expected tokens per second."""
        draft = self.draft_times if source is DraftSource.MODEL else None
        verify = self.verify_times.at(0)
        drafting = 0.0 if draft is None else draft.at(1)
        if verify is None or drafting is None:
            return min(most, FIRST_LENGTH)
        plain = self.plain_times.at(0)
        best, fastest = 0, 1.0 / max(plain if plain is not None else verify, 1e-9)
        overhead, expected = self.overhead_times.at(0) or 0.0, 1.0
        for length in range(1, most + 1):
            expected += rate**length
            seconds = (draft.at(length) or 0.0) if draft else 0.0
            seconds += (self.verify_times.at(length) or 0.0) + overhead
            if expected > fastest * seconds:
                best, fastest = length, expected / max(seconds, 1e-9)
        return best

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

    def draft_usable(self, now: float) -> bool:
        return not self.draining and now >= self._draft_off_until

    def pause_draft(self, now: float, *, for_ever: bool = False) -> None:
        """Ask the draft nothing for a while, so that not every request waits for its deadline."""
        self._draft_off_until = float("inf") if for_ever else now + DRAFT_COOL_DOWN_S
