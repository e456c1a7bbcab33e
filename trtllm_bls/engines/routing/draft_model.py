"""The draft engine as one request sees it: a proposal in time, or a reason why there is none.

Drafting only ever saves time, so nothing that goes wrong here may reach the caller, whatever the
draft engine does. Owns the one running draft of a request and its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from trtllm_bls.engines.base import Engine, join_chunks
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.speculative.rounds import DraftFailure
from trtllm_bls.speculative.shared import SpeculationShared
from trtllm_bls.types import Draft, EngineRequest

log = logging.getLogger("trtllm_bls.speculation")


class DraftModel:
    """Drafts one at a time: ``start``, then ``result`` or ``cancel``; always ``cancel`` at the
    end.
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
