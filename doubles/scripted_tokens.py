"""How a scripted engine finds its next token: rules, and the request's sampling fields on top.

A rule is a pure function of the context (prompt and generated ids): it gives the one next id,
or a probability for each id of the vocabulary. Because nothing else decides, two engines with
one rule agree, and speculative output can be compared with plain output token by token.

Owns the rules; how a row of logits becomes a token is in ``sampling``. Knows nothing of time,
streams or requests running beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from doubles import sampling
from trtllm_bls.types import Array, EngineRequest, PromptIds

Rule: TypeAlias = Callable[[Sequence[int]], "int | Sequence[float]"]

NEVER = -1e4  # a logit whose probability is exactly 0.0 beside a logit of 0
_MASK64 = (1 << 64) - 1


# --- rules ------------------------------------------------------------------------------------


def reciting(answer: Sequence[int], prompt_tokens: int, then: int = 0) -> Rule:
    """Give ``answer`` after any prompt of ``prompt_tokens`` ids, then ``then`` (the end id)."""
    ids = tuple(answer)

    def rule(context: Sequence[int]) -> int:
        place = len(context) - prompt_tokens
        return ids[place] if 0 <= place < len(ids) else then

    return rule


def hashed(vocab_size: int, *, first: int = 0, salt: int = 0) -> Rule:
    """Text without pattern: an id of ``first .. vocab_size - 1`` from the last three ids."""

    def rule(context: Sequence[int]) -> int:
        return first + _mix(context, salt) % (vocab_size - first)

    return rule


def agreeing(target: Rule, acceptance: float, vocab_size: int) -> Rule:
    """A draft that guesses ``target``'s id with probability ``acceptance``, by hash of the context.

    ``target`` must be a rule that gives ids.
    """

    def rule(context: Sequence[int]) -> int:
        right = target(context)
        assert isinstance(right, int)
        lucky = _mix(context, len(context)) / 2**64 < acceptance
        return right if lucky else (right + 1) % vocab_size

    return rule


def table(rows: Sequence[Sequence[float]]) -> Rule:
    """A Markov chain: the next id's probabilities are ``rows[last id]``."""
    fixed = tuple(tuple(row) for row in rows)
    return lambda context: fixed[context[-1]]


def _mix(context: Sequence[int], salt: int) -> int:
    value = salt
    for token in context[-3:]:  # splitmix64, one turn per id
        value = (value + token + 0x9E3779B97F4A7C15) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        value ^= value >> 31
    return value


# --- the draw ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One chosen id, with its log-probability before temperature and limits."""

    token: int
    log_prob: float
    logits: Array | None = None  # [vocab]


class RuleSampler:
    """Chooses the tokens of one sequence: the rule's own, or by sampling among what it gives."""

    def __init__(self, rule: Rule, request: EngineRequest, vocab_size: int, index: int) -> None:
        self._rule, self._request, self._vocab_size = rule, request, vocab_size
        self._sampler = sampling.TokenSampler(request, index, vocab_size)
        # Otherwise an id that the rule gives is what comes.
        self._opened = request.wants.generation_logits or self._sampler.alters

    def choose(self, context: Sequence[int], place: int | None = None) -> Choice:
        """What comes next; ``place`` is that of the draft's token to be verified, if any."""
        value = self._rule(context)
        if isinstance(value, int) and not self._opened:
            return Choice(value, 0.0)
        logits = self._logits(value)
        token = self._sampler.choose(logits, place)
        wanted = self._request.wants.log_probs
        return Choice(token, sampling.log_prob(logits, token) if wanted else 0.0, logits)

    def push(self, token: int) -> None:
        """The token now belongs to the text."""
        self._sampler.push(token)

    def context_logits(self, prompt: PromptIds) -> Array:
        """The raw logits after each prompt token: [prompt tokens, vocab]."""
        ids = tuple(prompt)
        places = range(1, len(ids) + 1)
        return np.stack([self._logits(self._rule(ids[:place])) for place in places])

    def _logits(self, value: int | Sequence[float]) -> Array:
        if not isinstance(value, int):
            return _log(tuple(value))
        # The others in a fixed order, should this one be forbidden.
        distance = (np.arange(self._vocab_size) - value) % self._vocab_size
        return np.where(distance == 0, 0.0, NEVER - distance)


@lru_cache(maxsize=1024)
def _log(probabilities: tuple[float, ...]) -> Array:
    with np.errstate(divide="ignore"):
        logits: Array = np.log(np.asarray(probabilities, dtype=np.float64))
    return logits
