"""Speculative decoding performed: the actions that ``speculative.rounds`` decides on, one by one.

Owns the order of the calls and their ends: at every await either engine's work stops when the
reader goes. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from trtllm_bls.engines.base import ChunkStream, Engine, QueuedChunks, join_chunks
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from trtllm_bls.speculative.options import SpeculationOptions
from trtllm_bls.speculative.rounds import (
    AskDraft,
    Decode,
    DraftFailure,
    End,
    SpeculativeRounds,
    Verify,
)
from trtllm_bls.speculative.shared import SpeculationShared
from trtllm_bls.types import Draft, EngineChunk, EngineRequest, SpeculationStats

# A full queue in the middle of an answer is waited for: seconds, doubled each time.
_FIRST_RETRY_S, _LONGEST_RETRY_S, _RETRIES = 0.02, 1.0, 40

log = logging.getLogger("trtllm_bls.speculation")


class SpeculativeRun:
    """One request over ``target`` and, if there is one, ``draft``.

    ``on_end``, if any, is given the figures once, however the request ends.
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
        self._request = request
        self._target = target
        self._options = options
        self._shared = shared
        self._on_end = on_end
        self._has_draft = draft is not None
        # Without a draft engine no action ever asks for one.
        self._draft = DraftModel(draft or target, options.draft_deadline_s, shared)

    async def run(self, chunks: QueuedChunks) -> None:
        """Fill ``chunks``. Raises what the target raises."""
        shared = self._shared
        shared.target_capacity = await self._target.capacity()
        self._chunks = chunks
        self._rounds = SpeculativeRounds(
            self._request, self._options, shared, has_draft_model=self._has_draft
        )
        shared.in_flight += 1
        shared.sending += 1
        try:
            await self._perform()
        finally:
            shared.in_flight -= 1
            shared.sending -= 1
            if (memory := self._rounds.memory) and (answer := self._rounds.answer):
                # Once the answer has been sent: a thousand tokens take half a millisecond.
                asyncio.get_running_loop().call_soon(memory.add, answer, _now())
            if self._on_end is not None:
                self._on_end(self._rounds.stats)
            await self._draft.cancel()

    async def _perform(self) -> None:
        rounds, draft = self._rounds, self._draft
        while not isinstance(action := rounds.next(_now()), End):
            if not isinstance(action, AskDraft) or action.request is not None:
                await draft.cancel()
            if isinstance(action, Verify):
                draft.start(action.early)
                await self._verify(action.request)
            elif isinstance(action, AskDraft):
                draft.start(action.request)
                rounds.drafted(await draft.result(), _now())
            else:
                await self._decode(action)

    async def _verify(self, request: EngineRequest) -> None:
        try:
            async with aclosing(await self._admitted(request)) as stream:
                chunk = join_chunks([chunk async for chunk in stream])
        except (InvalidRequest, EngineError) as error:
            if request.draft is None or isinstance(error, (EngineUnavailable, EngineStalled)):
                raise
            log.warning("no drafts (refused), decoding plainly: %s", error)
            self._rounds.refused(_now())
        else:
            self._emit(self._rounds.verified(chunk, _now()))

    async def _decode(self, action: Decode) -> None:
        async with aclosing(await self._admitted(action.request)) as stream:
            self._shared.sending -= action.rest
            try:
                await self._take_stretch(stream)
            finally:
                self._shared.sending += action.rest
        self._rounds.stopped()

    async def _take_stretch(self, stream: ChunkStream) -> None:
        await stream.wait()
        while arrived := stream.take():
            now = _now()
            for chunk in arrived:
                entered = self._rounds.decoded(chunk, now)
                self._emit(entered)
                if entered.final:  # what the target says beyond it is not the answer's
                    break
            if not arrived[-1].final and self._rounds.may_leave(now):
                break
            await stream.wait()

    async def _admitted(self, request: EngineRequest) -> ChunkStream:
        """The stream of a request that the target has taken.

        A target whose queue is full refuses a new request; where the answer has begun, that must
        not end it.
        """
        begun = len(request.input_ids) > len(self._request.input_ids)
        seconds = _FIRST_RETRY_S
        for _ in range(_RETRIES if begun else 0):
            stream = self._target.generate(request)
            try:
                await stream.wait()
            except Overloaded:
                await stream.aclose()
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, _LONGEST_RETRY_S)
            except BaseException:
                await stream.aclose()
                raise
            else:
                return stream
        return self._target.generate(request)

    def _emit(self, chunk: EngineChunk) -> None:
        if chunk.token_ids or chunk.final:
            self._chunks.put([chunk])


class DraftModel:
    """The draft engine as one request sees it: a proposal in time, or a reason why there is none.

    Drafts one at a time: ``start``, then ``result`` or ``cancel``; always ``cancel`` at the end.
    Drafting only ever saves time, so nothing that goes wrong here reaches the caller, whatever the
    draft engine does.
    """

    def __init__(self, engine: Engine, deadline_s: float, shared: SpeculationShared) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._shared = shared
        self._task: asyncio.Task[Draft | DraftFailure] | None = None

    def start(self, request: EngineRequest | None) -> None:
        """Begin drafting in the background; without a request, what runs already goes on."""
        if request is None:
            return
        assert self._task is None
        self._task = asyncio.create_task(self._propose(request))

    async def result(self) -> Draft | DraftFailure:
        """What was started, within the deadline from now.

        A draft without tokens means that the draft model expects the end.
        """
        task = self._task
        assert task is not None
        await asyncio.wait({task}, timeout=self._deadline_s)
        if task.done():
            self._task = None
            outcome = task.result()
        else:
            outcome = DraftFailure("deadline", f"no draft within {self._deadline_s:g} s")
            await self.cancel()
        if isinstance(outcome, DraftFailure):
            log.warning("no drafts (%s), decoding plainly: %s", outcome.why, outcome.problem)
        return outcome

    async def cancel(self) -> None:
        """End the running draft, if any."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    async def _propose(self, request: EngineRequest) -> Draft | DraftFailure:
        try:
            capacity = self._shared.draft_capacity = await self._engine.capacity()
            target, own = self._shared.target_capacity, capacity.vocab_size
            known = target.vocab_size if target else None
            if None not in (own, known) and own != known:
                problem = f"the draft knows {own} tokens, the target {known}"
                return DraftFailure("vocabulary", problem)
            async with aclosing(self._engine.generate(request)) as stream:
                chunk = join_chunks([chunk async for chunk in stream])
            ids, logits = chunk.token_ids[: request.max_tokens], chunk.generation_logits
            if logits is None or len(logits) < len(ids):
                return Draft(token_ids=ids)  # verified by id, which is as lossless
            return Draft(token_ids=ids, logits=logits[: len(ids)])
        except InvalidRequest as error:  # of this request alone: others may draft on
            return DraftFailure("refused", str(error))
        except Exception as error:  # a draft engine may answer anything at all
            return DraftFailure("error", f"{type(error).__name__}: {error}")


def _now() -> float:
    return asyncio.get_running_loop().time()
