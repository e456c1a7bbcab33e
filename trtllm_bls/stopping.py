"""Where a completion ends: ``StopMatcher`` finds stop strings in text, ``StoppingCriteria`` the end
in token ids.

A stop string is matched after detokenisation, across any chunk border. The stop that *completes*
first wins, the longest of those that complete at the same character. Text leaves at once, except a
suffix that could still grow into a stop, so no part of a stop leaves unless it is asked for.

Both look for their patterns with one automaton (Aho and Corasick), whose cost is linear in the
input whatever the patterns are. This module knows nothing of tokenizers or engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import EngineRequest, FinishReason, TokenIds

MAX_STOPS = 100
MAX_STOP_CHARS = 256

Symbol = TypeVar("Symbol", bound=Hashable)


class _Automaton(Generic[Symbol]):
    """All patterns as one trie. Node 0 is the root; a node stands for the symbols that lead to it.

    ``fail[node]`` is the longest proper suffix of the node that is in the trie too.
    ``matched[node]`` is the longest pattern that the node ends with; ``None`` if there is none.
    """

    def __init__(self, patterns: Iterable[Sequence[Symbol]]) -> None:
        self.edges: list[dict[Symbol, int]] = [{}]
        self.depth = [0]
        self.matched: list[Sequence[Symbol] | None] = [None]
        for pattern in patterns:
            self._insert(pattern)
        self.fail = [0] * len(self.edges)
        self._link()

    def _insert(self, pattern: Sequence[Symbol]) -> None:
        node = 0
        for symbol in pattern:
            following = self.edges[node].get(symbol)
            if following is None:
                following = self.edges[node][symbol] = len(self.edges)
                self.edges.append({})
                self.depth.append(self.depth[node] + 1)
                self.matched.append(None)
            node = following
        if node:
            self.matched[node] = pattern

    def _link(self) -> None:
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for symbol, child in self.edges[node].items():
                queue.append(child)
                if node:
                    self.fail[child] = self.step(self.fail[node], symbol)
                    self.matched[child] = self.matched[child] or self.matched[self.fail[child]]

    def step(self, node: int, symbol: Symbol) -> int:
        """The node for the longest suffix of (node's symbols + symbol) that is in the trie."""
        while node and symbol not in self.edges[node]:
            node = self.fail[node]
        return self.edges[node].get(symbol, 0)

    def open_length(self, node: int) -> int:
        """How many of the last symbols are a *proper* prefix of a pattern."""
        while node and not self.edges[node]:
            node = self.fail[node]
        return self.depth[node]


@lru_cache(maxsize=32)
def _automaton_of(stops: tuple[str, ...]) -> _Automaton[str]:
    """Shared by all sequences of a request, and by requests with the same stops."""
    return _Automaton(stops)


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
    return tuple(dict.fromkeys(stop for stop in stops if stop))


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
        self._automaton = _automaton_of(checked_stops(stops))
        self._include = include
        self._node = 0
        self._held = ""
        self._stop: str | None = None

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def feed(self, text: str, armed: bool = True) -> Cut:
        """Take the next text. While not ``armed``, a stop that completes in it does not count.

        Text fed after a stop is dropped: the cut repeats the stop with no text.
        """
        if self._stop is not None:
            return Cut("", self._stop)
        if not self._node and self._automaton.edges[0].keys().isdisjoint(text):
            return Cut(text)  # nearly always: no stop begins here
        known = self._held + text
        for position, symbol in enumerate(text, start=len(self._held) + 1):
            self._node = self._automaton.step(self._node, symbol)
            matched = self._automaton.matched[self._node]
            if matched is not None and armed:
                return self._finish(known[:position], len(matched))
        return self._release(known)

    def flush(self) -> str:
        """The text held back; for a sequence that ends without a stop."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _finish(self, known: str, length: int) -> Cut:
        begin = len(known) - length
        self._stop = known[begin:]
        self._held = ""
        return Cut(known if self._include else known[:begin], self._stop)

    def _release(self, known: str) -> Cut:
        certain = len(known) - self._automaton.open_length(self._node)
        self._held = known[certain:]
        return Cut(known[:certain])


@lru_cache(maxsize=32)
def _automaton_of_ids(sequences: tuple[TokenIds, ...]) -> _Automaton[int]:
    return _Automaton(sequences)


class StoppingCriteria:
    """Decides where one sequence ends, from its token ids.

    An end id ends the sequence and is no part of the output: it is neither shown nor counted. A
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
        stop_sequences: Iterable[TokenIds] = (),
    ) -> None:
        self.generated = 0
        self.stop_sequence: TokenIds | None = None
        self.max_tokens = max_tokens
        self._min_tokens = min_tokens or 0
        self._end_ids = frozenset(end_ids)
        stops = tuple(filter(None, stop_sequences))
        self._automaton = _automaton_of_ids(stops) if stops else None
        self._node = 0

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
        """Whether an end id would end the sequence now."""
        return self.generated >= self._min_tokens

    def feed(self, ids: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """The leading ``ids`` that belong to the output, and why the sequence ends with them.

        The reason is ``END_ID``, ``STOP``, ``LENGTH``, or ``None`` while the sequence goes on.
        """
        count = self.generated + len(ids)
        if count < self.max_tokens and self._automaton is None and self._end_ids.isdisjoint(ids):
            self.generated = count  # nearly every token
            return ids, None
        for place, token in enumerate(ids):
            if not self.max_tokens:
                return (), FinishReason.LENGTH
            if token in self._end_ids and self.may_end:
                return ids[:place], FinishReason.END_ID
            self.generated += 1
            if self._stops_at(token):
                return ids[: place + 1], FinishReason.STOP
            if self.generated >= self.max_tokens:
                return ids[: place + 1], FinishReason.LENGTH
        return ids, None

    def _stops_at(self, token: int) -> bool:
        if self._automaton is None:
            return False
        self._node = self._automaton.step(self._node, token)
        matched = self._automaton.matched[self._node]
        if matched is None or not self.may_end:
            return False
        self.stop_sequence = tuple(matched)
        return True
