"""One engine over a target and its source of drafts, which routes each request.

A request that speculates runs in rounds over both engines: ``SpeculativeRun`` performs the actions
that ``speculative.rounds`` decides on, and decides nothing itself. It owns the order of the calls
and their ends: at every await either engine's work stops when the reader goes. Any other request
goes straight to the target. A target that ends every request after one step, as older engines built
for external drafts do, gets a request for each token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from trtllm_bls.engines.base import ChunkStream, Engine, QueuedChunks, TaskChunks, join_chunks
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import SpeculationOptions, check_speculative
from trtllm_bls.speculative.rounds import (
    AskDraft,
    Decode,
    DraftFailure,
    End,
    SpeculativeRounds,
    Verify,
)
from trtllm_bls.types import (
    Backoff,
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    SpeculationStats,
)

_NO_CHOICE = SpeculationRequest()
_NO_DRAFTS = SpeculationOptions(num_draft_tokens=0)
# Seconds between attempts to send a request of an answer that has begun to a target whose queue is
# full; they double.
_RETRY_S = Backoff(0.02, 1.0)
_RETRIES = 40

log = logging.getLogger("trtllm_bls.speculation")


class RoutingEngine:
    """An ``Engine`` over ``target``, with drafts from ``draft`` or from the text itself.

    ``options`` are the deployment's. ``by_default``: requests that choose nothing are speculated,
    too. ``on_end`` is called with the figures of each request that was speculated. The engines
    belong to the caller, but ``close`` closes them.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None = None,
        options: SpeculationOptions | None = None,
        *,
        by_default: bool = False,
        on_end: Callable[[SpeculationStats], None] | None = None,
        shared: SpeculationShared | None = None,
    ) -> None:
        self.name = target.name
        self.shared = shared or SpeculationShared()
        self.target = target
        self._draft = draft
        self._options = options or SpeculationOptions()
        self._by_default = by_default
        self._on_end = on_end
        self._probing = asyncio.Lock()
        self._probe_failed = False
        self._unverifiable = ""  # the reason why the target verifies no drafts; empty if it does

    async def capacity(self) -> EngineCapacity:
        """Return the target's capacity.

        A target that may end every request after one step is tried, once.
        """
        capacity = await self.target.capacity()
        self.shared.target_capacity = capacity
        self._unverifiable = ""
        if capacity.max_draft_tokens == 0:
            self._unverifiable = f"{self.name} verifies no drafts"
            if capacity.speculates:
                self._unverifiable += f"; {capacity.speculates}"
        if capacity.one_step is not None:
            self.shared.one_step = capacity.one_step
        elif capacity.may_be_one_step and self.shared.one_step is None:
            async with self._probing:
                await self._probe_steps()
        return capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """Generate as ``Engine.generate`` does.

        Raises ``Unsupported`` for a field that the chosen speculation cannot keep.
        """
        options = None
        on_end = self._on_end
        if self._by_default or request.speculation != _NO_CHOICE:
            options = self._options.for_request(
                request,
                by_default=self._by_default,
                has_draft_model=self._draft is not None,
                unverifiable=self._unverifiable,
            )
        if options is None:
            if not self.shared.one_step or request.draft is not None:
                return self.target.generate(request)
            try:
                check_speculative(request)
            except Unsupported as error:
                reason = (
                    "the deployed engine, built for external drafts, gives one token per request"
                )
                raise Unsupported(error.field, f"cannot be honoured: {reason}") from None
            options = _NO_DRAFTS
            on_end = None
        run = SpeculativeRun(request, self.target, self._draft, options, self.shared, on_end)
        return TaskChunks(run.run)

    async def _probe_steps(self) -> None:
        if self.shared.one_step is not None or self._probe_failed:
            return
        two_tokens = EngineRequest(
            request_id=f"{self.name}-steps",
            input_ids=(0,),
            max_tokens=2,
            streaming=False,
            sampling=Sampling(top_k=1),
        )
        try:
            num_tokens = 0
            async with aclosing(self.target.generate(two_tokens)) as stream:
                async for chunk in stream:
                    num_tokens += len(chunk.token_ids)
        except (EngineUnavailable, Overloaded):
            return  # the next request tries again
        except Exception as error:
            self._probe_failed = True
            problem = "%s: whether it ends requests after one step is unknown: %s"
            log.warning(problem, self.name, error)
            return
        self.shared.one_step = num_tokens < 2
        if self.shared.one_step:
            log.warning("%s ends every request after one token: asked token by token", self.name)

    def drain(self) -> None:
        """Speculate no more: a running answer goes on as one plain request to the target."""
        self.shared.draining = True

    @property
    def handed_over(self) -> bool:
        """True once no answer that was speculated has another engine request to send."""
        return self.shared.sending == 0

    async def close(self) -> None:
        """Close both engines."""
        engines = [self.target]
        if self._draft is not None:
            engines.append(self._draft)
        await asyncio.gather(*(engine.close() for engine in engines))


class SpeculativeRun:
    """A request over ``target`` and, if there is one, ``draft``, which makes one draft at a time.

    Drafting only ever saves time, so no failure of the draft engine reaches the caller. ``on_end``,
    if any, is called once with the figures, however the request ends.
    """

    def __init__(
        self,
        request: EngineRequest,
        target: Engine,
        draft: Engine | None,
        options: SpeculationOptions,
        shared: SpeculationShared,
        on_end: Callable[[SpeculationStats], None] | None,
    ) -> None:
        self._prompt_tokens = len(request.input_ids)
        self._target = target
        self._draft = draft or target  # without a draft engine no action ever needs one
        self._deadline_s = options.draft_deadline_s
        self._shared = shared
        self._on_end = on_end
        has_draft = draft is not None
        self._rounds = SpeculativeRounds(request, options, shared, has_draft_model=has_draft)

    async def run(self, chunks: QueuedChunks) -> None:
        """Fill ``chunks``. Raises the target's errors."""
        rounds = self._rounds
        shared = self._shared
        drafting: asyncio.Task[Draft | DraftFailure] | None = None
        shared.in_flight += 1
        shared.sending += 1
        try:
            while not isinstance(action := rounds.next(_now()), End):
                if not isinstance(action, AskDraft) or action.request is not None:
                    await _cancel(drafting)
                    drafting = None
                if isinstance(action, Verify):
                    if action.early is not None:
                        drafting = asyncio.create_task(self._propose(action.early))
                    await self._verify(action.request, chunks)
                elif isinstance(action, Decode):
                    await self._decode(action, chunks)
                else:
                    if action.request is not None:
                        drafting = asyncio.create_task(self._propose(action.request))
                    assert drafting is not None
                    outcome = await self._draft_in_time(drafting)
                    rounds.drafted(outcome, _now())
        finally:
            shared.in_flight -= 1
            shared.sending -= 1
            if rounds.memory and (answer := rounds.answer):
                # Indexing a thousand tokens takes half a millisecond, so the answer is sent first.
                loop = asyncio.get_running_loop()
                loop.call_soon(shared.memories.add, rounds.memory, answer, _now())
            if self._on_end is not None:
                self._on_end(rounds.stats)
            await _cancel(drafting)

    async def _draft_in_time(
        self, drafting: asyncio.Task[Draft | DraftFailure]
    ) -> Draft | DraftFailure:
        """Wait for a draft until the deadline."""
        await asyncio.wait({drafting}, timeout=self._deadline_s)
        outcome: Draft | DraftFailure
        if drafting.done():
            outcome = drafting.result()
        else:
            outcome = DraftFailure("deadline", f"no draft within {self._deadline_s:g} s")
        if isinstance(outcome, DraftFailure):
            problem = "no drafts (%s), decoding plainly: %s"
            log.warning(problem, outcome.reason, outcome.problem)
        return outcome

    async def _verify(self, request: EngineRequest, chunks: QueuedChunks) -> None:
        try:
            async with aclosing(await self._admitted(request)) as stream:
                answer = await _whole_answer(stream)
        except (InvalidRequest, EngineError) as error:
            if request.draft is None or isinstance(error, (EngineUnavailable, EngineStalled)):
                raise
            log.warning("no drafts (refused), decoding plainly: %s", error)
            self._rounds.refused(_now())
        else:
            _put(self._rounds.verified(answer, _now()), chunks)

    async def _decode(self, action: Decode, chunks: QueuedChunks) -> None:
        async with aclosing(await self._admitted(action.request)) as stream:
            self._shared.sending -= action.to_end
            try:
                await stream.wait()
                while target_chunks := stream.take():
                    now = _now()
                    for chunk in target_chunks:
                        answer_chunk = self._rounds.decoded(chunk, now)
                        _put(answer_chunk, chunks)
                        if answer_chunk.final:  # further chunks do not belong to the answer
                            break
                    if self._rounds.may_leave(now):
                        break
                    await stream.wait()
            finally:
                self._shared.sending += action.to_end
        self._rounds.stopped()

    async def _admitted(self, request: EngineRequest) -> ChunkStream:
        """Return the stream of a request that the target has admitted.

        A target whose queue is full refuses a new request. That must not end an answer which has
        begun, so its next request is sent again.
        """
        has_begun = len(request.input_ids) > self._prompt_tokens
        pause = 0.0
        for _ in range(_RETRIES if has_begun else 0):
            stream = self._target.generate(request)
            try:
                await stream.wait()
            except BaseException as error:
                await stream.aclose()
                if not isinstance(error, Overloaded):
                    raise
                pause = _RETRY_S.after(pause)
                await asyncio.sleep(pause)
            else:
                return stream
        return self._target.generate(request)

    async def _propose(self, request: EngineRequest) -> Draft | DraftFailure:
        try:
            capacity = await self._draft.capacity()
            self._shared.draft_capacity = capacity
            draft_size = capacity.vocab_size
            target = self._shared.target_capacity
            target_size = target.vocab_size if target else None
            if None not in (draft_size, target_size) and draft_size != target_size:
                problem = f"the draft knows {draft_size} tokens, the target {target_size}"
                return DraftFailure("vocabulary", problem)
            async with aclosing(self._draft.generate(request)) as stream:
                chunk = await _whole_answer(stream)
            ids = chunk.token_ids
            logits = chunk.generation_logits
            if logits is None or len(logits) < len(ids):
                return Draft(token_ids=ids)  # verified by id, which is as lossless
            return Draft(token_ids=ids, logits=logits)
        except InvalidRequest as error:  # it concerns this request alone: others may draft on
            return DraftFailure("refused", str(error))
        except Exception as error:  # a draft engine may answer anything at all
            return DraftFailure("error", f"{type(error).__name__}: {error}")


async def _whole_answer(stream: ChunkStream) -> EngineChunk:
    """Return a stream's chunks as one, after its end."""
    return join_chunks([chunk async for chunk in stream])


def _put(chunk: EngineChunk, chunks: QueuedChunks) -> None:
    if chunk.token_ids or chunk.final:
        chunks.put([chunk])


async def _cancel(drafting: asyncio.Task[Draft | DraftFailure] | None) -> None:
    if drafting is not None and not drafting.done():
        drafting.cancel()
        await asyncio.wait({drafting})


def _now() -> float:
    return asyncio.get_running_loop().time()
