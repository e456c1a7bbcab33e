"""Counts what greedy speculative decoding would accept, without running it.

Greedy speculation never changes the target's text, so that text is all one needs: within a round
the draft goes on from its own guesses, but as long as they are accepted these are the target's
tokens, and after the first wrong one the round is over. The draft's first choice at every position
of the finished text therefore decides every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Drafted and accepted tokens over some texts. `tested` omits drafts behind a wrong one."""

    rounds: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.tested + other.tested,
            self.accepted + other.accepted,
        )

    @property
    def per_drafted(self) -> float:
        """Accepted share of all drafted tokens."""
        return self.accepted / max(1, self.drafted)

    @property
    def per_tested(self) -> float:
        """Accepted share of the drafts that the target came to look at: `a` in the formulas."""
        return self.accepted / max(1, self.tested)

    @property
    def per_round(self) -> float:
        """Tokens that one step of the target yields."""
        return (self.accepted + self.rounds) / max(1, self.rounds)


def count_rounds(text: Sequence[int], guesses: Sequence[int], length: int) -> Acceptance:
    """Rounds over a finished text, where `guesses[i]` is the draft's choice for `text[i]`."""
    return _count(text, lambda position: guesses[position : position + length])


def _count(text: Sequence[int], guess: Callable[[int], Sequence[int]]) -> Acceptance:
    """`guess` is asked at the position where each round begins."""
    total, position = Acceptance(), 0
    while position < len(text):
        # The last token of a round is the target's own, so nothing is drafted for the end of the
        # text.
        drafted = guess(position)[: len(text) - position - 1]
        right = 0
        while right < len(drafted) and drafted[right] == text[position + right]:
            right += 1
        total += Acceptance(1, len(drafted), min(right + 1, len(drafted)), right)
        position += right + 1
    return total


class Lookup:
    """Prompt lookup: what followed when the latest n tokens last occurred, longest n first."""

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self.known: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """Adds tokens. An n-gram is filed with its successor, so the tail never finds itself."""
        for token in tokens:
            for size in range(1, min(self.longest, len(self.known)) + 1):
                self.after[tuple(self.known[-size:])] = len(self.known)
            self.known.append(token)

    def guess(self, length: int) -> list[int]:
        for size in range(min(self.longest, len(self.known)), 0, -1):
            start = self.after.get(tuple(self.known[-size:]))
            if start is not None:
                return self.known[start : start + length]
        return []


def count_lookup_rounds(prompt: Sequence[int], text: Sequence[int], length: int) -> Acceptance:
    """The same count for prompt lookup, which may draft fewer tokens or none."""
    lookup = Lookup()
    lookup.read(prompt)

    def guess(position: int) -> list[int]:
        lookup.read(text[len(lookup.known) - len(prompt) : position])
        return lookup.guess(length)

    return _count(text, guess)
