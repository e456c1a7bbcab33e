"""Progress of one answer over its engine requests: their contents, and the gain of each response.

A round is a new engine request whose prompt holds the tokens generated so far. ``min_tokens``, the
limits and stop sequences count from the start of the answer, so this module counts them over all
rounds. Penalties count over prompt and answer together, so the engine gets them unchanged. A
response reports on its own request alone: its chunks become chunks of the answer, cut where the
answer ended, with sums that go on from the rounds before.

An engine sees the tokens of earlier rounds as prompt, and its wire gives no reason for its end. So
the ids must show it. With k drafted tokens, m ids in the answer and a of them equal to the draft's
beginning, the target ends each round with one token of its own: m = a + 1. That token is missing
only if the sequence ended: m = a.

A round that is verified by logits shows its end id instead, because there a missing token would be
ambiguous: some runtimes draw the very token again that they have just rejected. Knows no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from trtllm_bls.speculative.ngrams import num_equal
from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import (
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    Sampling,
    SpeculationStats,
    TokenIds,
    Wants,
)

# The fields of ``EngineMetrics`` that add up over an answer's engine requests.
_COUNTS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


def round_seed(seed: int, generated: int, role: str = "target") -> int:
    """Return 63 bits that differ for each round, and for draft and target.

    An engine draws from the start of its random stream in every request: one seed for all rounds
    would draw the same numbers again and bend the distribution.
    """
    digest = blake2b(f"{role} {seed} {generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Progress:
    """The prompt and the answer so far; ``finish`` is set once the answer is complete."""

    def __init__(
        self,
        request: EngineRequest,
        capacity: EngineCapacity | None = None,
        *,
        use_draft_logits: bool = False,
    ) -> None:
        self.ids = list(request.input_ids)
        self.finish: FinishReason | None = None
        self._request = request
        self._capacity = capacity or EngineCapacity()
        max_tokens = request.max_tokens
        max_sequence_tokens = self._capacity.max_sequence_tokens
        if max_sequence_tokens is not None:
            # A prompt that is too long still asks for one token: the target refuses it.
            max_tokens = min(max_tokens, max(1, max_sequence_tokens - len(self.ids)))
        self._criteria = StoppingCriteria.of(request, max_tokens)
        samples = not request.sampling.is_greedy
        self._by_logits = use_draft_logits and samples
        self._seed = request.sampling.seed
        if self._seed is None and samples:  # an engine's default would draw the same each round
            self._seed = secrets.randbits(63)
        self._num_engine_requests = 0
        self._cum_log_prob = 0.0
        self._metrics: EngineMetrics | None = None
        # The same two as they were when the target's running request began.
        self._cum_log_prob_base = 0.0
        self._metrics_base: EngineMetrics | None = None

    @property
    def generated(self) -> int:
        """Number of the answer's tokens so far."""
        return self._criteria.generated

    @property
    def remaining(self) -> int:
        """Number of tokens that the answer may still have."""
        return self._criteria.max_tokens - self.generated

    @property
    def max_draft(self) -> int:
        """The longest draft whose whole round fits the answer and the engine.

        The engine counts prompt, draft and new tokens against its longest sequence. The request
        after the round has the answer so far in its prompt, which may not exceed the longest
        prompt.
        """
        capacity = self._capacity
        limit = self.remaining - 1
        if capacity.max_sequence_tokens is not None:
            limit = min(limit, (capacity.max_sequence_tokens - len(self.ids) - 1) // 2)
        if capacity.max_prompt_tokens is not None:
            limit = min(limit, capacity.max_prompt_tokens - len(self.ids) - 1)
        return max(0, limit)

    def plain_tokens(self, tokens: int) -> int:
        """Return the number of tokens to decode plainly where ``tokens`` are meant.

        It is all that remain if the answer would then be longer than the longest prompt, since no
        further request could continue it.
        """
        max_prompt_tokens = self._capacity.max_prompt_tokens
        if max_prompt_tokens is not None and len(self.ids) + tokens > max_prompt_tokens:
            return self.remaining
        return min(self.remaining, tokens)

    # --- requests -----------------------------------------------------------------------------

    def ask_target(
        self, num_tokens: int, *, streaming: bool = False, draft: Draft | None = None
    ) -> EngineRequest:
        """Make a request for the next tokens, or to verify ``draft`` in one pass.

        A draft with logits may end with the end id, which the target accepts or replaces like any
        token. The target's request then has no end id, so that the answer shows it.
        """
        self._cum_log_prob_base = self._cum_log_prob
        self._metrics_base = self._metrics
        request = self._request
        wants = request.wants
        if self.generated and wants.context_logits:  # the prompt's came with the first round
            wants = replace(wants, context_logits=False)
        end_id = request.end_id
        if draft is not None and draft.logits is not None:
            end_id = -1
        return replace(
            request,
            request_id=self._request_id("target"),
            input_ids=tuple(self.ids),
            max_tokens=num_tokens,
            streaming=streaming,
            sampling=self._sampling(self.generated, "target"),
            end_id=end_id,
            draft=draft,
            wants=wants,
        )

    def ask_draft(self, guessed: Sequence[int], num_tokens: int) -> EngineRequest:
        """Make a request to the draft model for the tokens after ``guessed``, taken as accepted.

        The draft model decodes greedily, since its likeliest token is accepted most often whatever
        the target draws. Only if its logits are used must it draw from them. The end id is then a
        token like any other: leaving it out would change the target's distribution.
        """
        request = self._request
        generated = self.generated + len(guessed)
        # While a minimum of tokens forbids the end id, logits cannot be used: only the engine can
        # forbid it.
        by_logits = self._by_logits and self._criteria.may_end
        salt = request.cache_salt
        if by_logits:
            sampling = self._sampling(generated, "draft")
        else:
            sampling = self._greedy_sampling(generated)
        return replace(
            request,
            request_id=self._request_id("draft"),
            input_ids=(*self.ids, *guessed),
            max_tokens=num_tokens,
            streaming=False,
            sampling=sampling,
            end_id=-1 if by_logits else request.end_id,
            wants=Wants(generation_logits=by_logits),
            guide=None,
            adapter=None,
            # A draft model without salts drafts all the same.
            cache_salt=None if salt is None else salt.optional(),
            extras={},
        )

    def _greedy_sampling(self, generated: int) -> Sampling:
        """Return the likeliest token's sampling, with the caller's penalties."""
        sampling = self._request.sampling
        return Sampling(
            top_k=1,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            min_tokens=self._min_tokens(generated),
        )

    def _sampling(self, generated: int, role: str) -> Sampling:
        """Return the caller's sampling for a request that begins after ``generated`` tokens."""
        seed = None if self._seed is None else round_seed(self._seed, generated, role)
        min_tokens = self._min_tokens(generated)
        return replace(self._request.sampling, min_tokens=min_tokens, seed=seed)

    def _min_tokens(self, generated: int) -> int | None:
        """Return the minimum that remains after ``generated`` tokens.

        Later rounds send even a minimum of 0 tokens: an engine may take its absence for 1, and
        would then forbid the end id at the beginning of every round.
        """
        min_tokens = self._request.sampling.min_tokens
        if not generated:
            return min_tokens
        return max(0, (min_tokens or 0) - generated)

    def _request_id(self, role: str) -> str:
        self._num_engine_requests += 1
        return f"{self._request.request_id}-{role}-{self._num_engine_requests}"

    # --- responses ----------------------------------------------------------------------------

    def append(self, ids: TokenIds) -> int:
        """Append ids until the answer ends, and return how many belong to it."""
        if self.finish is not None:
            return 0
        answer_ids, self.finish = self._criteria.feed(ids)
        self.ids += answer_ids
        return len(answer_ids)

    def take_round(
        self,
        drafted_ids: TokenIds,
        ids: TokenIds,
        reason: FinishReason | None,
        *,
        shows_end: bool = False,
    ) -> tuple[int, int]:
        """Append the target's response to a draft; ``reason`` is the engine's.

        Returns how many drafted tokens the target accepted, and how many ids the answer keeps.
        ``shows_end``: the target's request had no end id, so it is among ``ids`` if it was drawn.
        """
        num_accepted = num_equal(drafted_ids, ids)
        num_kept = self.append(ids)
        has_ended = not shows_end and _has_ended(len(drafted_ids), len(ids), num_accepted, reason)
        if self.finish is None and has_ended:
            self.finish = reason or FinishReason.END_ID
        return num_accepted, num_kept

    def chunk(self, chunk: EngineChunk, num_kept: int, stats: SpeculationStats) -> EngineChunk:
        """Return the answer's chunk for one of the target's: its first ``num_kept`` tokens.

        It is final if the answer is complete. ``stats`` count all rounds so far.
        """
        answer_chunk = EngineChunk(
            token_ids=chunk.token_ids[:num_kept],
            final=self.finish is not None,
            finish_reason=self.finish,
            context_logits=chunk.context_logits,
            speculation=stats,
            cached_tokens=chunk.cached_tokens,
        )
        if chunk.log_probs is not None:
            answer_chunk.log_probs = chunk.log_probs[:num_kept]
            self._cum_log_prob += sum(answer_chunk.log_probs)
            answer_chunk.cum_log_prob = self._cum_log_prob
        elif chunk.cum_log_prob is not None:
            self._cum_log_prob = self._cum_log_prob_base + chunk.cum_log_prob
            answer_chunk.cum_log_prob = self._cum_log_prob
        if chunk.top_log_probs is not None:
            answer_chunk.top_log_probs = chunk.top_log_probs[:num_kept]
        if chunk.generation_logits is not None:
            answer_chunk.generation_logits = chunk.generation_logits[:num_kept]
        if chunk.metrics is not None:
            self._metrics = _add_metrics(self._metrics_base, chunk.metrics)
        answer_chunk.metrics = self._metrics
        return answer_chunk


def _add_metrics(base: EngineMetrics | None, metrics: EngineMetrics) -> EngineMetrics:
    """Return the metrics of an answer: those of its engine requests so far, and of one more."""
    if base is None:
        return metrics
    sums: dict[str, int | None] = {}
    for name in _COUNTS:
        total = getattr(base, name)
        count = getattr(metrics, name)
        if total is None:
            sums[name] = count
        elif count is None:
            sums[name] = total
        else:
            sums[name] = total + count
    return replace(base, last_token_time_ns=metrics.last_token_time_ns, **sums)


def _has_ended(
    num_drafted: int, num_ids: int, num_accepted: int, reason: FinishReason | None
) -> bool:
    """Return true if the target's sequence ended before its own token of the round."""
    if reason in (FinishReason.END_ID, FinishReason.STOP):
        return True
    if num_ids > num_accepted + 1:
        # The engine ignored the draft, and decoded up to ``num_drafted + 1`` tokens of its own.
        return num_ids <= num_drafted
    return num_ids == num_accepted
