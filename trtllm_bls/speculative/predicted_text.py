"""Drafts from a text that the caller expects the answer to resemble: a file to be edited, say.

The answer is followed through the prediction token by token. Where it leaves it, the place is found
again by the last few tokens: nearby one will do, far away it takes several. Where it had been
followed for a while, a token in place of another is assumed until then, for a few tokens.
Costs no model and no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_bls.types import TokenIds

# How many tokens must match at a place, by its distance ahead of where the prediction was left, in
# tokens. Places further ahead, or behind (text that was moved), need ``_FAR``.
_NEEDED = ((4, 1), (32, 2))
_FAR = 4
_CANDIDATES = 32  # places that are compared, each way
_ASSUMED = 2  # tokens for which a replacement of equal length is assumed
_FOLLOWED = 4  # tokens that were as predicted before that


class PredictedText:
    """Where an answer is in its ``prediction``.

    ``ids`` is the living sequence, of which the answer is what comes from now on; it may only grow.
    """

    def __init__(self, ids: Sequence[int], prediction: TokenIds) -> None:
        self._ids = ids
        self._prediction = prediction
        self._begin = self._read = len(ids)
        self._at = 0  # place of the next token, as far as known
        self._right = 0  # tokens in a row that were as predicted, up to where they ceased to be
        self._lost = 0  # tokens since then

    def propose(self, count: int) -> TokenIds:
        """Up to ``count`` ids that may come next; none where the place is unknown, and none before
        the answer has begun as the prediction does."""
        for end in range(self._read + 1, len(self._ids) + 1):
            self._follow(end)
        self._read = len(self._ids)
        if self._read == self._begin:
            return ()
        if self._lost and (self._lost > _ASSUMED or self._right < _FOLLOWED):
            return ()
        return self._prediction[self._at : self._at + count]

    def _follow(self, end: int) -> None:
        """Take the answer's token before ``end``."""
        if not self._lost and self._prediction[self._at : self._at + 1] == (self._ids[end - 1],):
            self._at, self._right = self._at + 1, self._right + 1
            return
        left = self._at - self._lost  # the first token that was not as predicted
        found = self._found(left, end)
        if found is None:
            self._at, self._lost = self._at + 1, self._lost + 1
        else:
            self._at, self._right, self._lost = found, 1, 0

    def _found(self, left: int, end: int) -> int | None:
        """The place after the nearest match of the answer's tail, ahead of ``left`` or behind."""
        for place in self._places(self._ids[end - 1], left, len(self._prediction)):
            needed = next((few for far, few in _NEEDED if place - left < far), _FAR)
            if self._matches(place, end, needed):
                return place + 1
        for place in self._places(self._ids[end - 1], 0, left):
            if self._matches(place, end, _FAR):
                return place + 1
        return None

    def _places(self, token: int, start: int, stop: int) -> list[int]:
        """Where ``token`` is in that part of the prediction; the first few places."""
        places: list[int] = []
        try:
            while len(places) < _CANDIDATES:
                start = self._prediction.index(token, start, stop) + 1
                places.append(start - 1)
        except ValueError:
            pass
        return places

    def _matches(self, place: int, end: int, needed: int) -> bool:
        """Whether the ``needed`` tokens up to ``place`` are the answer's last before ``end``."""
        if place + 1 < needed or end - self._begin < needed:
            return False
        predicted = self._prediction[place + 1 - needed : place + 1]
        return predicted == tuple(self._ids[end - needed : end])
