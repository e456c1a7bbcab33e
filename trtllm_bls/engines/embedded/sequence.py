"""One running sequence, and the submission through which its chunks reach its caller.

Decides when a sequence ends and what its chunks hold. Where its tokens are computed, and on which
thread, is not known here.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.engines.embedded.guides import GrammarMatcher
from trtllm_bls.engines.embedded.runner import Segment
from trtllm_bls.engines.sampling import TokenSampler, log_prob
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.stopping import StoppingCriteria
from trtllm_bls.types import (
    Array,
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
)

Event: TypeAlias = EngineChunk | EngineError | InvalidRequest


@dataclass(eq=False)
class Submission:
    """One request of ``unfinished`` sequences, whose events go to ``chunks`` on ``loop``.

    Once it is ``cancelled``, which any thread may do, it ends within a step.
    """

    unfinished: int
    chunks: QueuedChunks
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    def deliver(self, event: Event) -> None:
        """Hand an event on; called on the loop."""
        if isinstance(event, EngineChunk):
            self.chunks.put([event])
            self.unfinished -= event.final
        else:
            self.chunks.fail(event)
            self.unfinished = 0
        if not self.unfinished:
            self.ended.set()


class Sequence:
    """Number ``index`` of its request; ``owner`` gets its chunks. ``capacity``: the engine's own.

    ``guide`` is this sequence's alone.
    """

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        capacity: EngineCapacity,
        owner: Submission,
        guide: GrammarMatcher | None = None,
    ) -> None:
        assert capacity.vocab_size is not None and capacity.max_sequence_tokens is not None
        self.request, self.index, self.owner = request, index, owner
        self.tokens = list(request.input_ids)
        self.slot: int | None = None
        self.computed = 0  # tokens whose keys and values the slot holds
        self.finish: FinishReason | None = None
        self._vocab_size, length = capacity.vocab_size, capacity.max_sequence_tokens
        self._guide = guide
        self._sampler = TokenSampler(request, index, self._vocab_size, guide)
        room = length - len(self.tokens)
        self._criteria = StoppingCriteria.of(request, min(request.max_tokens, room))
        self._draft = request.draft.token_ids[:room] if request.draft else ()
        wants = request.wants
        wanted = wants.log_probs or wants.generation_logits or wants.context_logits
        self.needs_rows = wanted or self._sampler.needs_row  # beyond the best token of each
        self._reported = len(self.tokens)
        self._accepted = 0
        self._cum_log_prob = 0.0
        self._log_probs: list[float] = []
        self._logits: list[Array] = []
        self._context: list[Array] = []
        self._metrics = {"arrival_time_ns": time.monotonic_ns()}

    @property
    def reads_prompt(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < len(self.request.input_ids)

    @property
    def num_rows(self) -> int:
        """Tokens to be computed before the next one can be chosen, and the draft after them."""
        return len(self.tokens) - self.computed + len(self._draft)

    def start(self, slot: int, reused: int) -> None:
        """It has a slot, which holds its first ``reused`` tokens already."""
        self.slot, self.computed = slot, reused
        self._metrics["first_scheduled_time_ns"] = time.monotonic_ns()
        self._metrics["kv_cache_reused_blocks"] = reused

    def segment(self, most: int) -> Segment:
        """Its next rows: all that is left, draft included, or a piece of ``most`` tokens."""
        assert self.slot is not None
        tokens, keep = [*self.tokens[self.computed :], *self._draft], 1 + len(self._draft)
        if len(tokens) > most:
            # A draft is verified in one piece. One row at least is kept, to see NaN early.
            tokens, keep = tokens[: min(most, len(tokens) - keep)], 1
        if self.request.wants.context_logits and self.reads_prompt:
            keep = len(tokens)
        return Segment(self.slot, self.computed, tokens, keep)

    def computed_to(self, end: int, best: list[int], rows: Array | None) -> None:
        """Its tokens up to ``end`` are computed, and perhaps its draft: choose what comes next.

        ``best`` and ``rows`` [kept, vocab] are of the last rows of what was computed; rows only
        where ``needs_rows``. Raises ``EngineError`` where no token can be chosen.
        """
        if self.request.wants.context_logits and rows is not None and self.reads_prompt:
            self._context.append(rows[: len(self.request.input_ids) - self.computed].copy())
        self.computed = end
        if end < len(self.tokens):
            return
        if self._guide is not None and self._guide.ended:
            self.finish = FinishReason.END_ID  # nothing may follow the prompt
            return
        for place, drafted in enumerate([*self._draft, None]):
            row = None if rows is None else rows[place - len(self._draft) - 1]
            token = best[place - len(self._draft) - 1]
            if row is not None and self._sampler.needs_row:
                token = self._sampler.choose(row, place)
            self._accepted += token == drafted
            self._take(token, row)
            if self.finish or token != drafted:
                break
        if self._draft:  # verified, and so finished, whatever it asked for
            self.finish = self.finish or FinishReason.LENGTH

    def chunk(self) -> EngineChunk | None:
        """What is new and may leave now; of a non-streaming sequence all of it, at its end."""
        new = tuple(self.tokens[self._reported :])
        if not self.finish and not (new and self.request.streaming):
            return None
        wants, logits, metrics = self.request.wants, None, None
        reused = self._metrics.get("kv_cache_reused_blocks", 0)
        if wants.generation_logits:
            logits = np.array(self._logits, dtype=np.float32).reshape(-1, self._vocab_size)
        if wants.perf_metrics:  # on every response, as TensorRT-LLM sends them
            metrics = EngineMetrics(  # a block is one token here
                kv_cache_alloc_new_blocks=self.computed - reused,
                kv_cache_alloc_total_blocks=self.computed,
                total_accepted_draft_tokens=self._accepted,
                total_draft_tokens=len(self._draft),
                **self._metrics,
            )
        chunk = EngineChunk(
            token_ids=new,
            sequence_index=self.index,
            final=self.finish is not None,
            finish_reason=self.finish,
            log_probs=tuple(self._log_probs) if wants.log_probs else None,
            cum_log_prob=self._cum_log_prob if wants.log_probs else None,
            context_logits=np.concatenate(self._context) if self._context else None,
            generation_logits=logits,
            metrics=metrics,
            cached_tokens=reused if self._reported == len(self.request.input_ids) else None,
        )
        self._reported = len(self.tokens)
        self._log_probs, self._logits, self._context = [], [], []
        return chunk

    def _take(self, token: int, row: Array | None) -> None:
        """Make the token part of the text, unless it is the end token, and see whether it ends."""
        self._metrics["last_token_time_ns"] = time.monotonic_ns()
        self._metrics.setdefault("first_token_time_ns", self._metrics["last_token_time_ns"])
        kept, self.finish = self._criteria.feed((token,))
        if not kept:
            return
        self.tokens.append(token)
        self._sampler.push(token)
        if row is not None and self.request.wants.log_probs:
            self._log_probs.append(log_prob(row, token))
            self._cum_log_prob += self._log_probs[-1]
        if row is not None and self.request.wants.generation_logits:
            self._logits.append(row.copy())  # the row is part of the whole step's array
        if self._guide is not None and self._guide.ended and self.finish is not FinishReason.STOP:
            self.finish = FinishReason.END_ID
