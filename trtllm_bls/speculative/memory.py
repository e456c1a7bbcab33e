"""Finished answers of one tenant, to draft from in the tenant's later requests.

They stay in this process's memory, and nothing but a draft is ever made of them. What a draft
gained shows in the figures of the request that it was made for, so requests of one tenant may find
out what its other requests were answered, and those of another tenant may not. ``NgramAcceptance``
is kept here for the same reason.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from trtllm_bls.speculative.ngrams import NgramAcceptance, NgramIndex
from trtllm_bls.speculative.options import DraftSource

TIME_TO_LIVE_S = 3600.0


class DraftMemory:
    """Up to ``tokens`` tokens, in two generations: when the newer is full, the older is forgotten.

    ``now`` is seconds of any clock.
    """

    def __init__(self, tokens: int) -> None:
        self.acceptance: NgramAcceptance = {}
        self._most = tokens // 2  # of a generation
        self._generations: list[tuple[float, array[int], NgramIndex]] = []

    def texts(self, now: float) -> list[NgramIndex]:
        """What may be drafted from, the newer first; nothing of it is ``TIME_TO_LIVE_S`` old."""
        known = self._generations = [
            each for each in self._generations if now < each[0] + TIME_TO_LIVE_S
        ]
        return [index for _, _, index in known]

    def add(self, answer: Sequence[int], now: float) -> None:
        """Remember an answer, or its end if it has more tokens than a generation."""
        answer, known = answer[-self._most :], self.texts(now)
        full = not known or len(known[0].ids) + len(answer) > self._most
        if full or now >= self._generations[0][0] + TIME_TO_LIVE_S / 2:
            ids = array("i")
            newer = now, ids, NgramIndex(ids, DraftSource.NGRAM, self._most)
            self._generations = [newer, *self._generations[:1]]
        _, ids, index = self._generations[0]
        ids.extend(answer)
        index.extend()
