"""What requests learn from one another: times, acceptance, the health of the draft engine.

One object per pair of engines, long-lived, on one event loop. Owns no engine and no clock: times
are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_bls.speculative.cost_model import Acceptance, Costs, RunningTimes
from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import EngineCapacity

DRAFT_COOL_DOWN_S = 5.0


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

    def costs(self, source: DraftSource) -> Costs:
        drafting = self.draft_times if source is DraftSource.MODEL else None
        return Costs(drafting, self.verify_times, self.overhead_times, self.plain_times)

    def draft_usable(self, now: float) -> bool:
        return not self.draining and now >= self._draft_off_until

    def pause_draft(self, now: float, *, for_ever: bool = False) -> None:
        """Ask the draft nothing for a while, so that not every request waits for its deadline."""
        self._draft_off_until = float("inf") if for_ever else now + DRAFT_COOL_DOWN_S
