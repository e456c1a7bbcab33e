"""One running sequence: its tokens, how far they are computed, when it ends, what it reports.

Decides the end of a sequence and the shape of its chunks. Where its tokens are computed and who
reads its chunks is not known here.
"""

from __future__ import annotations

import time

import numpy as np

from trtllm_bls.engines.embedded.sampling import Chooser, ends_with, log_prob
from trtllm_bls.engines.embedded.submission import Submission
from trtllm_bls.messages import Array, EngineChunk, EngineMetrics, EngineRequest, FinishReason


class Sequence:
    """``index`` counts the sequences of one request; ``owner`` is whoever receives the chunks."""

    def __init__(
        self, request: EngineRequest, index: int, vocab_size: int, length: int, owner: Submission
    ) -> None:
        self.request, self.index, self.owner = request, index, owner
        self.chooser = Chooser(request, index, vocab_size)
        self.tokens = list(request.input_ids)
        self._vocab_size = vocab_size
        room = length - len(self.tokens)
        self.draft = request.draft.token_ids[:room] if request.draft else ()
        self.leader: Sequence | None = None  # whose prompt this sequence will share
        self.slot: int | None = None
        self.computed = 0  # tokens whose keys and values the slot holds
        self.finish: FinishReason | None = None
        self._max_tokens = min(request.max_tokens, room)
        self._reported = len(self.tokens)
        self._reused = self._accepted = 0
        self._log_probs: list[float] = []
        self._logits: list[Array] = []
        self._context: list[Array] | None = [] if request.wants.context_logits else None
        self._cum_log_prob = 0.0
        self._arrived = time.monotonic_ns()
        self._scheduled = self._first_token = self._last_token = self._arrived

    @property
    def pending(self) -> list[int]:
        """Tokens that are not computed yet; more than one only while it reads its prompt."""
        return self.tokens[self.computed :]

    @property
    def waits(self) -> bool:
        """Whether the prompt it shares is still being computed by its leader."""
        leader = self.leader
        return (
            leader is not None
            and not leader.finish
            and leader.computed < len(self.request.input_ids)
        )

    @property
    def needs_rows(self) -> bool:
        """Whether raw logits are wanted, beyond the best token of each row."""
        wants = self.request.wants
        by_logits = self.request.draft is not None and self.request.draft.logits is not None
        return (
            self.chooser.needs_row
            or by_logits
            or wants.log_probs
            or wants.generation_logits
            or wants.context_logits
        )

    def start(self, slot: int, reused: int) -> None:
        """It has a slot, which holds its first ``reused`` tokens already."""
        self.slot, self.computed, self._reused = slot, reused, reused
        self._scheduled = time.monotonic_ns()

    @property
    def reads_prompt(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < len(self.request.input_ids)

    def computed_to(self, end: int, best: list[int], rows: Array | None) -> None:
        """Its tokens up to ``end`` are computed, and perhaps its draft: choose what comes next.

        ``best`` and ``rows`` [kept, vocab] are of the last rows of what was computed; rows only
        where ``needs_rows``. Raises ``EngineError`` where no token can be chosen.
        """
        if self._context is not None and rows is not None and self.reads_prompt:
            self._context.append(rows[: len(self.request.input_ids) - self.computed].copy())
        self.computed = end
        if end >= len(self.tokens):
            kept = 1 + len(self.draft)
            self._advance(best[-kept:], None if rows is None else rows[-kept:])

    def _advance(self, best: list[int], rows: Array | None) -> None:
        """Choose the next token, or verify the draft.

        A verified request is finished after its one pass, whatever it asked for.
        """
        for place in range(len(self.draft) + 1):
            drafted = self.draft[place] if place < len(self.draft) else None
            row = None if rows is None else rows[place]
            token = self._choose(place, drafted, best[place], row)
            self._accepted += token == drafted
            self._take(token, row)
            if self.finish or token != drafted:
                break
        if self.draft:
            self.finish = self.finish or FinishReason.LENGTH

    def chunk(self) -> EngineChunk | None:
        """What is new and may leave now; a non-streaming sequence speaks once, at its end."""
        new = tuple(self.tokens[self._reported :])
        if not self.finish and not (new and self.request.streaming):
            return None
        self._reported = len(self.tokens)
        wants, context = self.request.wants, self._context
        log_probs, self._log_probs = self._log_probs, []
        logits, self._logits = self._logits, []
        self._context = None
        return EngineChunk(
            token_ids=new,
            sequence_index=self.index,
            final=self.finish is not None,
            finish_reason=self.finish,
            log_probs=tuple(log_probs) if wants.log_probs else None,
            cum_log_prob=self._cum_log_prob if wants.log_probs else None,
            context_logits=np.concatenate(context) if context else None,
            generation_logits=self._stacked(logits) if wants.generation_logits else None,
            metrics=self._metrics() if self.finish and wants.perf_metrics else None,
        )

    def _choose(self, place: int, drafted: int | None, best: int, row: Array | None) -> int:
        draft = self.request.draft
        if row is None:
            return best
        if drafted is not None and draft is not None and draft.logits is not None:
            draft_row = np.asarray(draft.logits[place], dtype=np.float32)
            return self.chooser.verify(row, drafted, draft_row, draft.acceptance_threshold)
        return self.chooser.choose(row) if self.chooser.needs_row else best

    def _take(self, token: int, row: Array | None) -> None:
        """Make the token part of the text, unless it is the end token, and see whether it ends."""
        self._last_token = time.monotonic_ns()
        generated = len(self.tokens) - len(self.request.input_ids)
        if not generated:
            self._first_token = self._last_token
        if token == self.request.end_id:
            self.finish = FinishReason.END_ID
            return
        self.tokens.append(token)
        self.chooser.push(token)
        if row is not None and self.request.wants.log_probs:
            self._log_probs.append(log_prob(row, token))
            self._cum_log_prob += self._log_probs[-1]
        if row is not None and self.request.wants.generation_logits:
            self._logits.append(row.copy())  # the row is part of the whole step's array
        if self._stopped():
            self.finish = FinishReason.STOP
        elif generated + 1 >= self._max_tokens:
            self.finish = FinishReason.LENGTH

    def _stopped(self) -> bool:
        """Stop sequences count generated tokens only, and from ``min_tokens`` on."""
        stops = self.request.stop_sequences
        if not stops:
            return False
        first = len(self.request.input_ids)
        if len(self.tokens) - first < (self.request.sampling.min_tokens or 0):
            return False
        tail = self.tokens[max(first, len(self.tokens) - max(map(len, stops))) :]
        return any(ends_with(tail, stop) for stop in stops)

    def _stacked(self, rows: list[Array]) -> Array:
        return np.stack(rows) if rows else np.empty((0, self._vocab_size), dtype=np.float32)

    def _metrics(self) -> EngineMetrics:
        """A block is one token here."""
        return EngineMetrics(
            kv_cache_alloc_new_blocks=self.computed - self._reused,
            kv_cache_reused_blocks=self._reused,
            kv_cache_alloc_total_blocks=self.computed,
            arrival_time_ns=self._arrived,
            first_scheduled_time_ns=self._scheduled,
            first_token_time_ns=self._first_token,
            last_token_time_ns=self._last_token,
            total_accepted_draft_tokens=self._accepted,
            total_draft_tokens=len(self.draft),
        )
