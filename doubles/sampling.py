"""From one row of logits to one token, under one request's sampling settings, in numpy alone.

The scripted engine samples with it, which must not need torch. The embedded engine has the same
rules as tensors over all rows; a test compares the two, token by token.

The rules, in the order in which they act on a row:

1. embedding bias is added;
2. temperature divides (absent = 1);
3. repetition, presence and frequency penalty, over prompt and generated tokens together, as
   TensorRT-LLM's kernel counts them: a request split into several means the same;
4. the end token is barred until ``min_tokens`` tokens are generated; bad sequences are barred
   where the text (prompt included) ends with all but their last token; so are tokens that would
   repeat ``no_repeat_ngram_size`` tokens of the text, and what a guide (a grammar that the answer
   must follow) does not allow;
5. greedy (neither top-k nor top-p given, whatever the temperature, as in TensorRT-LLM; or
   temperature 0; or top-k 1): the best token. Otherwise tokens less likely than ``min_p`` times
   the likeliest are left out; top-k; top-p within what is left; then a draw.

A draw uses one uniform number that is a function of seed, sequence and the token's *position* in
the text, so results depend neither on the batch nor on how a text is split into requests, and
rounds of speculation with one seed do not repeat their numbers. Accepting drafts by logits has a
number stream of its own, because the draft may have been drawn with the same seed from the other.

Knows one sequence; must not know of slots, streams or other requests.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from trtllm_bls.errors import EngineError
from trtllm_bls.types import Array, EngineRequest

_DRAWS, _ACCEPTANCE = 0, 1  # number streams


class TokenGuide(Protocol):
    """What one sequence's tokens must follow, beside the request's sampling settings."""

    ended: bool  # the text is complete, and nothing may follow

    def mask(self, row: Array) -> None:
        """Set to -inf, in ``row`` [vocab], what may not come next; something always may."""

    def push(self, token: int) -> None:
        """The token now belongs to the text."""


class TokenSampler:
    """Chooses the tokens of one sequence, each from a row of raw logits [vocab], fp32."""

    def __init__(
        self, request: EngineRequest, index: int, vocab_size: int, guide: TokenGuide | None = None
    ) -> None:
        s = request.sampling
        self._request, self._sampling, self._index, self._guide = request, s, index, guide
        self._text = list(request.input_ids)
        # By the contract, a top-p that is not above 0 is as good as absent.
        self._first_top_p = self._top_p = s.top_p if s.top_p is not None and s.top_p > 0 else None
        self._greedy = s.is_greedy
        penalised = s.repetition_penalty not in (None, 1) or s.presence_penalty
        penalised = penalised or s.frequency_penalty
        # Occurrences of each token in the text.
        self._counts = np.bincount(self._text, minlength=vocab_size) if penalised else None
        self._ngram = s.no_repeat_ngram_size or 0
        self._bias = np.asarray(request.embedding_bias, dtype=np.float64).reshape(-1, 2)
        altered = penalised or request.embedding_bias or request.bad_sequences or s.min_tokens
        altered = altered or self._ngram
        by_logits = request.draft is not None and request.draft.logits is not None
        # Whether another token than the highest may be due, were it only greedy.
        self.alters = bool(altered or by_logits or guide is not None)
        self.needs_row = self.alters or not self._greedy

    @property
    def complete(self) -> bool:
        """Whether the guide lets nothing follow."""
        return self._guide is not None and self._guide.ended

    def choose(self, row: Array, position: int | None = None) -> int:
        """The next token. ``position`` is that of the draft's token to be verified by its logits.

        That one is accepted where p/q is above a uniform number, or at least the draft's
        threshold; else corrected by a draw from max(0, p - q). One number serves both: below the
        ratio it accepts, and what is left of its range above the ratio is uniform again.
        """
        target, draft = self._distribution(row), self._request.draft
        if (
            draft is None
            or draft.logits is None
            or position is None
            or position == len(draft.token_ids)
        ):
            return _draw(target, self._uniform(_DRAWS))
        drafted, threshold = draft.token_ids[position], draft.acceptance_threshold
        guess = self._distribution(np.asarray(draft.logits[position], dtype=row.dtype))
        p, q = float(target[drafted]), float(guess[drafted])
        ratio = p / q if q > 0 else float(p > 0)
        uniform = self._uniform(_ACCEPTANCE)
        if (uniform < ratio) if threshold is None else (ratio >= threshold):
            return drafted
        if threshold is None:
            uniform = (uniform - ratio) / (1 - ratio)
        residual = np.maximum(target - guess, 0)
        return _draw(residual if residual.any() else target, uniform)

    def push(self, token: int) -> None:
        """The token now belongs to the text."""
        self._text.append(token)
        if self._guide is not None:
            self._guide.push(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._top_p is not None and self._sampling.top_p_decay is not None:
            decayed = self._top_p * self._sampling.top_p_decay
            reset = token == self._sampling.top_p_reset_id
            self._top_p = (
                self._first_top_p if reset else max(decayed, self._sampling.top_p_min or 1e-6)
            )

    def processed(self, row: Array) -> Array:
        """Rules 1 to 4 on a copy of the row."""
        s, row = self._sampling, row.copy()
        if len(self._bias):
            np.add.at(row, self._bias[:, 0].astype(np.int64), self._bias[:, 1].astype(row.dtype))
        if s.temperature:
            row /= s.temperature
        if self._counts is not None:
            indices = self._counts.nonzero()[0]
            scores, penalty = row[indices], s.repetition_penalty or 1.0
            scores = np.where(scores < 0, scores * penalty, scores / penalty)
            scores -= s.presence_penalty or 0.0
            row[indices] = scores - (s.frequency_penalty or 0.0) * self._counts[indices]
        end_id, generated = self._request.end_id, len(self._text) - len(self._request.input_ids)
        if end_id is not None and end_id >= 0 and generated < (s.min_tokens or 0):
            row[end_id] = -np.inf
        for *before, last in self._request.bad_sequences:
            if self._text[len(self._text) - len(before) :] == before:
                row[last] = -np.inf
        if 0 < self._ngram <= len(self._text):
            runs = np.lib.stride_tricks.sliding_window_view(np.array(self._text), self._ngram)
            tail = self._text[len(self._text) - self._ngram + 1 :]
            row[runs[(runs[:, :-1] == tail).all(axis=1), -1]] = -np.inf
        if self._guide is not None:
            self._guide.mask(row)
        if row.max() == -np.inf:
            raise EngineError("bias, bad words, n-grams and guide leave no token to choose")
        return row

    def _distribution(self, row: Array) -> Array:
        """What the next token is drawn from, in double precision; rule 5."""
        scores = self.processed(row)
        if self._greedy:
            certain = np.zeros(len(scores))
            certain[scores.argmax()] = 1
            return certain
        weights: Array = np.exp(scores - scores.max(), dtype=np.float64)
        weights[weights < (self._sampling.min_p or 0)] = 0  # the likeliest weighs 1
        top_k = self._sampling.top_k
        if top_k and top_k < len(weights):
            weights[weights < np.partition(weights, -top_k)[-top_k]] = 0
        weights /= weights.sum()
        if self._top_p is not None and self._top_p < 1:
            weights[weights < _nucleus_edge(weights, self._top_p)] = 0
            weights /= weights.sum()
        return weights

    def _uniform(self, stream: int) -> float:
        """In [0, 1); one number per seed, sequence, stream and position."""
        key = f"{self._sampling.seed or 0} {self._index} {stream} {len(self._text)}"
        bits = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return (int.from_bytes(bits, "big") >> 11) * 2.0**-53


def _nucleus_edge(weights: Array, mass: float) -> float:
    """The smallest probability among the fewest tokens that together hold ``mass``."""
    # What is below an even share of the rest cannot hold as much as the rest together: so the
    # fewest tokens are all above it, and only those need sorting.
    ordered = np.sort(weights[weights >= (1 - mass) / len(weights)])[::-1]
    last = int(np.searchsorted(np.cumsum(ordered), mass, side="left"))
    return float(ordered[min(last, len(ordered) - 1)])


def _draw(weights: Array, uniform: float) -> int:
    """An index with probability proportional to its weight."""
    possible = np.flatnonzero(weights)
    cumulative = np.cumsum(weights[possible])
    position = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(possible[min(position, len(possible) - 1)])  # rounding may reach the very end


def log_prob(row: Array, token: int) -> float:
    """Of the model's own distribution, before any sampling rule.

    So scores compare across requests, and speculation reports what plain decoding would.
    """
    highest = float(row.max())
    return float(row[token]) - highest - float(np.log(np.exp(row - highest).sum()))
