"""The health of the engine for ``/health``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls.errors import Overloaded, ShuttingDown, TrtllmBlsError
from trtllm_bls.http.limits import RETRY
from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.exchange import JsonResponse, PromptSink, RunningRequests
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.orchestrator import Orchestrator
from trtllm_bls.orchestrator.reports import unreported_id
from trtllm_bls.orchestrator.status import StatusDirectory, common_problem
from trtllm_bls.types import Ending, FinishReason, SpeculationRequest, TextRequest

_FRESH_S = 5.0  # an answer proves for this long that the engine works
_TRUSTED_S = 30.0  # for this long nobody waits for the next probe of the engine
_FAILED_S = 1.0  # for this long a failure is repeated without another probe
_LIMIT_S = 10.0  # for one token


class Health:
    """The engine's health: proven by answers, else by a probe for one token, one at a time."""

    def __init__(self, orchestrator: Orchestrator, token_id: int) -> None:
        self._orchestrator = orchestrator
        self._token_id = token_id
        self._proven_at = float("-inf")
        self._failed_at = float("-inf")
        self._problem: str | None = None
        self._probe: asyncio.Task[None] | None = None

    def note_success(self) -> None:
        """Note that an answer has ended well."""
        self._proven_at = asyncio.get_running_loop().time()
        self._problem = None

    async def problem(self) -> str | None:
        """Return the engine's problem, in one line; ``None`` where it works."""
        now = asyncio.get_running_loop().time()
        if now - self._proven_at < _FRESH_S:
            return None
        if self._problem is not None and now - self._failed_at < _FAILED_S:
            return self._problem
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run_probe())
        if self._problem is not None or now - self._proven_at > _TRUSTED_S:
            await asyncio.shield(self._probe)
        return self._problem

    async def _run_probe(self) -> None:
        """Generate one token after one token, without drafts; neither counted nor logged."""
        endings: list[Ending | None] = []
        request = TextRequest(
            request_id=unreported_id(),
            prompt_ids=(self._token_id,),
            max_tokens=1,
            speculation=SpeculationRequest(num_draft_tokens=0),
            timeout_s=_LIMIT_S,
        )
        sink = PromptSink(
            first_choice=0,
            on_chunk=lambda index, chunk: endings.append(chunk.ending),
            ready=partial(asyncio.sleep, 0),
        )
        try:
            with suppress(Overloaded):  # a full server works
                await self._orchestrator.run(request, sink)
        except TrtllmBlsError as error:
            self._problem = " ".join(str(error).split())
        else:
            if not any(end and end.finish_reason is FinishReason.TIMEOUT for end in endings):
                self.note_success()
                return
            self._problem = f"the engine gave no token within {_LIMIT_S:g} s"
        self._failed_at = asyncio.get_running_loop().time()


@dataclass(frozen=True)
class HealthRoute:
    """``/health`` and ``/health/ready``: 503 while this process or every engine takes no request.

    ``status_dir``: the directory whose file tells the process to drain; empty: there is none.
    """

    backend: Deployment
    running: RunningRequests
    health: Health
    status_dir: str

    async def get(self, request: Request) -> Response:
        """Answer both paths."""
        engines = await self.backend.engine_problems()
        problem = await self._problem(engines)
        if problem is not None:
            raise ApiError(503, problem, code="engine_unavailable", headers=RETRY)
        if not any(engines.values()):
            return JsonResponse({"status": "ok"})
        states = {name: problem or "ok" for name, problem in engines.items()}
        return JsonResponse({"status": "degraded", "engines": states})

    async def _problem(self, engines: dict[str, str]) -> str | None:
        if self.status_dir and StatusDirectory(self.status_dir).leaving:
            return str(ShuttingDown())
        if self.running.refusal is not None:
            return str(self.running.refusal)
        return common_problem(engines) or await self.health.problem()
