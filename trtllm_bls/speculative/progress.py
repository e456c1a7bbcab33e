"""One answer over the engine requests that make it: what each asks, and what its response adds.

A round is a new engine request whose prompt holds what was generated so far. So what counts from
the start of the answer (``min_tokens``, the limits, stop sequences) is counted here, over all
rounds, and what an engine counts over prompt and answer together (penalties) is passed on
unchanged. A response reports of its own request alone: its chunks become chunks of the answer, cut
where the answer ended, with sums that go on from the rounds before.

An engine sees the tokens of earlier rounds as prompt, and its wire does not say why it ended. So
the ids must show it. With k drafted tokens, m ids in the answer and a of them equal to the draft's
beginning, the target ends each round with one token of its own: m = a + 1. Only where the sequence
ended is that token missing: m = a.

A round that is verified by logits shows its end id instead, because there a missing token would be
ambiguous: some runtimes draw the very token again that they have just rejected. Knows no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile

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

_COUNTS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("total_accepted_draft_tokens", "total_draft_tokens"),
)


def round_seed(seed: int, generated: int, who: str = "target") -> int:
    """63 bits that no two rounds, nor draft and target, share.

    An engine draws from the start of its random stream in every request: one seed for all rounds
    would draw the same numbers again and bend the distribution.
    """
    digest = blake2b(f"{who} {seed} {generated}".encode(), digest_size=8).digest()
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
        most, longest = request.max_tokens, self._capacity.max_sequence_tokens
        if longest is not None:  # a prompt too long is for the target to refuse
            most = min(most, max(1, longest - len(self.ids)))
        self._criteria = StoppingCriteria.of(request, most)
        samples = not request.sampling.is_greedy
        self._by_logits = use_draft_logits and samples
        self._seed = request.sampling.seed
        if self._seed is None and samples:  # the default would repeat each round
            self._seed = secrets.randbits(63)
        self._made = 0  # engine requests
        self._cum_log_prob = 0.0
        self._metrics: EngineMetrics | None = None
        # The same two as they were when the target's running request began.
        self._cum_before = 0.0
        self._metrics_before: EngineMetrics | None = None

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return self._criteria.generated

    @property
    def remaining(self) -> int:
        """Tokens the answer may still have."""
        return self._criteria.max_tokens - self.generated

    @property
    def max_draft(self) -> int:
        """The longest draft whose whole round fits the answer and the engine.

        The engine counts prompt, draft and new tokens against its longest sequence. What follows
        the round has the answer so far as its prompt, which may not exceed the longest prompt.
        """
        most, capacity = self.remaining - 1, self._capacity
        if capacity.max_sequence_tokens is not None:
            most = min(most, (capacity.max_sequence_tokens - len(self.ids) - 1) // 2)
        if capacity.max_prompt_tokens is not None:
            most = min(most, capacity.max_prompt_tokens - len(self.ids) - 1)
        return max(0, most)

    def plain_tokens(self, tokens: int) -> int:
        """How many tokens to decode plainly where ``tokens`` are meant.

        All that remain, if the answer would then be longer than the longest prompt, since no
        further request could continue it.
        """
        longest = self._capacity.max_prompt_tokens
        if longest is not None and len(self.ids) + tokens > longest:
            return self.remaining
        return min(self.remaining, tokens)

    # --- requests -----------------------------------------------------------------------------

    def ask_target(
        self, num_tokens: int, *, streaming: bool = False, draft: Draft | None = None
    ) -> EngineRequest:
        """A request for the next tokens, or to verify ``draft`` in one pass.

        A draft with logits may end with the end id, which is accepted or replaced like any token;
        the target is sent none, so that the answer shows it.
        """
        self._cum_before, self._metrics_before = self._cum_log_prob, self._metrics
        request, wants = self._request, self._request.wants
        if self.generated and wants.context_logits:  # the prompt's came with the first round
            wants = replace(wants, context_logits=False)
        return replace(
            request,
            request_id=self._request_id("target"),
            input_ids=tuple(self.ids),
            max_tokens=num_tokens,
            streaming=streaming,
            sampling=self._sampling(self.generated, "target"),
            end_id=request.end_id if draft is None or draft.logits is None else -1,
            draft=draft,
            wants=wants,
        )

    def ask_draft(self, guessed: Sequence[int], num_tokens: int) -> EngineRequest:
        """A request to the draft model for what follows, taking ``guessed`` as accepted.

        It decodes greedily, since its likeliest token is accepted most often whatever the target
        draws. Only where its logits are used must it draw as it says; then the end id is a token
        like any other, since leaving it out would make the target's distribution another one.
        """
        request, asked = self._request, self._request.sampling
        generated = self.generated + len(guessed)
        # Not while a minimum of tokens forbids the end id, which only the engine can do.
        by_logits = self._by_logits and self._criteria.may_end
        salt = request.cache_salt
        likeliest = Sampling(
            top_k=1,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            no_repeat_ngram_size=asked.no_repeat_ngram_size,
            min_tokens=self._min_tokens(generated),
        )
        return replace(
            request,
            request_id=self._request_id("draft"),
            input_ids=(*self.ids, *guessed),
            max_tokens=num_tokens,
            streaming=False,
            sampling=self._sampling(generated, "draft") if by_logits else likeliest,
            end_id=-1 if by_logits else request.end_id,
            wants=Wants(generation_logits=by_logits),
            guide=None,
            adapter=None,
            # A draft model without salts drafts all the same.
            cache_salt=None if salt is None else salt.optional(),
            extras={},
        )

    def _sampling(self, generated: int, who: str) -> Sampling:
        """The caller's sampling for a request that begins after ``generated`` tokens."""
        sampling, least = self._request.sampling, self._min_tokens(generated)
        seed = None if self._seed is None else round_seed(self._seed, generated, who)
        return replace(sampling, min_tokens=least, seed=seed)

    def _min_tokens(self, generated: int) -> int | None:
        """What is left of the minimum after ``generated`` tokens.

        Later rounds say a minimum of 0 tokens aloud: an engine may take its absence for 1, and
        would then forbid the end id at the beginning of every round.
        """
        least = self._request.sampling.min_tokens
        return max(0, (least or 0) - generated) if generated else least

    def _request_id(self, who: str) -> str:
        self._made += 1
        return f"{self._request.request_id}-{who}-{self._made}"

    # --- responses ----------------------------------------------------------------------------

    def append(self, ids: TokenIds) -> int:
        """Append ids until the answer ends; how many were kept."""
        if self.finish is not None:
            return 0
        kept, self.finish = self._criteria.feed(ids)
        self.ids += kept
        return len(kept)

    def take_round(
        self,
        drafted: TokenIds,
        ids: TokenIds,
        reason: FinishReason | None,
        *,
        shows_end: bool = False,
    ) -> tuple[int, int]:
        """Append what the target answered to ``drafted``; ``reason`` as the engine gave it.

        Returns how many drafted tokens the target accepted, and how many ids the answer keeps.
        ``shows_end``: the target was sent no end id, so it is among ``ids`` if it was drawn.
        """
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(drafted, ids, strict=False))
        accepted = sum(1 for _ in equal)
        kept = self.append(ids)
        missing = not shows_end and _ended(len(drafted), len(ids), accepted, reason)
        if self.finish is None and missing:
            self.finish = reason or FinishReason.END_ID
        return accepted, kept

    def chunk(self, chunk: EngineChunk, kept: int, stats: SpeculationStats) -> EngineChunk:
        """A chunk of the target's as the caller sees it: its first ``kept`` tokens, final if the
        answer is complete. ``stats``: of all rounds so far."""
        entered = EngineChunk(
            token_ids=chunk.token_ids[:kept],
            final=self.finish is not None,
            finish_reason=self.finish,
            context_logits=chunk.context_logits,
            speculation=stats,
            cached_tokens=chunk.cached_tokens,
        )
        if chunk.log_probs is not None:
            entered.log_probs = chunk.log_probs[:kept]
            self._cum_log_prob += sum(entered.log_probs)
            entered.cum_log_prob = self._cum_log_prob
        elif chunk.cum_log_prob is not None:
            self._cum_log_prob = entered.cum_log_prob = self._cum_before + chunk.cum_log_prob
        if chunk.top_log_probs is not None:
            entered.top_log_probs = chunk.top_log_probs[:kept]
        if chunk.generation_logits is not None:
            entered.generation_logits = chunk.generation_logits[:kept]
        if (metrics := chunk.metrics) is not None:
            if (before := self._metrics_before) is not None:
                sums = {}
                for name in _COUNTS:
                    counts = [getattr(figures, name) for figures in (before, metrics)]
                    known = [count for count in counts if count is not None]
                    sums[name] = sum(known) if known else None
                metrics = replace(before, last_token_time_ns=metrics.last_token_time_ns, **sums)
            self._metrics = metrics
        entered.metrics = self._metrics
        return entered


def _ended(drafted: int, answered: int, accepted: int, reason: FinishReason | None) -> bool:
    if reason in (FinishReason.END_ID, FinishReason.STOP):
        return True
    if answered > accepted + 1:  # an engine that ignored the draft, and decoded drafted + 1 tokens
        return answered <= drafted
    return answered == accepted
