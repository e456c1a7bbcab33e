"""One engine made of a target and of what may draft for it; each request is routed to either.

A request that speculates runs in rounds over both engines (``speculative``); any other goes
straight to the target. A target that ends every request after one step, as older engines built for
external drafts do, is asked for one token after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from trtllm_bls.engines.base import ChunkStream, Engine, TaskChunks
from trtllm_bls.engines.routing.speculative import SpeculativeRun
from trtllm_bls.errors import EngineUnavailable, Overloaded, Unsupported
from trtllm_bls.speculative.options import SpeculationOptions, check_speculative
from trtllm_bls.speculative.shared import SpeculationShared
from trtllm_bls.types import (
    EngineCapacity,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    SpeculationStats,
)

_NOT_ASKED = SpeculationRequest()
_PLAIN = SpeculationOptions(num_draft_tokens=0)

log = logging.getLogger(__name__)


class RoutingEngine:
    """An ``Engine`` over ``target``, with drafts from ``draft`` or from the text itself.

    ``options`` are the deployment's; ``by_default``: requests that ask for nothing are speculated
    too. ``on_end`` is given the figures of each request that was speculated. The engines stay the
    caller's but for ``close``.
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
        self._unverifiable = ""  # why the target verifies no drafts, if it does not

    async def capacity(self) -> EngineCapacity:
        """The target's. One that may end every request after one step is tried, once."""
        capacity = await self.target.capacity()
        why = f"{self.name} verifies no drafts", capacity.speculates
        self._unverifiable = "" if capacity.max_draft_tokens != 0 else "; ".join(filter(None, why))
        if capacity.one_step is not None:
            self.shared.one_step = capacity.one_step
        elif capacity.may_be_one_step and self.shared.one_step is None:
            async with self._probing:
                await self._probe_steps()
        return capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``; refuses by name what speculation was asked for but cannot do."""
        options, on_end = None, self._on_end
        if self._by_default or request.speculation != _NOT_ASKED:
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
                why = "the deployed engine, built for external drafts, gives one token per request"
                raise Unsupported(error.field, f"cannot be honoured: {why}") from None
            options, on_end = _PLAIN, None
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
            async with aclosing(self.target.generate(two_tokens)) as stream:
                tokens = sum([len(chunk.token_ids) async for chunk in stream])
        except (EngineUnavailable, Overloaded):
            return  # the next request tries again
        except Exception as error:
            self._probe_failed = True
            log.warning(
                "%s: whether it ends requests after one step is unknown: %s", self.name, error
            )
            return
        self.shared.one_step = tokens < 2
        if self.shared.one_step:
            log.warning("%s ends every request after one token: asked token by token", self.name)

    def drain(self) -> None:
        """Speculate no more: what runs in rounds goes on as one plain request to the target."""
        self.shared.draining = True

    @property
    def handed_over(self) -> bool:
        """Whether no request that was speculated has another request to send."""
        return self.shared.sending == 0

    async def close(self) -> None:
        """Close both engines."""
        engines = [self.target] if self._draft is None else [self.target, self._draft]
        await asyncio.gather(*(engine.close() for engine in engines))
