"""Drafts from n-grams: what followed when the answer's last tokens stood somewhere before.

The texts that are searched are the request's own, one that the caller expects the answer to
resemble, and finished answers (``DraftMemory``). The longest match is continued. How likely each
of its tokens is comes from how often drafts of such matches were right. Every proposal is compared
with the tokens that came in its place, also while the target decodes plainly, so that nothing has
to be drafted in vain to learn it. Costs no model and no request.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import TokenIds

ORDER = 3  # tokens that a match has; where there is none, one is enough
_MAX_ORDER = 24  # beyond this, a longer match says nothing more
_MAX_PLACES = 16  # latest places that are compared; more change little and cost time
_INDEXED_AT_ONCE = 4096  # tokens that are indexed at once, about 2 ms
TIME_TO_LIVE_S = 3600.0  # of finished answers
MEMORY_BYTES = 1 << 28  # of the finished answers of all tenants, with their indexes

_DECAY = 0.97  # weight kept per guessed token: about the last 33 count
# Small, so that the first answer of a process finds out whether drafts pay and loses little if they
# do not.
_PRIOR_WEIGHT = 3.0  # guessed tokens that the prior counts for


class Acceptance:
    """The chance that one more drafted token is accepted, remembered for a while."""

    def __init__(self, prior: float = 0.5) -> None:
        self._hits = prior * _PRIOR_WEIGHT
        self._trials = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._hits / self._trials

    def add(self, drafted: int, accepted: int) -> None:
        """A round accepted so many; only the first refused token was a trial, the rest unseen."""
        trials = min(drafted, accepted + 1)
        kept = _DECAY**trials
        self._hits = self._hits * kept + accepted
        self._trials = self._trials * kept + trials


# What drafted tokens are told apart by: source, length of the match, whether the places that match
# agree, and the token's place in the draft; numbers are in classes.
_Kind: TypeAlias = tuple[DraftSource, int, int, int]
NgramAcceptance: TypeAlias = dict[_Kind, Acceptance]


class NgramIndex:
    """The places of every n-gram of ``ids``, which may only grow: hash chains, latest first.

    A place is the number of tokens up to the end of the n-gram. ``most``: tokens that are expected.
    """

    def __init__(self, ids: Sequence[int], source: DraftSource, most: int) -> None:
        self.ids, self.source = ids, source
        slots = 1 << max(12, most.bit_length())
        self._mask = slots - 1
        # By the order of n-gram: the latest place of each hash, and the place before each place.
        self._heads = {order: array("i", bytes(4 * slots)) for order in (1, ORDER)}
        self._before = {order: array("i", (0,)) for order in (1, ORDER)}

    @property
    def num_bytes(self) -> int:
        """Of the ids and their places, four each."""
        return 4 * sum(map(len, (self.ids, *self._heads.values(), *self._before.values())))

    def extend(self) -> None:
        """Index what is new, or the first part of it if that would take long."""
        ids, mask = self.ids, self._mask
        (one, three), (before_one, before_three) = self._heads.values(), self._before.values()
        if (begin := len(before_one)) >= len(ids):
            return
        first, second = (ids[place] if place >= 0 else 0 for place in (begin - 3, begin - 2))
        for place in range(begin, min(len(ids), begin + _INDEXED_AT_ONCE)):
            third = ids[place - 1]
            slot = third & mask
            before_one.append(one[slot])
            one[slot] = place
            slot = _hash(first, second, third) & mask
            before_three.append(three[slot])
            three[slot] = place
            first, second = second, third

    def places(self, tail: Sequence[int], order: int) -> list[int]:
        """The latest places of the last ``order`` tokens of ``tail``."""
        ids, before, places = self.ids, self._before[order], []
        first, second, third = tail[-ORDER:] if order == ORDER else (0, 0, tail[-1])
        slot = third if order == 1 else _hash(first, second, third)
        place = self._heads[order][slot & self._mask]
        for _ in range(_MAX_PLACES):
            if not place:
                break
            if ids[place - 1] == third and (
                order == 1 or (ids[place - 2] == second and ids[place - 3] == first)
            ):
                places.append(place)
            place = before[place]
        return places


def _hash(first: int, second: int, third: int) -> int:
    return first * 40503 + second * 30011 + third


class _Match(NamedTuple):
    """A place of ``text``. ``agreement`` of the other places' next tokens with its own, in
    classes."""

    length: int
    place: int
    text: NgramIndex
    agreement: int = 0

    def acceptance(self, of: NgramAcceptance, offset: int) -> Acceptance:
        """That of the draft's token at ``offset``."""
        length, place = self.length.bit_length(), offset.bit_length()
        right = length + place + 1  # of the prior, which is higher the more has matched
        kind = self.text.source, length, self.agreement, place
        return of.get(kind) or of.setdefault(kind, Acceptance(right / (right + 2)))


class NgramDrafts:
    """Proposes what may come next in ``ids``, which may only grow, from ``texts``.

    ``best_length``: ``SpeculationShared``'s. ``acceptance`` may be shared by requests.
    """

    def __init__(
        self,
        ids: Sequence[int],
        texts: Sequence[NgramIndex],
        acceptance: NgramAcceptance,
        best_length: Callable[..., tuple[int, float]],
    ) -> None:
        self._ids = ids
        self._texts = texts
        self._acceptance = acceptance
        self._best_length = best_length
        self._match: _Match | None = None  # of the last proposal
        self._end = 0  # where that proposal begins
        self._proposed: TokenIds = ()

    def propose(
        self, most: int, *, fixed: bool = False, beside: float = 0.0
    ) -> tuple[DraftSource, TokenIds] | None:
        """Up to ``most`` tokens and where they come from; ``None`` if none are worth a round.

        ``fixed``: as many as that wherever ``ORDER`` tokens match. ``beside``: tokens per second
        that the draft model gives.
        """
        replaced = self._learn()
        for text in self._texts:
            text.extend()
        match = self._match = self._longest() or replaced
        if match is None or most < 1:
            self._match = None
            return None
        count = most if match.length >= ORDER else 0
        if not fixed:
            classes = [1 << kind >> 1 for kind in range(most.bit_length() + 1)]
            rates = [match.acceptance(self._acceptance, offset).rate for offset in classes]
            each = (rates[n.bit_length()] for n in range(most))
            count, _ = self._best_length(each, most, beside=beside)
        self._end = len(self._ids)
        # A match that reaches the end of its text goes on with its own proposal, so that a
        # repeating text is drafted at full length.
        following = tuple(match.text.ids[match.place : match.place + max(1, count)])
        repeated = following * (count // len(following) + 1)
        self._proposed = repeated[: max(1, count)]
        return (match.text.source, self._proposed) if count else None

    def _learn(self) -> _Match | None:
        """Compare the last proposal with what has come. Where one token came in place of another,
        the text may go on as before: the match that this would be, of no token."""
        if (match := self._match) is None:
            return None
        new = self._ids[self._end :]
        pairs = zip(self._proposed, new, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        tried, begin, end = min(len(self._proposed), len(new)), 0, 1
        while begin < tried and begin <= right:  # of each class of places in the draft
            acceptance = match.acceptance(self._acceptance, begin)
            acceptance.add(min(end, tried) - begin, min(end, right) - begin)
            begin, end = end, 2 * end
        place = match.place + right + 1
        if right < tried and right + 1 == len(new) and place < len(match.text.ids):
            return _Match(0, place, match.text)
        return None

    def _longest(self) -> _Match | None:
        tail = self._ids[-_MAX_ORDER:]
        for order in (ORDER, 1):
            if len(tail) < order:
                continue
            best, length = None, order - 1
            following: list[int] = []
            for text in self._texts:
                ids = text.ids
                for place in text.places(tail, order):
                    following.append(ids[place])
                    most = min(place, len(tail))
                    # Most places do not match further than the best one, which one look tells.
                    if length < most and ids[place - 1 - length] == tail[-1 - length]:
                        longer = order
                        while longer < most and ids[place - 1 - longer] == tail[-1 - longer]:
                            longer += 1
                        if longer > length:
                            best, length = (text, place), longer
            if best is not None:
                text, place = best
                places, agree = len(following), following.count(text.ids[place])
                agreement = (places > 1) + (agree < places) + (2 * agree < places)
                return _Match(length, place, text, agreement)
        return None


class DraftMemory:
    """Finished answers of one tenant, to draft from in the tenant's later requests.

    They stay in this process's memory, and nothing but a draft is ever made of them. What a draft
    gained shows in the figures of the request that it was made for, so requests of one tenant may
    find out what its other requests were answered, and those of another tenant may not. The
    acceptance is kept here for the same reason.

    Up to ``tokens`` tokens, in two generations: when the newer is full, the older is forgotten.
    ``now`` is seconds of any clock.
    """

    def __init__(self, tokens: int) -> None:
        self.ngram_acceptance: NgramAcceptance = {}
        self.num_bytes = 0  # of answers and indexes, after the last one was added
        self._most = tokens // 2  # of a generation
        self._generations: list[tuple[float, array[int], NgramIndex]] = []

    def texts(self, now: float) -> list[NgramIndex]:
        """What may be drafted from, the newer first; nothing of it is ``TIME_TO_LIVE_S`` old."""
        known = self._generations = [
            generation for generation in self._generations if now < generation[0] + TIME_TO_LIVE_S
        ]
        return [index for _, _, index in known]

    def add(self, answer: Sequence[int], now: float) -> None:
        """Remember an answer, or its end if it has more tokens than a generation."""
        answer, known = answer[max(0, len(answer) - self._most) :], self.texts(now)
        full = not known or len(known[0].ids) + len(answer) > self._most
        if full or now >= self._generations[0][0] + TIME_TO_LIVE_S / 2:
            ids = array("i")
            newer = now, ids, NgramIndex(ids, DraftSource.NGRAM, self._most)
            self._generations = [newer, *self._generations[:1]]
        _, ids, index = self._generations[0]
        ids.extend(answer)
        index.extend()
        self.num_bytes = sum(generation.num_bytes for _, _, generation in self._generations)


class DraftMemories:
    """The memory of each tenant, the least lately used first.

    A memory goes when nothing in it is younger than ``TIME_TO_LIVE_S``, and while all together take
    more than ``most_bytes``.
    """

    def __init__(self, most_bytes: int = MEMORY_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._memories: OrderedDict[str, DraftMemory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, tenant: str | None, tokens: int) -> DraftMemory | None:
        """The memory of ``tenant`` for so many tokens; ``None`` without either."""
        if tenant is None or not tokens:
            return None
        memory = self._memories.setdefault(tenant, DraftMemory(tokens))
        self._memories.move_to_end(tenant)
        return memory

    def add(self, memory: DraftMemory, answer: Sequence[int], now: float) -> None:
        """Remember an answer in one of the memories, and forget what is old or too much."""
        before = memory.num_bytes
        memory.add(answer, now)
        if memory in self._memories.values():  # else others took its place meanwhile
            self._bytes += memory.num_bytes - before
        for tenant, oldest in list(self._memories.items()):
            if self._bytes <= self._most_bytes and oldest.texts(now):
                break
            self._bytes -= oldest.num_bytes
            del self._memories[tenant]
