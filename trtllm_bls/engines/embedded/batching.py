"""The embedded engine: sequences, the steps that compute them, and the thread that runs steps.

``Sequence`` decides when a sequence ends, and makes its chunks. ``Batcher`` chooses the sequences
that run, and plans each step. ``EmbeddedEngine`` owns the thread, the queue limit and delivery (one
wake-up per step and event loop, however many tokens the step made).

One step is one forward pass over all running sequences: the next token of each, drafts to be
verified, and as much of waiting prompts as fits. Sequences join and leave between any two steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.engines.embedded.attention import Segment
from trtllm_bls.engines.embedded.guides import GrammarMatcher, Guides
from trtllm_bls.engines.embedded.model import load
from trtllm_bls.engines.embedded.runner import Runner
from trtllm_bls.engines.embedded.sampling import Choice, TokenRow, TokenRules, choose
from trtllm_bls.engines.request_checks import check_request
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import (
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    Array,
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    TokenIds,
)
from trtllm_bls.wire.request_fields import required_inputs

_QUEUE_SIZE = 1024  # where the parameter leaves it to the engine
_SHORT_ROWS = 64  # rows of a draft round or a chat's next turn, which may pass a long prompt

_log = logging.getLogger(__name__)

EngineEvent: TypeAlias = EngineChunk | EngineError | InvalidRequest


@dataclass(eq=False)
class Submission:
    """A request of ``unfinished`` sequences, whose events go to ``chunks`` on ``loop``.

    Once it is ``cancelled``, which any thread may do, it ends within a step.
    """

    unfinished: int
    chunks: QueuedChunks
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False


class Sequence:
    """A sequence of a request, by its ``index``; ``owner`` gets its chunks.

    ``capacity``: the engine's own. ``guide`` belongs to this sequence alone.
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
        self.request = request
        self.index = index
        self.owner = owner
        self.tokens = list(request.input_ids)
        self.slot: int | None = None
        self.num_computed = 0  # tokens whose keys and values the slot holds
        self.finish: FinishReason | None = None
        self._vocab_size = capacity.vocab_size
        self._rules = TokenRules(request, index, self._vocab_size, guide)
        room = capacity.max_sequence_tokens - len(self.tokens)
        self._criteria = StoppingCriteria.of(request, min(request.max_tokens, room))
        self._draft: TokenIds = ()
        if request.draft is not None:
            self._draft = request.draft.token_ids[:room]
        wants = request.wants
        self.wants_logits = wants.generation_logits or wants.context_logits
        self._num_reported = len(self.tokens)
        self._cum_log_prob = 0.0
        self._log_probs: list[float] = []
        self._logits: list[Array] = []
        self._context: list[Array] = []
        self._metrics = {
            "arrival_time_ns": time.monotonic_ns(),
            "total_accepted_draft_tokens": 0,
            "total_draft_tokens": len(self._draft),
        }

    @property
    def reads_prompt(self) -> bool:
        """True while prompt tokens are still to be computed."""
        return self.num_computed < len(self.request.input_ids)

    @property
    def num_rows(self) -> int:
        """Number of tokens to compute before the next one can be chosen, with the draft."""
        return len(self.tokens) - self.num_computed + len(self._draft)

    def start(self, slot: int, num_reused: int) -> None:
        """Take a slot, which holds the first ``num_reused`` tokens already."""
        self.slot = slot
        self.num_computed = num_reused
        self._metrics["first_scheduled_time_ns"] = time.monotonic_ns()
        self._metrics["kv_cache_reused_blocks"] = num_reused

    def segment(self, limit: int) -> Segment:
        """Return the next rows: all that remain, draft included, or a piece of ``limit`` tokens."""
        assert self.slot is not None
        tokens = [*self.tokens[self.num_computed :], *self._draft]
        keep = 1 + len(self._draft)
        if len(tokens) > limit:
            # A draft is verified in one piece. One row at least is kept, to see NaN early.
            tokens = tokens[: min(limit, len(tokens) - keep)]
            keep = 1
        if self.request.wants.context_logits and self.reads_prompt:
            keep = len(tokens)
        return Segment(self.slot, self.num_computed, tokens, keep)

    def token_rows(self, segment: Segment) -> list[TokenRow | None]:
        """Return the rules for the tokens that follow the kept rows of the segment."""
        if segment.end < len(self.tokens):
            return [None] * segment.keep  # a piece of the prompt, after which none is chosen
        rows = self._rules.rows(self._draft)
        return [None] * (segment.keep - len(rows)) + rows

    def computed_to(self, end: int, choices: list[Choice], logits: Array | None) -> None:
        """Take the next tokens, after those up to ``end`` and perhaps the draft were computed.

        ``choices`` and ``logits`` [kept, vocab] belong to the last rows that were computed; logits
        are there only if ``wants_logits``. Raises ``EngineError`` if no token can be chosen.
        """
        if self.request.wants.context_logits and logits is not None and self.reads_prompt:
            self._context.append(logits[: len(self.request.input_ids) - self.num_computed].copy())
        self.num_computed = end
        if end < len(self.tokens):
            return
        if self._rules.complete:
            self.finish = FinishReason.END_ID  # nothing may follow the prompt
            return
        for position, draft_token in enumerate([*self._draft, None]):
            row = position - len(self._draft) - 1
            choice = choices[row].checked()
            self._metrics["total_accepted_draft_tokens"] += choice.token == draft_token
            self._take(choice, None if logits is None else logits[row])
            if self.finish or choice.token != draft_token:
                break
        if self._draft:  # a request with a draft ends with its verification
            self.finish = self.finish or FinishReason.LENGTH

    def chunk(self) -> EngineChunk | None:
        """Return the new tokens that may leave now; without streaming all of them, at the end."""
        token_ids = tuple(self.tokens[self._num_reported :])
        if not self.finish and not (token_ids and self.request.streaming):
            return None
        wants = self.request.wants
        num_reused = self._metrics.get("kv_cache_reused_blocks", 0)
        logits = None
        if wants.generation_logits:
            logits = np.array(self._logits, dtype=np.float32).reshape(-1, self._vocab_size)
        metrics = None
        if wants.perf_metrics:  # on every response, as TensorRT-LLM sends them
            metrics = EngineMetrics(  # a block is one token here
                kv_cache_alloc_new_blocks=self.num_computed - num_reused,
                kv_cache_alloc_total_blocks=self.num_computed,
                **self._metrics,
            )
        chunk = EngineChunk(
            token_ids=token_ids,
            sequence_index=self.index,
            final=self.finish is not None,
            finish_reason=self.finish,
            generation_logits=logits,
            metrics=metrics,
        )
        if wants.log_probs:
            chunk.log_probs = tuple(self._log_probs)
            chunk.cum_log_prob = self._cum_log_prob
        if self._context:
            chunk.context_logits = np.concatenate(self._context)
        if self._num_reported == len(self.request.input_ids):  # the first chunk
            chunk.cached_tokens = num_reused
        self._num_reported = len(self.tokens)
        self._log_probs = []
        self._logits = []
        self._context = []
        return chunk

    def _take(self, choice: Choice, logits: Array | None) -> None:
        """Make the token part of the text, unless it is the end token, and end if it is due."""
        self._metrics["last_token_time_ns"] = time.monotonic_ns()
        self._metrics.setdefault("first_token_time_ns", self._metrics["last_token_time_ns"])
        text_ids, self.finish = self._criteria.feed((choice.token,))
        if not text_ids:
            return
        self.tokens.append(choice.token)
        self._rules.push(choice.token)
        if self.request.wants.log_probs:
            self._log_probs.append(choice.log_prob)
            self._cum_log_prob += choice.log_prob
        if self.request.wants.generation_logits and logits is not None:
            self._logits.append(logits.copy())  # the row is part of the whole step's array
        if self._rules.complete and self.finish is not FinishReason.STOP:
            self.finish = FinishReason.END_ID


class Batcher:
    """Plans steps, runs them, and collects their ``events``, up to ``max_rows`` rows a step.

    Only the engine's thread may call it; ``add`` and ``num_present`` may be called from any.
    """

    def __init__(self, runner: Runner, max_rows: int) -> None:
        self.events: list[tuple[Submission, EngineEvent]] = []
        self.num_computed_tokens = 0  # rows of all forward passes so far
        self._runner = runner
        self._slots = runner.slots
        self._max_rows = max_rows
        self._waiting: list[Sequence] = []  # in order of arrival, like those that run
        self._running: list[Sequence] = []

    @property
    def num_present(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue them; they start in order of arrival, as soon as a slot is free."""
        self._waiting.extend(sequences)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run one forward pass. Never raises for a mistake of a request or of the model.

        ``meanwhile`` is called once the pass has begun, before its tokens are read.
        """
        for sequence in [*self._running, *self._waiting]:
            if sequence.owner.cancelled:
                sequence.finish = FinishReason.CANCELLED
                self._report(sequence)
        self._admit()
        # Single tokens come first, in the order of their slots. Rows and slots then line up, and
        # attention needs no gather.
        plan = sorted(self._plan(), key=lambda item: (len(item[1].tokens) > 1, item[1].slot))
        if not plan:
            meanwhile()
            return
        segments = [segment for _, segment in plan]
        num_rows = sum(len(segment.tokens) for segment in segments)
        try:
            logits = self._runner.forward(segments)
            meanwhile()
            # A GPU computes while this thread writes down the rules of the rows.
            rows: list[TokenRow | None] = []
            for sequence, segment in plan:
                rows += sequence.token_rows(segment)
            log_probs = any(sequence.request.wants.log_probs for sequence, _ in plan)
            choices = choose(logits, rows, log_probs)
        except Exception as error:
            _log.exception("a step of %d rows failed", num_rows)
            for sequence, _ in plan:
                problem = f"the engine's step failed: {type(error).__name__}"
                self._fail(sequence, EngineError(problem))
            return
        self.num_computed_tokens += num_rows
        end = 0
        for sequence, segment in plan:
            begin = end
            end += segment.keep
            values: Array | None = None
            if sequence.wants_logits:
                values = logits[begin:end].cpu().numpy()
            self._take(sequence, segment, choices[begin:end], values)

    def _take(
        self, sequence: Sequence, segment: Segment, choices: list[Choice], logits: Array | None
    ) -> None:
        """Give a sequence the choices and logits of its segment's kept rows, and report."""
        if not all(math.isfinite(choice.highest) for choice in choices):
            self._slots.scrub(segment.slot)  # its keys and values are no better
            self._fail(sequence, EngineError("the model gave logits that are not finite"))
            return
        try:
            sequence.computed_to(segment.end, choices, logits)
        except (EngineError, InvalidRequest) as error:
            self._fail(sequence, error)
        except Exception as error:
            _log.exception("taking a token failed")
            problem = f"taking a token failed: {type(error).__name__}"
            self._fail(sequence, EngineError(problem))
        else:
            self._report(sequence)

    def fail_all(self, problem: str) -> None:
        """End everything with an ``EngineError``."""
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, EngineError(problem))

    def _admit(self) -> None:
        # The sequences of one request share its prompt: the first computes it, the others wait.
        # A request is identified by its object.
        reading = {id(sequence.request) for sequence in self._running if sequence.reads_prompt}
        for sequence in self._waiting.copy():
            reuse = not sequence.request.wants.context_logits
            if not self._slots.free:
                break
            if reuse and id(sequence.request) in reading:
                continue
            slot, num_reused = self._slots.claim(sequence.tokens, reuse=reuse)
            sequence.start(slot, num_reused)
            self._running.append(sequence)
            self._waiting.remove(sequence)
            if num_reused < len(sequence.tokens) - 1:
                reading.add(id(sequence.request))

    def _plan(self) -> list[tuple[Sequence, Segment]]:
        """Return this step's segments, with their sequences.

        Sequences that decode a single token always get it. Then those with few rows pass those with
        many, but half of the remaining rows stays for the latter. The oldest sequence may take all
        remaining rows, so that nobody starves.
        """
        plan: list[tuple[Sequence, Segment]] = []
        short: list[Sequence] = []
        long: list[Sequence] = []
        oldest: Sequence | None = None  # the oldest sequence with several rows
        for sequence in self._running:
            num_rows = sequence.num_rows
            if num_rows == 1:
                plan.append((sequence, sequence.segment(1)))
                continue
            if num_rows < 1:
                continue
            oldest = oldest or sequence
            if num_rows <= _SHORT_ROWS:
                short.append(sequence)
            else:
                long.append(sequence)
        room = self._max_rows - len(plan)
        reserved = room // 2 if long else 0
        for sequence in [*short, *long]:
            limit = room
            if sequence.num_rows <= _SHORT_ROWS and sequence is not oldest:
                limit = max(room - reserved, 0)
            segment = sequence.segment(limit)
            if segment.tokens:
                plan.append((sequence, segment))
                room -= len(segment.tokens)
        return plan

    def _fail(self, sequence: Sequence, error: EngineError | InvalidRequest) -> None:
        self.events.append((sequence.owner, error))
        sequence.owner.cancelled = True  # the other sequences of the request end with it
        self._free(sequence)

    def _report(self, sequence: Sequence) -> None:
        chunk = sequence.chunk()
        if chunk is not None:
            self.events.append((sequence.owner, chunk))
        if sequence.finish:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._slots.release(sequence.slot)
            self._running.remove(sequence)


class EmbeddedEngine:
    """Runs a Hugging Face decoder-only checkpoint, many requests at once.

    Loading takes seconds and raises ``CheckpointError`` or ``SettingsError``. Implements
    ``trtllm_bls.engines.base.Engine``; as a context manager it closes itself.
    """

    def __init__(
        self, parameters: EngineParameters, name: str = "embedded", device: str | None = None
    ) -> None:
        self.name = name
        self._queue_size = parameters.max_queue_size or _QUEUE_SIZE
        self._max_present = parameters.max_batch + self._queue_size
        self._runner = load(parameters, device)
        self._capacity = EngineCapacity(
            vocab_size=self._runner.vocab_size,
            max_sequence_tokens=self._runner.slots.length,
            max_draft_tokens=parameters.max_draft_len,
        )
        self._guides = Guides(
            parameters.model_dir, self._runner.vocab_size, parameters.guide_compile_seconds
        )
        self._batcher = Batcher(self._runner, parameters.max_tokens_per_step)
        self._closing = False
        self._changed = threading.Condition()  # notified of closing, and of new sequences
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    async def capacity(self) -> EngineCapacity:
        """Return the capacity, which is known since the load."""
        return self._capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """Generate as ``Engine.generate`` does. May be called on several event loops."""
        return TaskChunks(partial(self._answer, request))

    async def _answer(self, request: EngineRequest, chunks: QueuedChunks) -> None:
        """Fill ``chunks``; cancelling it cancels the request."""
        check_request(request, self._capacity)
        for name, value in {**required_inputs(request), **request.extras}.items():
            if np.size(value) and name not in (GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT):
                raise Unsupported(name, "this engine cannot honour it")
        num_tokens = len(request.input_ids) + request.max_tokens
        limit = self._runner.slots.length
        if num_tokens > limit:
            note = "%s: prompt and completion of %d tokens are cut to %d"
            _log.warning(note, request.request_id, num_tokens, limit)
        guide = await self._guides.of(request)
        submission = Submission(request.num_return_sequences, chunks, asyncio.get_running_loop())
        sequences = []
        for index in range(request.num_return_sequences):
            own_guide = None
            if guide is not None:
                own_guide = guide.copy()
            sequences.append(Sequence(request, index, self._capacity, submission, own_guide))
        self._add(sequences)
        try:
            await submission.ended.wait()
        finally:
            submission.cancelled = True

    def _add(self, sequences: list[Sequence]) -> None:
        with self._changed:
            if self._closing:
                raise EngineUnavailable("the engine is closed")
            if self._batcher.num_present + len(sequences) > self._max_present:
                problem = f"Maximum queue size of {self._queue_size} is reached"
                raise Overloaded.for_now(problem, 1)
            self._batcher.add(sequences)
            self._changed.notify()

    async def close(self) -> None:
        """Shut down without blocking the loop."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End running requests with an ``EngineError`` and free the model. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._guides.close()

    def __enter__(self) -> EmbeddedEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        """Run steps, on the engine's thread, while there is work."""
        torch.set_num_threads(self._runner.threads)  # torch keeps it per thread
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._batcher.num_present)
                if self._closing:
                    break
            try:
                if self._runner.is_async:
                    # Readers and a GPU's step then work at the same time. They share the
                    # interpreter with this thread, so that it would begin the step after them.
                    self._batcher.step(meanwhile=self._deliver)
                else:
                    self._batcher.step()
            except Exception:  # a mistake of ours; the engine lives on
                _log.exception("a step failed outside the model")
                self._batcher.fail_all("the engine's scheduler failed")
            is_urgent = any(_is_urgent(event) for _, event in self._batcher.events)
            if is_urgent or not self._runner.is_async:
                self._deliver()
        self._batcher.fail_all("the engine was closed")
        self._deliver()
        self._runner.close()

    def _deliver(self) -> None:
        """Hand the step's events over, one wake-up per event loop."""
        events = self._batcher.events
        self._batcher.events = []
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Submission, EngineEvent]]] = {}
        for owner, event in events:
            loops.setdefault(owner.loop, []).append((owner, event))
        for loop, batch in loops.items():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # the loop is closed: nobody will read
                for owner, _ in batch:
                    owner.cancelled = True


def _is_urgent(event: EngineEvent) -> bool:
    """True for a sequence's first chunk, for its last one, and for an error."""
    return not isinstance(event, EngineChunk) or event.final or event.cached_tokens is not None


def _put(batch: list[tuple[Submission, EngineEvent]]) -> None:
    """Hand events to their readers, on their loop."""
    for owner, event in batch:
        if isinstance(event, EngineChunk):
            owner.chunks.put([event])
            owner.unfinished -= event.final
        else:
            owner.chunks.fail(event)
            owner.unfinished = 0
        if not owner.unfinished:
            owner.ended.set()
