"""Drafts from n-grams: what followed when the answer's last tokens stood somewhere before.

Three kinds of text are searched: the request's own, a text that the caller expects the answer to
resemble, and finished answers (``DraftMemory``). A draft continues the longest match. The chance
that each of its tokens is right comes from how often drafts of such matches were right. Every
proposal is compared with the tokens that came in its place. This also happens while the target
decodes plainly, so that no draft has to be verified in vain to learn it. N-grams cost no model and
no request.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import TokenIds

ORDER = 3  # tokens that a match has; if there is no such match, one token is enough
_MAX_ORDER = 24  # a longer match is no more likely to go on
_MAX_PLACES = 16  # latest places that are compared; more change little and cost time
_INDEXED_AT_ONCE = 4096  # tokens that are indexed at once, about 2 ms
TIME_TO_LIVE_S = 3600.0  # for finished answers
MEMORY_BYTES = 1 << 28  # for the finished answers of all tenants, with their indexes

_DECAY = 0.97  # a guessed token weighs this much less after each later one: about 33 count
# The prior is light, so that the first answer of a process finds out whether drafts pay, and loses
# little if they do not.
_PRIOR_WEIGHT = 3.0  # guessed tokens that the prior counts for


class Acceptance:
    """The chance that one more drafted token is accepted; older rounds weigh less."""

    def __init__(self, prior: float = 0.5) -> None:
        self._hits = prior * _PRIOR_WEIGHT
        self._trials = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._hits / self._trials

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round. The target never judged the tokens after the first that it rejected."""
        trials = min(num_drafted, num_accepted + 1)
        decay = _DECAY**trials
        self._hits = self._hits * decay + num_accepted
        self._trials = self._trials * decay + trials


# A kind of drafted token: source, length of the match, agreement of the places that match, and the
# token's place in the draft; the numbers are in classes.
_Kind: TypeAlias = tuple[DraftSource, int, int, int]
NgramAcceptance: TypeAlias = dict[_Kind, Acceptance]


def num_equal(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that both sequences share."""
    count = 0
    for token, other_token in zip(ids, other_ids, strict=False):
        if token != other_token:
            break
        count += 1
    return count


class NgramIndex:
    """The places of every n-gram of ``ids``, which may only grow: hash chains, latest first.

    A place is the number of tokens up to the end of the n-gram. ``expected_length`` of ``ids``, in
    tokens, sizes the hash tables.
    """

    def __init__(self, ids: Sequence[int], source: DraftSource, expected_length: int) -> None:
        self.ids = ids
        self.source = source
        slots = 1 << max(12, expected_length.bit_length())
        self._mask = slots - 1
        # For each order of n-gram: the latest place of each hash, and the place that had the hash
        # before, by place.
        self._heads = {order: array("i", bytes(4 * slots)) for order in (1, ORDER)}
        self._previous = {order: array("i", (0,)) for order in (1, ORDER)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the ids and of their places: four for each."""
        return 4 * sum(map(len, (self.ids, *self._heads.values(), *self._previous.values())))

    def extend(self) -> None:
        """Index the new ids; only the first of them if all would take long."""
        ids = self.ids
        mask = self._mask
        single_heads = self._heads[1]
        triple_heads = self._heads[ORDER]
        previous_single = self._previous[1]
        previous_triple = self._previous[ORDER]
        begin = len(previous_single)
        if begin >= len(ids):
            return
        two_back = ids[begin - 3] if begin >= 3 else 0
        one_back = ids[begin - 2] if begin >= 2 else 0
        for place in range(begin, min(len(ids), begin + _INDEXED_AT_ONCE)):
            current = ids[place - 1]
            slot = current & mask
            previous_single.append(single_heads[slot])
            single_heads[slot] = place
            slot = _hash(two_back, one_back, current) & mask
            previous_triple.append(triple_heads[slot])
            triple_heads[slot] = place
            two_back = one_back
            one_back = current

    def places(self, tail: Sequence[int], order: int) -> list[int]:
        """Return the latest places of the last ``order`` tokens of ``tail``."""
        if order == 1:
            return self._places_of_one(tail[-1])
        ids = self.ids
        previous = self._previous[ORDER]
        two_back, one_back, current = tail[-ORDER:]
        place = self._heads[ORDER][_hash(two_back, one_back, current) & self._mask]
        places = []
        for _ in range(_MAX_PLACES):
            if not place:
                break
            if (
                ids[place - 1] == current
                and ids[place - 2] == one_back
                and ids[place - 3] == two_back
            ):
                places.append(place)
            place = previous[place]
        return places

    def _places_of_one(self, token: int) -> list[int]:
        ids = self.ids
        previous = self._previous[1]
        place = self._heads[1][token & self._mask]
        places = []
        for _ in range(_MAX_PLACES):
            if not place:
                break
            if ids[place - 1] == token:
                places.append(place)
            place = previous[place]
        return places


def _hash(two_back: int, one_back: int, current: int) -> int:
    return two_back * 40503 + one_back * 30011 + current


class _Match(NamedTuple):
    """A place of ``text`` that the answer's last ``length`` tokens match.

    ``agreement``: how many of the other places have the same next token, in classes.
    """

    length: int
    place: int
    text: NgramIndex
    agreement: int = 0

    def acceptance(self, by_kind: NgramAcceptance, offset: int) -> Acceptance:
        """Return the acceptance of the draft's token at ``offset``, made if it is the first."""
        length = self.length.bit_length()
        offset_class = offset.bit_length()
        kind = self.text.source, length, self.agreement, offset_class
        acceptance = by_kind.get(kind)
        if acceptance is None:
            # The prior is higher the more has matched.
            hits = length + offset_class + 1
            acceptance = Acceptance(hits / (hits + 2))
            by_kind[kind] = acceptance
        return acceptance


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
        self._match: _Match | None = None  # the one that the last proposal continued
        self._proposal_begin = 0  # place in ``ids``
        self._proposal: TokenIds = ()

    def propose(
        self, limit: int, *, fixed: bool = False, model_speed: float = 0.0
    ) -> tuple[DraftSource, TokenIds] | None:
        """Return up to ``limit`` tokens and their source; ``None`` if none are worth a round.

        ``fixed``: propose ``limit`` tokens wherever ``ORDER`` tokens match. ``model_speed``:
        tokens per second with the draft model's drafts.
        """
        continuation = self._learn()
        for text in self._texts:
            text.extend()
        match = self._longest_match() or continuation
        if match is None or limit < 1:
            self._match = None
            return None
        self._match = match
        count = 0
        if not fixed:
            rates: list[float] = []  # by the class of a token's offset
            for offset_class in range(limit.bit_length() + 1):
                offset = 1 << offset_class >> 1
                rates.append(match.acceptance(self._acceptance, offset).rate)
            rate_by_token = (rates[offset.bit_length()] for offset in range(limit))
            count, _ = self._best_length(rate_by_token, limit, rival_speed=model_speed)
        elif match.length >= ORDER:
            count = limit
        self._proposal_begin = len(self._ids)
        # Without a draft, one token is compared with the target's, to learn from.
        length = max(1, count)
        # A match that reaches the end of its text goes on with its own proposal, so that a
        # repeating text is drafted at full length.
        following = tuple(match.text.ids[match.place : match.place + length])
        repeated = following * (count // len(following) + 1)
        self._proposal = repeated[:length]
        if not count:
            return None
        return match.text.source, self._proposal

    def _learn(self) -> _Match | None:
        """Compare the last proposal with the tokens that came in its place.

        Where one token came in place of another, the text may go on as before. Return the match
        that this would be, of no token.
        """
        match = self._match
        if match is None:
            return None
        new = self._ids[self._proposal_begin :]
        num_right = num_equal(self._proposal, new)
        num_tried = min(len(self._proposal), len(new))
        # The tokens of one class lie from ``begin`` to ``end``.
        begin = 0
        end = 1
        while begin < num_tried and begin <= num_right:
            acceptance = match.acceptance(self._acceptance, begin)
            acceptance.add(min(end, num_tried) - begin, min(end, num_right) - begin)
            begin = end
            end *= 2
        place = match.place + num_right + 1
        one_wrong = num_right < num_tried and num_right + 1 == len(new)
        if one_wrong and place < len(match.text.ids):
            return _Match(0, place, match.text)
        return None

    def _longest_match(self) -> _Match | None:
        tail = self._ids[-_MAX_ORDER:]
        for order in (ORDER, 1):
            if len(tail) < order:
                continue
            longest: tuple[NgramIndex, int] | None = None
            length = order - 1
            following: list[int] = []
            for text in self._texts:
                ids = text.ids
                for place in text.places(tail, order):
                    following.append(ids[place])
                    limit = min(place, len(tail))
                    # Few places match further than the longest; one token tells most of them.
                    if length < limit and ids[place - 1 - length] == tail[-1 - length]:
                        longer = order
                        while longer < limit and ids[place - 1 - longer] == tail[-1 - longer]:
                            longer += 1
                        if longer > length:
                            longest = text, place
                            length = longer
            if longest is not None:
                text, place = longest
                num_places = len(following)
                num_agreeing = following.count(text.ids[place])
                agreement = (num_places > 1) + (num_agreeing < num_places)
                agreement += 2 * num_agreeing < num_places
                return _Match(length, place, text, agreement)
        return None


class _Generation(NamedTuple):
    """Answers of one tenant that were remembered from ``since`` on, and are forgotten together."""

    since: float
    ids: array[int]
    text: NgramIndex


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
        self.num_bytes = 0  # answers and indexes, when an answer was last added
        self._generation_tokens = tokens // 2
        self._generations: list[_Generation] = []  # the newer first

    def texts(self, now: float) -> list[NgramIndex]:
        """Return the texts to draft from, the newer first; forget those too old.

        Nothing in them is ``TIME_TO_LIVE_S`` old.
        """
        young = []
        for generation in self._generations:
            if now < generation.since + TIME_TO_LIVE_S:
                young.append(generation)
        self._generations = young
        return [generation.text for generation in young]

    def add(self, answer: Sequence[int], now: float) -> None:
        """Remember an answer, or its end if it has more tokens than a generation."""
        limit = self._generation_tokens
        answer = answer[max(0, len(answer) - limit) :]
        texts = self.texts(now)
        full = not texts or len(texts[0].ids) + len(answer) > limit
        if full or now >= self._generations[0].since + TIME_TO_LIVE_S / 2:
            ids = array("i")
            index = NgramIndex(ids, DraftSource.NGRAM, limit)
            self._generations = [_Generation(now, ids, index), *self._generations[:1]]
        newer = self._generations[0]
        newer.ids.extend(answer)
        newer.text.extend()
        self.num_bytes = sum(generation.text.num_bytes for generation in self._generations)


class DraftMemories:
    """The memory of each tenant, the least lately used first.

    A memory goes when nothing in it is younger than ``TIME_TO_LIVE_S``, and while all together take
    more than ``max_bytes``.
    """

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._memories: OrderedDict[str, DraftMemory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, tenant: str | None, tokens: int) -> DraftMemory | None:
        """Return the memory of ``tenant`` for so many tokens; ``None`` without either."""
        if tenant is None or not tokens:
            return None
        memory = self._memories.setdefault(tenant, DraftMemory(tokens))
        self._memories.move_to_end(tenant)
        return memory

    def add(self, memory: DraftMemory, answer: Sequence[int], now: float) -> None:
        """Remember an answer in one of the memories, and forget what is old or too much."""
        old_bytes = memory.num_bytes
        memory.add(answer, now)
        # A memory that others displaced while its request ran counts no more.
        if memory in self._memories.values():
            self._num_bytes += memory.num_bytes - old_bytes
        for tenant, oldest in list(self._memories.items()):
            if self._num_bytes <= self._max_bytes and oldest.texts(now):
                break
            self._num_bytes -= oldest.num_bytes
            del self._memories[tenant]
