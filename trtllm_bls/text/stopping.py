"""Where a completion ends: ``StopMatcher`` finds stop strings in text, ``StoppingCriteria`` the end
in token ids.

A stop string is matched after detokenisation, across any chunk border. The stop that *completes*
first wins, the longest of those that complete at the same character. Text leaves at once, except a
suffix that could still grow into a stop, so no part of a stop leaves unless it is asked for. This
module knows nothing of tokenizers or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import EngineRequest, FinishReason, TokenIds

MAX_STOPS = 100
MAX_STOP_CHARS = 256


def check_words(field: str, words: Sequence[str], most: int, longest: int) -> None:
    """Raises ``InvalidRequest`` for more than ``most`` words or one of more characters than
    ``longest``. Repeated words count: reading them costs as much as others.
    """
    if len(words) > most:
        raise InvalidRequest(field, f"{len(words)} words; at most {most} are allowed")
    length = max(map(len, words), default=0)
    if length > longest:
        problem = f"a word of {length} characters; at most {longest} are allowed"
        raise InvalidRequest(field, problem)


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stops without empty and repeated ones. Raises ``InvalidRequest`` above the limits."""
    check_words("stop_words", stops, MAX_STOPS, MAX_STOP_CHARS)
    return tuple(dict.fromkeys([stop for stop in stops if stop]))


def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    """Every text that could still grow into a stop."""
    return frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))


# Requests with the same stops share them. Those of long stops take megabytes and are not kept.
_CACHED_CHARS = 256
_cached_beginnings = lru_cache(maxsize=32)(_beginnings)


@dataclass(frozen=True)
class Cut:
    """``text`` may leave now. ``stop`` is the stop that completed, if one did: the text ends."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches the text of one sequence. Raises ``InvalidRequest`` for too many or too long stops.

    ``include`` keeps the completed stop in the text; otherwise the text ends before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = checked_stops(stops)
        is_short = sum(map(len, self._stops)) <= _CACHED_CHARS
        self._beginnings = (_cached_beginnings if is_short else _beginnings)(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def feed(self, text: str, armed: bool = True) -> Cut:
        """Take the next text. While not ``armed``, a stop that completes in it does not count."""
        if not self._held and self._first_characters.isdisjoint(text):
            return Cut(text)  # nearly always: no stop begins here
        known, spans = self._held + text, []  # of stops: end, begin
        for stop in self._stops if armed else ():
            # What completed before, while it did not count, is not found again.
            begin = known.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0:
                spans.append((begin + len(stop), begin))
        if spans:
            end, begin = min(spans)
            self._held = ""
            return Cut(known[: end if self._include else begin], known[begin:end])
        certain = max(0, len(known) - self._longest + 1)
        while certain < len(known) and known[certain:] not in self._beginnings:
            certain += 1
        self._held = known[certain:]
        return Cut(known[:certain])

    def flush(self) -> str:
        """The text held back; for a sequence that ends without a stop."""
        held, self._held = self._held, ""
        return held


class StoppingCriteria:
    """Decides where one sequence ends, from its token ids.

    An end id ends the sequence and is no part of the output, unless it is in ``kept_ids``: it is
    neither shown nor counted. A
    stop sequence ends it with its last id, which is part of the output. Both count only once the
    output has ``min_tokens`` tokens, the last id of the stop sequence included. Before that, an end
    id is a token like any other. TensorRT-LLM bars its one end id until then, so only further end
    ids, which the engine does not know, come early. With ``max_tokens`` tokens the sequence ends.

    ``generated`` counts the tokens of the output. ``stop_sequence`` is the stop sequence that
    ended the sequence: the longest, if several complete at once. Empty stop sequences are ignored.
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
        # By last id: how long the stop sequences are that end with it, the longest first.
        self._lengths: dict[int, dict[int, None]] = {}
        for stop in sorted(self._stops, key=len, reverse=True):
            self._lengths.setdefault(stop[-1], {})[len(stop)] = None
        self._ids: list[int] = []  # of the output, where there are stop sequences

    @classmethod
    def of(cls, request: EngineRequest, max_tokens: int | None = None) -> StoppingCriteria:
        """Of one sequence of ``request``; ``max_tokens``: what there is room for, if less."""
        return cls(
            request.max_tokens if max_tokens is None else max_tokens,
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
        """The leading ``ids`` that belong to the output, and why the sequence ends with them.

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
                is_kept = token in self._kept_ids
                self.generated += is_kept
                return ids[: position + is_kept], FinishReason.END_ID
            self.generated += 1
            if self._stops:
                self._ids.append(token)
            for length in self._lengths.get(token, ()):
                if self.may_end and (ending := tuple(self._ids[-length:])) in self._stops:
                    self.stop_sequence = ending
                    return ids[: position + 1], FinishReason.STOP
            if self.generated >= self.max_tokens:
                return ids[: position + 1], FinishReason.LENGTH
        return ids, None
