"""How many tokens the draft model drafts in each round of one request: a fixed number, or what pays
off at this load.

Owns the request's own acceptance rate and its pauses from drafting. Knows no engine and no clock.
"""

from __future__ import annotations

from itertools import repeat

from trtllm_bls.speculative.cost_model import Acceptance, most_at_load
from trtllm_bls.speculative.options import SpeculationOptions
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


class DraftLength:
    """How many tokens to draft next, within what options and engine allow.

    ``paused_until``: the number of generated tokens before which ``length`` stays 0. ``speed``:
    tokens per second by the length that was chosen last; infinite until that has been measured.
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
        most = options.max_draft_tokens
        self._ceiling = most if engine_most is None else min(most, engine_most)

    @property
    def never(self) -> bool:
        """Whether no draft is ever allowed."""
        return self._ceiling < 1 or self._options.num_draft_tokens == 0

    def most(self) -> int:
        """The longest draft allowed at this load, of any source, whatever it is worth."""
        fixed = self._options.num_draft_tokens
        if fixed is not None:
            return min(fixed, self._ceiling)
        return min(self._ceiling, most_at_load(self._options.load_schedule, self._shared.in_flight))

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
            self._rest(generated, EARLY_PAUSE if early else FIRST_PAUSE)
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
            self._rest(generated, min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE))

    def _best(self, most: int) -> int:
        rates = repeat(self._acceptance.rate)
        best, self.speed = self._shared.best_length(rates, most, by_model=True)
        return best

    def _rest(self, generated: int, tokens: int) -> None:
        self._pause = tokens
        self.paused_until = generated + tokens
