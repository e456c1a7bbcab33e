"""Drafts from the text itself: what followed when these same tokens stood here before.

Costs no model and no request. Owns an index of one sequence's n-grams; grows as the sequence does.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_bls.types import TokenIds

_CANDIDATES = 16  # latest earlier places that are compared; more changes little and costs time


class PromptLookup:
    """Finds the longest earlier match of a sequence's tail, at least ``min_match`` tokens long.

    ``ids`` is the living sequence (prompt and answer); it may only ever grow.
    """

    def __init__(self, ids: Sequence[int], min_match: int) -> None:
        self._ids = ids
        self._size = min_match
        self._ends: dict[TokenIds, list[int]] = {}  # n-gram -> places right after it, ascending
        self._indexed = min_match

    def propose(self, count: int) -> TokenIds:
        """Up to ``count`` ids that may come next; none without a match.

        A match that reaches the end goes on with its own proposal, so that a repeating text is
        drafted at full length.
        """
        ids, size = self._ids, self._size
        self._index()
        places = self._ends.get(tuple(ids[len(ids) - size :]), ()) if len(ids) > size else ()
        if not places or count < 1:
            return ()
        start = max(reversed(places[-_CANDIDATES:]), key=self._match_length)
        period = len(ids) - start
        return tuple(ids[start + offset % period] for offset in range(count))

    def _index(self) -> None:
        """Note every n-gram that has a successor; the tail itself has none yet."""
        ids, size = self._ids, self._size
        for end in range(self._indexed, len(ids)):
            self._ends.setdefault(tuple(ids[end - size : end]), []).append(end)
        self._indexed = max(self._indexed, len(ids))

    def _match_length(self, end: int) -> int:
        ids, length = self._ids, self._size
        longest = min(end, 4 * self._size)  # beyond this, a longer match says nothing more
        while length < longest and ids[end - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        return length
