"""Where a completion ends: stop strings on text, stop sequences on token ids.

The rules. A stop is matched on text after detokenisation, across any chunk border. The stop that
*completes* first wins, the longest of those that complete at the same character. Text leaves at
once, except a suffix that could still grow into a stop; so no part of a stop ever leaves unless
it is asked for. With a minimum length, a stop may begin early but must complete after it.

Both matchers walk one automaton (Aho and Corasick), so the cost is linear in the text whatever
the stops are. This module knows nothing of tokenizers or engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from trtllm_bls.errors import InvalidRequest

MAX_STOPS = 100
MAX_STOP_CHARS = 256

Symbol = TypeVar("Symbol", bound=Hashable)


class _Automaton(Generic[Symbol]):
    """All patterns as one trie; node 0 is the root, a node stands for the symbols that lead to it.

    ``fail[node]`` is the longest proper suffix of the node that is in the trie too;
    ``matched[node]`` the length of the longest pattern the node ends with, or 0.
    """

    def __init__(self, patterns: Iterable[Sequence[Symbol]]) -> None:
        self.edges: list[dict[Symbol, int]] = [{}]
        self.depth = [0]
        self.matched = [0]
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
                self.matched.append(0)
            node = following
        self.matched[node] = len(pattern)

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
            length = self._automaton.matched[self._node]
            if length and armed:
                return self._finish(known[:position], length)
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


class StopSequences:
    """Watches the token ids of one sequence; empty stop sequences are ignored."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._automaton = _Automaton(sequences)
        self._node = 0

    def feed(self, token_id: int) -> bool:
        """Take the next id; whether the ids so far now end with a stop sequence."""
        self._node = self._automaton.step(self._node, token_id)
        return self._automaton.matched[self._node] > 0
