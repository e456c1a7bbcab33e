"""An engine whose next token is a pure function: for tests, benchmarks, servers without a model.

Keeps the whole contract of ``engines.base.Engine``: drafts by id and by logits, end id, stop
sequences, sampling by seed, several sequences, limits. Time is only slept: the steps of each
request follow a schedule of their own, and a batch limit makes steps wait for one another. Without
times it never waits, but still yields to the event loop once per step, so that a reader can be
cancelled anywhere. ``scripted_tokens`` decides which token comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np

from doubles.generated import GeneratedChunks
from doubles.scripted_tokens import Choice, Rule, RuleSampler
from trtllm_bls.engines.base import ChunkStream
from trtllm_bls.engines.request_checks import check_request
from trtllm_bls.errors import EngineUnavailable, InvalidRequest
from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import (
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What kind of engine it plays. Times are seconds.

    ``batch_limit`` counts token rows: a step of more rows than that makes later steps wait.
    ``one_step`` plays an engine built for external drafts, which ends every request after one
    step; ``tells_reason`` false plays Triton's wire, which never says why a request ended.
    ``cached_tokens``: what it says of every prompt.
    """

    name: str = "scripted"
    vocab_size: int = 1000
    max_sequence_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_draft_tokens: int | None = None
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0  # per prompt token
    batch_limit: int | None = None
    one_step: bool = False
    tells_reason: bool = True
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, from the request numbered ``after_requests`` (0 = the first) on.

    ``error`` is raised once the request has ``after_tokens`` tokens; ``None`` means that it never
    answers again. ``capacity`` tells whether asking for the capacity goes wrong in the same way.
    """

    error: Exception | None = None
    after_requests: int = 0
    after_tokens: int = 0
    capacity: bool = False


class ScriptedEngine:
    """An ``Engine`` that plays ``rule``; ``fault`` may be set and cleared while it runs.

    For tests: ``requests`` are all it was given, ``cancelled`` the ids of those left before their
    end, ``live`` the number running now.
    """

    def __init__(self, rule: Rule, script: Script | None = None) -> None:
        self.script = script or Script()
        self.name = self.script.name
        self.fault: Fault | None = None
        self.requests: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.live = 0
        self._rule = rule
        self._capacity = EngineCapacity(
            vocab_size=self.script.vocab_size,
            max_sequence_tokens=self.script.max_sequence_tokens,
            max_prompt_tokens=self.script.max_prompt_tokens,
            max_draft_tokens=self.script.max_draft_tokens,
            may_be_one_step=self.script.one_step,
        )
        self._closed = False
        self._free_at = 0.0  # loop time at which the batch is free again

    async def capacity(self) -> EngineCapacity:
        if self.fault is not None and self.fault.capacity:
            await _go_wrong(self.fault)
        return self._capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        return GeneratedChunks(self._chunks(request))

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        number = len(self.requests)
        self.requests.append(request)
        _check(request, self._capacity)
        self.live += 1
        answered = False
        try:
            running = _ScriptedRequest(self._rule, request, self.script)
            due = asyncio.get_running_loop().time()
            due += self.script.prefill_seconds * len(request.input_ids)
            while running.open:
                await self._raise_fault(number, running.num_tokens)
                due = await self._step(due, running.num_rows)
                chunks = running.step()
                answered = not running.open
                for chunk in chunks:
                    yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            if not answered:
                self.cancelled.append(request.request_id)
            raise
        finally:
            self.live -= 1

    async def close(self) -> None:
        self._closed = True

    async def _step(self, due: float, num_rows: int) -> float:
        """Sleep until the step that may begin at loop time ``due`` is done; say when that was."""
        limit = self.script.batch_limit
        begin = max(due, self._free_at) if limit else due
        if limit:
            self._free_at = begin + self.script.step_seconds * num_rows / limit
        done = begin + self.script.step_seconds
        await asyncio.sleep(max(0.0, done - asyncio.get_running_loop().time()))
        return done

    async def _raise_fault(self, number: int, num_tokens: int) -> None:
        if self._closed:
            raise EngineUnavailable(f"{self.name}: the engine is closed")
        fault = self.fault
        if fault is None or number < fault.after_requests or num_tokens < fault.after_tokens:
            return
        await _go_wrong(fault)


def _check(request: EngineRequest, capacity: EngineCapacity) -> None:
    check_request(request, capacity)
    if request.draft is not None and not request.draft.token_ids:
        raise InvalidRequest("draft_input_ids", "a draft without tokens")


async def _go_wrong(fault: Fault) -> None:
    if fault.error is not None:
        raise fault.error.with_traceback(None)  # else it keeps the frames of every raise
    await asyncio.get_running_loop().create_future()


class _ScriptedRequest:
    """One running request: its sequences, and the chunks of each step."""

    def __init__(self, rule: Rule, request: EngineRequest, script: Script) -> None:
        self._sequences = [
            _ScriptedSequence(
                request, index, RuleSampler(rule, request, script.vocab_size, index), script
            )
            for index in range(request.num_return_sequences)
        ]
        self._streaming = request.streaming

    @property
    def open(self) -> bool:
        return any(not sequence.done for sequence in self._sequences)

    @property
    def num_rows(self) -> int:
        return sum(sequence.num_rows for sequence in self._sequences if not sequence.done)

    @property
    def num_tokens(self) -> int:
        return max(sequence.generated for sequence in self._sequences)

    def step(self) -> list[EngineChunk]:
        stepped = [sequence for sequence in self._sequences if not sequence.done]
        for sequence in stepped:
            sequence.step()
        return [each.take_chunk() for each in stepped if each.done or self._streaming]


class _ScriptedSequence:
    """One answer of a request: its context, and what was chosen since the last chunk."""

    def __init__(
        self, request: EngineRequest, index: int, sampler: RuleSampler, script: Script
    ) -> None:
        self.done = False
        self._request = request
        self._index = index
        self._sampler = sampler
        self._script = script
        self._context = list(request.input_ids)
        self._chosen: list[Choice] = []
        self._reason: FinishReason | None = None
        most = request.max_tokens
        if script.max_sequence_tokens is not None:
            most = min(most, script.max_sequence_tokens - len(request.input_ids))
        self._criteria = StoppingCriteria.of(request, most)
        self._cum_log_prob = 0.0
        self._accepted = 0
        self._chunks = 0

    @property
    def generated(self) -> int:
        return self._criteria.generated

    @property
    def num_rows(self) -> int:
        return 1 + (len(self._request.draft.token_ids) if self._request.draft else 0)

    def step(self) -> None:
        """One pass: one token, or the accepted part of the draft and one more."""
        drafted = self._request.draft.token_ids if self._request.draft else ()
        for place, guess in enumerate(drafted):
            self._add(self._sampler.choose(self._context, place))
            if self.done or self._context[-1] != guess:
                break
            self._accepted += 1
        else:
            self._add(self._sampler.choose(self._context))
        self.done = self.done or bool(drafted) or self._script.one_step

    def take_chunk(self) -> EngineChunk:
        chosen, self._chosen = self._chosen, []
        wants, first = self._request.wants, self._chunks == 0
        self._chunks += 1
        self._cum_log_prob += sum(choice.log_prob for choice in chosen)
        logits = [choice.logits for choice in chosen if choice.logits is not None]
        empty = np.zeros((0, self._script.vocab_size))
        prompt = self._request.input_ids
        return EngineChunk(
            token_ids=tuple(choice.token for choice in chosen),
            sequence_index=self._index,
            final=self.done,
            finish_reason=self._reason if self._script.tells_reason else None,
            log_probs=tuple(c.log_prob for c in chosen) if wants.log_probs else None,
            cum_log_prob=self._cum_log_prob if wants.log_probs else None,
            context_logits=(
                self._sampler.context_logits(prompt) if wants.context_logits and first else None
            ),
            generation_logits=(
                (np.stack(logits) if logits else empty) if wants.generation_logits else None
            ),
            metrics=self._metrics() if wants.perf_metrics else None,
            cached_tokens=self._script.cached_tokens if first else None,
        )

    def _add(self, choice: Choice) -> None:
        kept, self._reason = self._criteria.feed((choice.token,))
        self.done = self._reason is not None
        if not kept:
            return
        self._context.append(choice.token)
        self._sampler.push(choice.token)
        self._chosen.append(choice)

    def _metrics(self) -> EngineMetrics:
        return EngineMetrics(
            kv_cache_alloc_new_blocks=1,
            kv_cache_reused_blocks=0,
            kv_cache_alloc_total_blocks=1,
            total_accepted_draft_tokens=self._accepted,
            total_draft_tokens=self.num_rows - 1,
        )
