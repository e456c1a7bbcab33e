"""Whether this process can answer: an answer ended well lately, or the engine gives a token."""

from __future__ import annotations

import asyncio
from functools import partial

from trtllm_bls.errors import Overloaded, TrtllmBlsError
from trtllm_bls.openai.exchange import PromptSink
from trtllm_bls.orchestrator import Orchestrator
from trtllm_bls.services.request_reports import unreported_id
from trtllm_bls.types import FinishReason, SpeculationRequest, TextChunk, TextRequest

_FRESH_S = 5.0  # an answer proves for this long that the engine works
_TRUSTED_S = 30.0  # for this long a probe is answered while the engine is asked again
_FAILED_S = 1.0  # for this long a failure is repeated without asking again
_LIMIT_S = 10.0  # for one token


class Health:
    """Asks the engine for one token if no answer ended well lately; one question at a time."""

    def __init__(self, orchestrator: Orchestrator, token_id: int) -> None:
        self._orchestrator = orchestrator
        self._token_id = token_id
        self._proven_at = float("-inf")
        self._failed_at = float("-inf")
        self._problem: str | None = None
        self._check: asyncio.Task[None] | None = None

    def proven(self) -> None:
        """Note that an answer has ended well."""
        self._proven_at = asyncio.get_running_loop().time()
        self._problem = None

    async def problem(self) -> str | None:
        """What is wrong, in one line; ``None`` if nothing is."""
        now = asyncio.get_running_loop().time()
        if now - self._proven_at < _FRESH_S:
            return None
        if self._problem is not None and now - self._failed_at < _FAILED_S:
            return self._problem
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._ask())
        if self._problem is not None or now - self._proven_at > _TRUSTED_S:
            await asyncio.shield(self._check)
        return self._problem

    async def _ask(self) -> None:
        """Ask for one token after one token, without drafts; neither counted nor logged."""
        chunks: list[TextChunk] = []
        request = TextRequest(
            request_id=unreported_id(),
            prompt_ids=(self._token_id,),
            max_tokens=1,
            speculation=SpeculationRequest(num_draft_tokens=0),
            timeout_s=_LIMIT_S,
        )
        sink = PromptSink(0, lambda _, chunk: chunks.append(chunk), partial(asyncio.sleep, 0))
        problem = None
        try:
            await self._orchestrator.run(request, sink)
        except Overloaded:
            pass  # a full server works
        except TrtllmBlsError as error:
            problem = " ".join(str(error).split())
        endings = [chunk.ending for chunk in chunks if chunk.ending is not None]
        if any(ending.finish_reason is FinishReason.TIMEOUT for ending in endings):
            problem = f"the engine gave no token within {_LIMIT_S:g} s"
        if problem is None:
            self.proven()
        else:
            self._problem = problem
            self._failed_at = asyncio.get_running_loop().time()
