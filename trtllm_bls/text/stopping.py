"""The end of a completion: ``StopMatcher`` finds it in text, ``StoppingCriteria`` in token ids.

A stop string is matched after detokenisation, across any chunk border. The stop that *completes*
first wins, the longest of those that complete at the same character. Text leaves at once, except a
suffix that could still grow into a stop. So no part of a stop leaves, unless ``include`` is set.
This module knows nothing of tokenizers or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import EngineRequest, FinishReason, TokenIds

MAX_STOPS = 100
MAX_STOP_CHARS = 256


def check_words(field: str, words: Sequence[str], max_words: int, max_chars: int) -> None:
    """Raise ``InvalidRequest`` for too many words, and for one that is too long.

    Repeated words count: reading them costs as much as others.
    """
    if len(words) > max_words:
        raise InvalidRequest(field, f"{len(words)} words; at most {max_words} are allowed")
    length = max(map(len, words), default=0)
    if length > max_chars:
        problem = f"a word of {length} characters; at most {max_chars} are allowed"
        raise InvalidRequest(field, problem)


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the stops without empty and repeated ones. Raises ``InvalidRequest``."""
    check_words("stop_words", stops, MAX_STOPS, MAX_STOP_CHARS)
    return tuple(dict.fromkeys([stop for stop in stops if stop]))


def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    """Return every text that could still grow into a stop."""
    beginnings: set[str] = set()
    for stop in stops:
        beginnings.update(accumulate(stop[:-1]))
    return frozenset(beginnings)


# Requests with the same stops share their beginnings. Only short stops do: the beginnings of long
# ones take megabytes.
_CACHED_CHARS = 256
_cached_beginnings = lru_cache(maxsize=32)(_beginnings)


@dataclass(frozen=True)
class Cut:
    """Text that may leave now. ``stop``: the stop that completed and ended the text, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches the text of one sequence. Raises ``InvalidRequest`` for too many or too long stops.

    ``include`` keeps the completed stop in the text; otherwise the text ends before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = checked_stops(stops)
        if sum(map(len, self._stops)) <= _CACHED_CHARS:
            self._beginnings = _cached_beginnings(self._stops)
        else:
            self._beginnings = _beginnings(self._stops)
        self._first_characters = frozenset([stop[0] for stop in self._stops])
        self._max_length = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""

    @property
    def held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def feed(self, text: str, armed: bool = True) -> Cut:
        """Take the next text. While not ``armed``, a stop that completes in it does not count."""
        if not self._held and self._first_characters.isdisjoint(text):
            return Cut(text)  # nearly always: no stop begins here
        num_held = len(self._held)
        text = self._held + text
        if armed:
            spans: list[tuple[int, int]] = []  # end and begin of each stop that completes
            for stop in self._stops:
                # A stop that completed before, while it did not count, is not found again.
                begin = text.find(stop, max(0, num_held - len(stop) + 1))
                if begin >= 0:
                    spans.append((begin + len(stop), begin))
            if spans:
                end, begin = min(spans)  # the earliest end; of those, the longest stop
                self._held = ""
                if self._include:
                    return Cut(text[:end], text[begin:end])
                return Cut(text[:begin], text[begin:end])
        certain = max(0, len(text) - self._max_length + 1)
        while certain < len(text) and text[certain:] not in self._beginnings:
            certain += 1
        self._held = text[certain:]
        return Cut(text[:certain])

    def flush(self) -> str:
        """Return the text held back; for a sequence that ends without a stop."""
        held = self._held
        self._held = ""
        return held


class StoppingCriteria:
    """Decides where one sequence ends, from its token ids.

    An end id ends the sequence. It is no part of the output and is not counted, unless it is in
    ``kept_ids``. A stop sequence ends the sequence with its last id, which is part of the output.
    Both count only once the output has ``min_tokens`` tokens, the last id of the stop sequence
    included. Before that, an end id is a token like any other. TensorRT-LLM suppresses the one end
    id that it knows until then, so only end ids that it does not know come early. With
    ``max_tokens`` tokens the sequence ends.

    ``generated`` counts the tokens of the output. ``stop_sequence``: the stop sequence that ended
    the sequence; the longest, if several complete at once. Empty stop sequences are ignored.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        min_tokens: int | None = None,
        end_ids: Iterable[int | None] = (),
        kept_ids: Iterable[int] = (),
        stop_sequences: Iterable[TokenIds] = (),
    ) -> None:
        self.generated = 0
        self.stop_sequence: TokenIds | None = None
        self.max_tokens = max_tokens
        self._min_tokens = min_tokens or 0
        self._end_ids = frozenset(end_ids)
        self._kept_ids = frozenset(kept_ids)
        self._stops = frozenset(filter(None, stop_sequences))
        # The lengths of the stop sequences by their last id. Each length comes once, the longest
        # first.
        self._stop_lengths: dict[int, dict[int, None]] = {}
        for stop in sorted(self._stops, key=len, reverse=True):
            self._stop_lengths.setdefault(stop[-1], {})[len(stop)] = None
        self._ids: list[int] = []  # the output's ids, if there are stop sequences

    @classmethod
    def of(cls, request: EngineRequest, max_tokens: int | None = None) -> StoppingCriteria:
        """Return the criteria of a sequence of ``request``; ``max_tokens``: the room, if less."""
        if max_tokens is None:
            max_tokens = request.max_tokens
        return cls(
            max_tokens,
            min_tokens=request.sampling.min_tokens,
            end_ids=(request.end_id,),
            stop_sequences=request.stop_sequences,
        )

    @property
    def may_end(self) -> bool:
        """True where an end id would end the sequence now."""
        return self.generated >= self._min_tokens

    @property
    def may_stop(self) -> bool:
        """True where a stop string may complete in the text of the last token.

        As in vLLM, that is in text after ``min_tokens`` tokens.
        """
        return not self._min_tokens or self.generated > self._min_tokens

    def feed(self, ids: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """Return the leading ``ids`` that belong to the output, and the reason of the end.

        The reason is ``END_ID``, ``STOP``, ``LENGTH``, or ``None`` while the sequence goes on.
        """
        count = self.generated + len(ids)
        if count < self.max_tokens and not self._stops and self._end_ids.isdisjoint(ids):
            self.generated = count  # nearly every token
            return ids, None
        for position, token in enumerate(ids):
            if not self.max_tokens:
                return (), FinishReason.LENGTH
            if token in self._end_ids and self.may_end:
                if token not in self._kept_ids:
                    return ids[:position], FinishReason.END_ID
                self.generated += 1
                return ids[: position + 1], FinishReason.END_ID
            self.generated += 1
            if self._stops:
                self._ids.append(token)
            for length in self._stop_lengths.get(token, ()):
                last_ids = tuple(self._ids[-length:])
                if self.may_end and last_ids in self._stops:
                    self.stop_sequence = last_ids
                    return ids[: position + 1], FinishReason.STOP
            if self.generated >= self.max_tokens:
                return ids[: position + 1], FinishReason.LENGTH
        return ids, None
