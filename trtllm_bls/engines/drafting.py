"""The draft engine as one request sees it: a proposal in time, or a reason why there is none.

Drafting only ever saves time, so nothing that goes wrong here may reach the caller. Owns the one
running draft of a request, its deadline, and whether the draft model fits the target.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import aclosing

from trtllm_bls.engines.base import Engine
from trtllm_bls.errors import EngineError, InvalidRequest, Overloaded
from trtllm_bls.messages import Array, Draft, EngineLimits, EngineRequest, TokenIds
from trtllm_bls.speculative.options import SpeculationStats
from trtllm_bls.speculative.shared import SpeculationShared

logger = logging.getLogger("trtllm_bls.speculation")


class _Unfit(Exception):
    """The draft model's vocabulary is not the target's."""


class DraftModel:
    """Drafts one at a time: ``start``, then ``result`` or ``cancel``; always ``cancel`` at the end.

    After a failure it is ``given_up`` for the rest of the request; ``usable`` is false also while
    another request's failure is fresh.
    """

    def __init__(
        self,
        engine: Engine | None,
        deadline_s: float,
        shared: SpeculationShared,
        stats: SpeculationStats,
    ) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._shared = shared
        self._stats = stats
        self.given_up = engine is None
        self._task: asyncio.Task[Draft] | None = None
        self._settled: asyncio.Future[None] | None = None  # done with the task, or at its deadline

    @property
    def usable(self) -> bool:
        return not self.given_up and self._shared.draft_usable(_now())

    @property
    def running(self) -> bool:
        return self._task is not None

    def room(self, ids: list[int]) -> int:
        """Tokens the draft model can still add to ``ids``, as far as it has told."""
        limits = self._shared.draft_limits
        if limits is None or limits.max_sequence_tokens is None:
            return sys.maxsize
        return max(0, limits.max_sequence_tokens - len(ids))

    def start(self, request: EngineRequest) -> None:
        """Begin drafting in the background; nothing else may be running."""
        assert self._task is None
        self._settled = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._settle(request, self._settled))

    async def result(self) -> Draft | None:
        """What was started, within the deadline from now; ``None`` if it failed.

        A draft without tokens means that the draft model expects the end.
        """
        task, settled = self._task, self._settled
        assert task is not None and settled is not None
        deadline = asyncio.get_running_loop().call_later(self._deadline_s, _wake, settled)
        try:
            await settled
        finally:
            deadline.cancel()
        if task.done():
            self._task = None
            return self._outcome(task)
        self._fail("deadline", f"no draft within {self._deadline_s:g} s", rest=True)
        await self.cancel()
        return None

    async def cancel(self) -> None:
        """End the running draft, if any; only a failure that it already met still matters."""
        task, self._task = self._task, None
        if task is None:
            return
        if task.cancel():
            await asyncio.wait({task})
        if not task.cancelled():
            self._outcome(task)

    def _outcome(self, task: asyncio.Task[Draft]) -> Draft | None:
        try:
            return task.result()
        except _Unfit as error:
            self._fail("vocabulary", str(error), rest=True)
        except (EngineError, Overloaded) as error:
            self._fail("error", str(error), rest=True)
        except InvalidRequest as error:  # of this request alone: others may draft on
            self._fail("refused", str(error), rest=False)
        return None

    def give_up(self, why: str, problem: str) -> None:
        """Draft no more in this request."""
        self.given_up = True
        self._stats.add_failure(why)
        self._shared.add_failure(why)
        logger.warning("speculation given up (%s), decoding plainly: %s", why, problem)

    def _fail(self, why: str, problem: str, *, rest: bool) -> None:
        self.give_up(why, problem)
        if rest:
            self._shared.rest_draft(_now(), for_ever=why == "vocabulary")

    async def _settle(self, request: EngineRequest, settled: asyncio.Future[None]) -> Draft:
        """Wakes the waiting request itself: a loop turn sooner than the task's own callbacks."""
        try:
            return await self._propose(request)
        finally:
            _wake(settled)

    async def _propose(self, request: EngineRequest) -> Draft:
        engine = self._engine
        assert engine is not None
        _check_fit(await self._limits(engine), self._shared.target_limits)
        ids: TokenIds = ()
        logits: Array | None = None
        async with aclosing(engine.generate(request)) as stream:
            async for chunk in stream:  # one: the request does not stream
                ids, logits = chunk.token_ids, chunk.generation_logits
        if logits is not None and len(logits) < len(ids):
            logits = None  # verified by id instead, which is as lossless
        ids = ids[: request.max_tokens]
        return Draft(token_ids=ids, logits=None if logits is None else logits[: len(ids)])

    async def _limits(self, engine: Engine) -> EngineLimits:
        if self._shared.draft_limits is None:
            self._shared.draft_limits = await engine.limits()
        return self._shared.draft_limits


def _check_fit(draft: EngineLimits, target: EngineLimits | None) -> None:
    known = target.vocab_size if target else None
    if draft.vocab_size is not None and known is not None and draft.vocab_size != known:
        raise _Unfit(f"the draft knows {draft.vocab_size} tokens, the target {known}")


def _wake(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
