"""How a scripted engine finds its next token: rules, and the request's sampling fields on top.

A rule is a pure function of the context (prompt and generated ids): it gives the one next id,
or a probability for each id of the vocabulary. Because nothing else decides, two engines with
one rule agree, and speculative output can be compared with plain output token by token.

Owns rules, probabilities and the draw. Knows nothing of time, streams or requests running beside.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trtllm_bls.messages import EngineRequest, Sampling, TokenIds

Rule: TypeAlias = Callable[[Sequence[int]], "int | Sequence[float]"]
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

NEVER = -1e4  # a logit whose probability is exactly 0.0 beside a logit of 0
_MASK64 = (1 << 64) - 1


# --- rules ------------------------------------------------------------------------------------


def reciting(answer: Sequence[int], prompt_tokens: int, then: int = 0) -> Rule:
    """Say ``answer`` after any prompt of ``prompt_tokens`` ids, then ``then`` (the end id)."""
    said = tuple(answer)

    def rule(context: Sequence[int]) -> int:
        place = len(context) - prompt_tokens
        return said[place] if 0 <= place < len(said) else then

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
    logits: Floats | None = None  # [vocab]


class Chooser:
    """Chooses the tokens of one sequence: one uniform number per drawn token, in order."""

    def __init__(self, rule: Rule, request: EngineRequest, vocab_size: int, index: int) -> None:
        self._rule = rule
        self._request = request
        self._vocab_size = vocab_size
        self._limits = _Limits.of(request.sampling)
        self._random = random.Random(((request.sampling.seed or 0) << 16) + index)
        drafted_logits = request.draft is not None and request.draft.logits is not None
        self._adjusted = _adjusts(request)
        self._opened = request.wants.generation_logits or drafted_logits or self._adjusted

    def choose(self, context: Sequence[int], generated: int) -> Choice:
        """The engine's own next token, after ``generated`` tokens of this request."""
        value = self._rule(context)
        if isinstance(value, int) and not self._opened:
            return Choice(value, 0.0)
        outlook = self._outlook(value, context, generated)
        return outlook.choice(self._draw(outlook.heights))

    def judge(self, context: Sequence[int], generated: int, place: int) -> Choice:
        """Accept the draft's token at ``place`` by the by-logits rule, or correct it."""
        draft = self._request.draft
        assert draft is not None and draft.logits is not None
        outlook = self._outlook(self._rule(context), context, generated)
        target = outlook.shares
        guess = _shares(np.asarray(draft.logits[place], dtype=np.float64), self._limits)
        token = draft.token_ids[place]
        threshold = draft.acceptance_threshold or self._random.random()
        if threshold * guess[token] < target[token]:
            return outlook.choice(token)
        rest = np.maximum(target - guess, 0.0)
        return outlook.choice(self._draw(_heights(rest if rest.sum() > 0 else target)))

    def context_logits(self, prompt: TokenIds) -> Floats:
        """The raw logits after each prompt token: [prompt tokens, vocab]."""
        places = range(1, len(prompt) + 1)
        return np.stack([self._raw(self._rule(prompt[:place])) for place in places])

    def _raw(self, value: int | Sequence[float]) -> Floats:
        if isinstance(value, int):  # the others in a fixed order, should this one be forbidden
            return np.where(
                (distance := (np.arange(self._vocab_size) - value) % self._vocab_size) == 0,
                0.0,
                NEVER - distance,
            )
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(value, dtype=np.float64))

    def _outlook(
        self, value: int | Sequence[float], context: Sequence[int], generated: int
    ) -> _Outlook:
        if not isinstance(value, int) and not self._adjusted:
            return _table_outlook(tuple(value), self._limits)
        logits = self._raw(value)
        self._adjust(logits, context, generated)
        return _Outlook.of(logits, self._limits)

    def _adjust(self, logits: Floats, context: Sequence[int], generated: int) -> None:
        request, sampling = self._request, self._request.sampling
        if _penalises(sampling):
            _penalise(logits, context, sampling)
        for token, bias in request.embedding_bias:
            logits[token] += bias
        for bad in request.bad_sequences:
            if len(bad) == 1 or tuple(context[1 - len(bad) :]) == bad[:-1]:
                logits[bad[-1]] = -math.inf
        if request.end_id in range(self._vocab_size) and generated < (sampling.min_tokens or 0):
            logits[request.end_id] = -math.inf

    def _draw(self, heights: list[float]) -> int:
        top = heights.index(heights[-1])  # the last id that can be drawn
        if self._limits.greedy:
            return top
        return bisect_right(heights, self._random.random() * heights[-1], hi=top)


class _Limits(NamedTuple):
    """The sampling fields that shape a distribution."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, sampling: Sampling) -> _Limits:
        temperature, top_p = sampling.temperature or 1.0, sampling.top_p or 1.0
        return cls(is_greedy(sampling), temperature, sampling.top_k or 0, top_p)


@dataclass(frozen=True)
class _Outlook:
    """What may come next: raw log-probabilities, and the shares after the request's limits."""

    logits: Floats  # [vocab], as are the others
    log_probs: Floats
    shares: Floats
    heights: list[float]

    @classmethod
    def of(cls, logits: Floats, limits: _Limits) -> _Outlook:
        with np.errstate(divide="ignore"):
            log_probs = np.log(_softmax(logits))
        shares = _shares(logits, limits)
        return cls(logits, log_probs, shares, _heights(shares))

    def choice(self, token: int) -> Choice:
        return Choice(token, float(self.log_probs[token]), self.logits)


@lru_cache(maxsize=1024)
def _table_outlook(row: tuple[float, ...], limits: _Limits) -> _Outlook:
    with np.errstate(divide="ignore"):
        return _Outlook.of(np.log(np.asarray(row, dtype=np.float64)), limits)


def _shares(logits: Floats, limits: _Limits) -> Floats:
    if limits.greedy:
        chosen = np.zeros(len(logits))
        chosen[int(logits.argmax())] = 1.0
        return chosen
    shares = _softmax(logits / limits.temperature)
    if limits.top_k or limits.top_p < 1:
        order = np.argsort(-shares, kind="stable")
        shares[order[limits.top_k or len(shares) :]] = 0.0
        before = np.cumsum(shares[order]) - shares[order]
        if limits.top_p < 1:
            shares[order[before >= limits.top_p * shares.sum()]] = 0.0
        shares /= shares.sum()
    return shares


def _heights(shares: Floats) -> list[float]:
    heights: list[float] = shares.cumsum().tolist()
    return heights


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is always taken; so too when no sampling field is given."""
    said = (sampling.temperature, sampling.top_k, sampling.top_p)
    return sampling.top_k == 1 or sampling.temperature == 0 or said == (None, None, None)


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max())
    total: Floats = powers / powers.sum()
    return total


def _penalises(sampling: Sampling) -> bool:
    return bool(
        sampling.repetition_penalty not in (None, 1.0)
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _adjusts(request: EngineRequest) -> bool:
    """Whether the request can make another token win than the one its rule names."""
    return bool(
        request.embedding_bias
        or request.bad_sequences
        or request.sampling.min_tokens
        or _penalises(request.sampling)
    )


def _penalise(logits: Floats, context: Sequence[int], sampling: Sampling) -> None:
    """Prompt and generated tokens count alike, so a round border changes nothing."""
    counts = np.bincount(np.asarray(context), minlength=len(logits))[: len(logits)]
    seen = counts > 0
    repetition = sampling.repetition_penalty or 1.0
    held = logits[seen]
    logits[seen] = np.where(held > 0, held / repetition, held * repetition)
    logits[seen] -= sampling.presence_penalty or 0.0
    logits -= counts * (sampling.frequency_penalty or 0.0)
