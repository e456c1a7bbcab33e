"""The draft length of each round of one request: fixed, or what pays off at this load.

Owns the request's own acceptance rates and its pauses from drafting. Knows no engine and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_bls.speculative.cost_model import Acceptance, most_at_load
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.speculative.shared import SpeculationShared

FIRST_PAUSE = 64  # plain tokens before drafting is tried again; doubles while it does not pay
LONGEST_PAUSE = 256
# One pausing request in 8 drafts again after 16 tokens. Otherwise answers shorter than the pause
# would never show that drafting has begun to pay.
EARLY_INTERVAL, EARLY_PAUSE = 8, 16
# Measuring overlap takes rounds with and without it. Of the first 8 rounds every second one
# overlaps; later, one round in 16 does the opposite of the better choice.
TRIAL_ROUNDS, TRIAL_INTERVAL = 8, 16
PROBE = 2  # tokens drafted to see whether acceptance has changed


@dataclass
class _SourceState:
    """Of one draft source, in one request."""

    rate: Acceptance
    pause: int = 0  # length of the current or last pause; 0: none since drafting paid off
    paused_until: int = 0  # generated tokens


class DraftLength:
    """How many tokens each source drafts next, within what options and engine allow."""

    def __init__(self, options: SpeculationOptions, shared: SpeculationShared) -> None:
        self._options = options
        self._shared = shared
        self._sources = {
            source: _SourceState(Acceptance(shared.rates[source].rate)) for source in DraftSource
        }
        capacity = shared.target_capacity
        engine_most = capacity.max_draft_tokens if capacity else None
        most = options.max_draft_tokens
        self._ceiling = most if engine_most is None else min(most, engine_most)

    @property
    def never(self) -> bool:
        """Whether no draft is ever allowed."""
        return self._ceiling < 1 or self._options.num_draft_tokens == 0

    def most(self) -> int:
        """The longest draft allowed at this load, whatever it is worth."""
        fixed = self._options.num_draft_tokens
        if fixed is not None:
            return min(fixed, self._ceiling)
        return min(self._ceiling, most_at_load(self._options.load_schedule, self._shared.in_flight))

    def length(self, source: DraftSource, generated: int, room: int) -> int:
        """Tokens to draft after ``generated`` ones, at most ``room``; 0 = decode plainly."""
        most = min(room, self.most())
        own = self._sources[source]
        if most < 1 or generated < own.paused_until:
            return 0
        if self._options.num_draft_tokens is not None:
            return most
        best = self._shared.best_length(source, own.rate.rate, most)
        if best == 0 and own.pause == 0:
            early = self._shared.pauses % EARLY_INTERVAL == 0
            self._shared.pauses += 1
            self._pause(own, generated, EARLY_PAUSE if early else FIRST_PAUSE)
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
        if shared.in_flight > max(self._options.load_schedule[0][0], 1):
            return False
        shared.overlap_rounds += 1
        if shared.overlap_rounds <= TRIAL_ROUNDS:
            return shared.overlap_rounds % 2 == 0
        gains = shared.overlap_gains(self._sources[DraftSource.MODEL].rate.rate, length)
        return bool(gains) != (shared.overlap_rounds % TRIAL_INTERVAL == 0)

    def paused_until(self, source: DraftSource) -> int:
        """The number of generated tokens before which ``length`` stays 0."""
        return self._sources[source].paused_until

    def add_round(self, source: DraftSource, drafted: int, accepted: int, generated: int) -> None:
        """Learn from a round that ended at ``generated`` tokens."""
        own = self._sources[source]
        own.rate.add(drafted, accepted)
        self._shared.rates[source].add(drafted, accepted)
        if own.pause == 0:
            return
        if self._shared.best_length(source, own.rate.rate, max(1, self.most())):
            own.pause = 0
        else:
            self._pause(own, generated, min(max(2 * own.pause, FIRST_PAUSE), LONGEST_PAUSE))

    @staticmethod
    def _pause(own: _SourceState, generated: int, tokens: int) -> None:
        own.pause = tokens
        own.paused_until = generated + tokens
