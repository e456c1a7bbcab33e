"""Choice of tokens from a step's rows of logits: all rows at once, on the device of the logits.

``TokenRules`` knows one sequence and writes the rules for its next token as a ``TokenRow``;
``choose`` applies the rows of all sequences as tensors and brings the tokens back in one transfer.

The rules, in the order in which they act on a row:

1. embedding bias is added;
2. temperature divides (absent = 1);
3. repetition, presence and frequency penalty, over prompt and generated tokens together, as
   TensorRT-LLM's kernel counts them: a request split into several means the same;
4. the end token is barred until ``min_tokens`` tokens are generated; bad sequences are barred
   where the text (prompt included) ends with all but their last token; so are tokens that would
   repeat ``no_repeat_ngram_size`` tokens of the text, and tokens that a guide (a grammar that the
   answer must follow) does not allow;
5. greedy (neither top-k nor top-p given, whatever the temperature, as in TensorRT-LLM; or
   temperature 0; or top-k 1): the best token. Otherwise tokens less likely than ``min_p`` times
   the likeliest are left out; top-k; top-p within the remainder; then a draw.

A draw uses one uniform number that is a function of seed, sequence and the token's *position* in
the text, so results depend neither on the batch nor on how a text is split into requests, and
rounds of speculation with one seed do not repeat their numbers. Accepting drafts by logits has a
number stream of its own, because the draft may have been drawn with the same seed from the other.

A row after a draft's tokens assumes that they are accepted. If they are not, nobody reads it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.types import Array, EngineRequest

# Number streams.
_DRAWS = 0
_ACCEPTANCE = 1
_CANDIDATES = 1024  # tokens that are sorted on a CPU, where sorting a vocabulary takes long
_NO_ENTRIES = np.zeros((0, 2))


class TokenGuide(Protocol):
    """A rule for one sequence's tokens, beside the request's sampling settings."""

    ended: bool  # the text is complete, and nothing may follow
    allowed: Array  # [vocab], bool: the tokens that may come next, at least one

    def copy(self) -> TokenGuide:
        """Return another guide at the same place."""

    def push(self, token: int) -> None:
        """Add the token to the text."""


@dataclass(frozen=True)
class TokenRow:
    """The rules for one next token. ``uniform``: the number in [0, 1) that decides its draw.

    ``draft_token`` was drawn from the logits ``guess`` [vocab], by which it is verified.
    """

    greedy: bool
    uniform: float
    bias: Array  # [n, 2]: token, added logit
    temperature: float
    counts: Array  # [n, 2]: token, occurrences in the text; empty where nothing is penalised
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    barred: Sequence[int]
    allowed: Array | None  # [vocab], bool
    min_p: float
    top_k: int
    top_p: float
    draft_token: int = 0
    guess: Array | None = None
    acceptance_threshold: float | None = None


class TokenRules:
    """The sampling settings of one sequence, and its text as far as they need it."""

    def __init__(
        self, request: EngineRequest, index: int, vocab_size: int, guide: TokenGuide | None = None
    ) -> None:
        sampling = request.sampling
        self._request = request
        self._sampling = sampling
        self._index = index
        self._guide = guide
        self._text = list(request.input_ids)
        # By the contract, a top-p that is not above 0 is as good as absent.
        self._initial_top_p = 1.0
        self._top_p_decay = None
        if sampling.top_p is not None and sampling.top_p > 0:
            self._initial_top_p = sampling.top_p
            self._top_p_decay = sampling.top_p_decay
        self._top_p = self._initial_top_p
        self._greedy = sampling.is_greedy
        penalised = sampling.repetition_penalty not in (None, 1) or sampling.presence_penalty
        penalised = penalised or sampling.frequency_penalty
        self._counts: Array | None = None  # occurrences of each token in the text
        if penalised:
            self._counts = np.bincount(self._text, minlength=vocab_size)
        self._ngram = sampling.no_repeat_ngram_size or 0
        self._bias = np.asarray(request.embedding_bias, dtype=np.float64).reshape(-1, 2)
        altered = penalised or request.embedding_bias or request.bad_sequences or self._ngram
        altered = altered or sampling.min_tokens or guide is not None
        by_logits = request.draft is not None and request.draft.logits is not None
        self._takes_best = self._greedy and not altered and not by_logits

    @property
    def complete(self) -> bool:
        """True where the guide lets nothing follow."""
        return self._guide is not None and self._guide.ended

    def rows(self, draft: Sequence[int] = ()) -> list[TokenRow | None]:
        """Return the rows of the next token and of those after each token of a draft.

        ``None`` stands for the token with the highest logit.
        """
        if self._takes_best:
            return [None] * (len(draft) + 1)
        rows: list[TokenRow | None] = []
        ahead = self
        if draft:
            ahead = self._copy()
        for place, token in enumerate(draft):
            rows.append(ahead._row(place))
            try:
                ahead.push(token)
            except InvalidRequest:  # the guide bars the token, so that no later row is read
                return rows + rows[-1:] * (len(draft) - place)
        rows.append(ahead._row(len(draft)))
        return rows

    def push(self, token: int) -> None:
        """Add the token to the text."""
        self._text.append(token)
        if self._guide is not None:
            self._guide.push(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._top_p_decay is not None:
            self._top_p = max(self._top_p * self._top_p_decay, self._sampling.top_p_min or 1e-6)
            if token == self._sampling.top_p_reset_id:
                self._top_p = self._initial_top_p

    def _copy(self) -> TokenRules:
        clone = copy(self)
        clone._text = self._text.copy()
        if self._guide is not None:
            clone._guide = self._guide.copy()
        if self._counts is not None:
            clone._counts = self._counts.copy()
        return clone

    def _row(self, place: int) -> TokenRow:
        """Return the row of the next token; ``place`` is its index in the draft."""
        sampling = self._sampling
        draft = self._request.draft
        verifies = draft is not None and draft.logits is not None and place < len(draft.token_ids)
        counts = _NO_ENTRIES
        if self._counts is not None:
            counts = _occurrences(self._counts)
        row = TokenRow(
            greedy=self._greedy,
            uniform=self._uniform(_ACCEPTANCE if verifies else _DRAWS),
            bias=self._bias,
            temperature=sampling.temperature or 1.0,
            counts=counts,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            presence_penalty=sampling.presence_penalty or 0.0,
            frequency_penalty=sampling.frequency_penalty or 0.0,
            barred=self._barred(),
            allowed=None if self._guide is None else self._guide.allowed,
            min_p=sampling.min_p or 0.0,
            top_k=sampling.top_k or 0,
            top_p=self._top_p,
        )
        if not verifies:
            return row
        assert draft is not None and draft.logits is not None
        return replace(
            row,
            draft_token=draft.token_ids[place],
            guess=draft.logits[place],
            acceptance_threshold=draft.acceptance_threshold,
        )

    def _barred(self) -> list[int]:
        """Return the tokens that may not come next, but for the guide's."""
        barred: list[int] = []
        end_id = self._request.end_id
        generated = len(self._text) - len(self._request.input_ids)
        if end_id is not None and end_id >= 0 and generated < (self._sampling.min_tokens or 0):
            barred.append(end_id)
        for *prefix, token in self._request.bad_sequences:
            if self._text[len(self._text) - len(prefix) :] == prefix:
                barred.append(token)
        if 0 < self._ngram <= len(self._text):
            runs = np.lib.stride_tricks.sliding_window_view(np.array(self._text), self._ngram)
            tail = self._text[len(self._text) - self._ngram + 1 :]
            barred += runs[(runs[:, :-1] == tail).all(axis=1), -1].tolist()
        return barred

    def _uniform(self, stream: int) -> float:
        """Return a number in [0, 1), one for each seed, sequence, stream and position."""
        key = f"{self._sampling.seed or 0} {self._index} {stream} {len(self._text)}"
        bits = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return (int.from_bytes(bits, "big") >> 11) * 2.0**-53


class Choice(NamedTuple):
    """The token chosen from one row.

    ``log_prob`` comes from the model's own distribution, before any rule: so scores compare across
    requests, and speculation reports the same as plain decoding. ``highest``: the highest logit,
    which is not finite if the row is not. ``possible``: false if the rules leave no token.
    """

    token: int
    log_prob: float
    highest: float
    possible: bool

    def checked(self) -> Choice:
        """Return this choice. Raises ``EngineError`` if there was no token to choose."""
        if not self.possible:
            raise EngineError("bias, bad words, n-grams and guide leave no token to choose")
        return self


def choose(logits: Tensor, rows: Sequence[TokenRow | None], log_probs: bool) -> list[Choice]:
    """Choose a token from each row of the logits [rows, vocab], fp32.

    ``log_probs``: the caller reads them; otherwise they are 0.
    """
    highest, tokens = logits.max(dim=-1)
    indices: list[int] = []
    ruled_rows: list[TokenRow] = []
    for index, row in enumerate(rows):
        if row is not None:
            indices.append(index)
            ruled_rows.append(row)
    if not indices and not log_probs:  # on a GPU each operation spared is a wait for the GIL
        pairs = torch.stack([tokens.double(), highest.double()]).T.tolist()
        return [Choice(int(token), 0.0, logit, True) for token, logit in pairs]
    highest_allowed = highest
    if indices:
        places = torch.tensor(indices, device=logits.device)
        chosen, scores = _ruled(logits[places], ruled_rows)
        tokens = tokens.index_copy(0, places, chosen)
        highest_allowed = highest_allowed.index_copy(0, places, scores)
    scores = torch.zeros_like(highest)
    if log_probs:
        scores = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
    columns = torch.stack(
        [tokens.double(), scores.double(), highest.double(), highest_allowed.double()]
    )
    choices = []
    for token, score, logit, allowed in columns.T.tolist():
        choices.append(Choice(int(token), score, logit, allowed > -math.inf))
    return choices


def processed(logits: Tensor, rows: Sequence[TokenRow]) -> Tensor:
    """Apply rules 1 to 4 to a copy of the logits [rows, vocab]."""
    scores = logits.clone()
    device = logits.device
    bias = _entries([row.bias for row in rows], device)
    if bias is not None:
        scores.index_put_((bias[0].long(), bias[1].long()), bias[2].to(scores), accumulate=True)
    if any(row.temperature != 1 for row in rows):
        scores /= _column([row.temperature for row in rows], scores)
    counts = _entries([row.counts for row in rows], device)
    if counts is not None:
        places = (counts[0].long(), counts[1].long())
        penalties = []
        for row in rows:
            penalties.append((row.repetition_penalty, row.presence_penalty, row.frequency_penalty))
        repeated, present, frequent = torch.tensor(penalties, device=device).T[:, places[0]]
        old = scores[places]
        new = torch.where(old < 0, old * repeated, old / repeated)
        scores[places] = new - present - frequent * counts[2].to(scores)
    barred = _entries([np.asarray(row.barred, np.float64)[:, None] for row in rows], device)
    if barred is not None:
        scores[barred[0].long(), barred[1].long()] = -torch.inf
    guided: list[int] = []
    allowed: list[Array] = []
    for index, row in enumerate(rows):
        if row.allowed is not None:
            guided.append(index)
            allowed.append(row.allowed)
    if guided:
        places = torch.tensor(guided, device=device)
        forbidden = ~torch.from_numpy(np.stack(allowed)).to(device)
        scores[places] = scores[places].masked_fill(forbidden, -torch.inf)
    return scores


def _ruled(logits: Tensor, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Return the tokens that the rules choose, and the highest score that they leave."""
    drafts: list[int] = []
    verified: list[TokenRow] = []
    guessed: list[Array] = []
    for index, row in enumerate(rows):
        if row.guess is not None:
            drafts.append(index)
            verified.append(row)
            guessed.append(row.guess)
    if drafts:
        logits = torch.cat([logits, torch.from_numpy(np.stack(guessed)).to(logits)])
    rows_and_guesses = [*rows, *verified]
    scores = processed(logits, rows_and_guesses)
    highest = scores[: len(rows)].max(dim=-1)
    if not drafts and all(row.greedy for row in rows):
        return highest.indices, highest.values
    weights = distribution(scores, rows_and_guesses)
    uniform = _column([row.uniform for row in rows], weights)
    if not drafts:
        return _drawn(weights, uniform), highest.values
    places = torch.tensor(drafts, device=logits.device)
    targets, guesses = weights.split([len(rows), len(drafts)])
    tokens = torch.tensor([row.draft_token for row in verified], device=logits.device)
    thresholds = [row.acceptance_threshold for row in verified]
    is_accepted, residual, residual_uniform = _verified(
        targets[places], guesses, tokens, uniform[places], thresholds
    )
    targets = targets.index_copy(0, places, residual)
    uniform = uniform.index_copy(0, places, residual_uniform)
    drawn = _drawn(targets, uniform)
    checked = torch.where(is_accepted, tokens, drawn[places])
    return drawn.index_copy(0, places, checked), highest.values


def _verified(
    target: Tensor,
    guess: Tensor,
    draft_tokens: Tensor,
    uniform: Tensor,
    thresholds: Sequence[float | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which draft tokens are accepted, and weights and numbers to draw the others by.

    A token is accepted where p/q is above the uniform number, or at least the draft's threshold;
    else corrected by a draw from max(0, p - q). One number serves both: below the ratio it
    accepts, and the remainder of its range above the ratio is uniform again.
    """
    p = target.gather(1, draft_tokens[:, None])
    q = guess.gather(1, draft_tokens[:, None])
    ratio = torch.where(q > 0, p / q, (p > 0).to(p))
    limits = _column([math.nan if limit is None else limit for limit in thresholds], ratio)
    by_chance = limits.isnan()
    is_accepted = torch.where(by_chance, uniform < ratio, ratio >= limits)
    residual_uniform = torch.where(by_chance, (uniform - ratio) / (1 - ratio), uniform)
    residual = (target - guess).clamp(min=0)
    is_empty = residual.sum(dim=-1, keepdim=True) == 0
    return is_accepted[:, 0], torch.where(is_empty, target, residual), residual_uniform


def distribution(scores: Tensor, rows: Sequence[TokenRow]) -> Tensor:
    """Return the weights to draw the next tokens by [rows, vocab], in double precision; rule 5."""
    vocab_size = scores.shape[-1]
    highest = scores.max(dim=-1, keepdim=True)
    weights = (scores - highest.values).double().exp()  # the likeliest weighs 1
    min_p = [row.min_p for row in rows]
    if any(min_p):
        weights.masked_fill_(weights < _column(min_p, weights), 0)
    top_k = [row.top_k if row.top_k < vocab_size else 0 for row in rows]
    top_p = [row.top_p for row in rows]
    if any(top_k) or min(top_p) < 1:
        _limit(weights, top_k, top_p)
    greedy = torch.tensor([row.greedy for row in rows], device=scores.device)
    certain = torch.zeros_like(weights).scatter_(1, highest.indices, 1)
    weights = torch.where(greedy[:, None], certain, weights)
    return weights / weights.sum(dim=-1, keepdim=True)


def _limit(weights: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> None:
    """Set weights to 0 by top-k and top-p (1 = all); tokens of equal weight stay together."""
    counts = torch.tensor(top_k, device=weights.device)[:, None]
    shares = _column(top_p, weights)
    size = weights.shape[-1]
    if weights.device.type == "cpu":
        size = min(size, max(_CANDIDATES, *top_k))
    ordered = weights.topk(size).values
    lowest = _lowest_weight(weights, ordered, counts, shares)
    if size < weights.shape[-1] and bool(((lowest == 0) & (shares < 1)).any()):
        # A nucleus is larger than the candidates.
        ordered = weights.sort(descending=True).values
        lowest = _lowest_weight(weights, ordered, counts, shares)
    weights.masked_fill_(weights < lowest, 0)


def _lowest_weight(weights: Tensor, ordered: Tensor, counts: Tensor, shares: Tensor) -> Tensor:
    """Return the lowest weight [rows, 1] that stays; 0 if ``ordered`` does not hold the share."""
    edge = torch.where(counts > 0, ordered.gather(1, (counts - 1).clamp(min=0)), 0)
    total = torch.where(weights < edge, 0, weights).sum(dim=-1, keepdim=True)
    sums = ordered.cumsum(dim=-1)
    place = (sums < shares * total).sum(dim=-1, keepdim=True)  # where the nucleus ends
    within = place < ordered.shape[-1]
    nucleus = ordered.gather(1, place.clamp(max=ordered.shape[-1] - 1))
    return torch.where(shares < 1, torch.where(within, torch.maximum(edge, nucleus), 0), edge)


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw token ids [rows], each with a probability proportional to its weight."""
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    # Rounding may make the point reach the total, above which there is no token.
    points = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(sums, points, right=True)[:, 0]
    return places.clamp(max=weights.shape[-1] - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _occurrences(counts: Array) -> Array:
    tokens = counts.nonzero()[0]
    return np.column_stack([tokens, counts[tokens]]).astype(np.float64)


def _entries(tables: Sequence[Array], device: torch.device) -> Tensor | None:
    """Join the rows' tables [n, columns], transposed, with the row's number first."""
    lengths = [len(table) for table in tables]
    if not any(lengths):
        return None
    numbers = np.repeat(np.arange(len(tables)), lengths)
    joined = np.column_stack([numbers, np.concatenate(tables)])
    return torch.from_numpy(joined).to(device).T
