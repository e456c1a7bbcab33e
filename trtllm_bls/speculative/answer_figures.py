"""Figures of one answer over all its rounds: log-probabilities, logits, the engine's metrics.

Every round is an engine request and reports only itself. Here the chunk of a round becomes a chunk
of the answer: it is cut where the answer ended, and sums go on from the rounds before.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_bls.types import EngineChunk, EngineMetrics, FinishReason, SpeculationStats

_COUNTS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("total_accepted_draft_tokens", "total_draft_tokens"),
)


class AnswerFigures:
    """Rewrites the chunks of many requests as the chunks of one."""

    def __init__(self) -> None:
        self._cum_log_prob = 0.0
        self._cum_before = 0.0  # when the running request began
        self._metrics: EngineMetrics | None = None
        self._metrics_before: EngineMetrics | None = None  # of the requests before the running one

    def begin_request(self) -> None:
        """A request to the target begins; what it reports counts from its own beginning."""
        self._cum_before = self._cum_log_prob
        self._metrics_before = self._metrics

    def add(
        self, chunk: EngineChunk, kept: int, finish: FinishReason | None, stats: SpeculationStats
    ) -> EngineChunk:
        """The chunk as the caller sees it: its first ``kept`` tokens, final if ``finish``.

        ``stats``: of all rounds so far.
        """
        entered = EngineChunk(
            token_ids=chunk.token_ids[:kept],
            final=finish is not None,
            finish_reason=finish,
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
        if chunk.metrics is not None:
            self._metrics = _joined(self._metrics_before, chunk.metrics)
        entered.metrics = self._metrics
        return entered


def _joined(so_far: EngineMetrics | None, latest: EngineMetrics) -> EngineMetrics:
    if so_far is None:
        return latest
    sums = {name: _sum(getattr(so_far, name), getattr(latest, name)) for name in _COUNTS}
    return replace(so_far, last_token_time_ns=latest.last_token_time_ns, **sums)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other
