"""Pipelines that answer conversations, run as the orchestrator runs the language model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from trtllm_bls.engines.chat_model import ChatModels
from trtllm_bls.errors import DeadlineExceeded, EngineError
from trtllm_bls.orchestrator.orchestrator import (
    Orchestrator,
    RequestTimes,
    TextSink,
    has_expired,
    seconds_left,
    stats_of,
    timeout,
)
from trtllm_bls.types import Ending, FinishReason, RequestStats, TextChunk, TextRequest


class ChatPipeline:
    """A pipeline that answers conversations, with the places of ``orchestrator``.

    The text of a chunk is a line of events for ``text.chat_parser.EventParser``.
    """

    def __init__(
        self,
        name: str,
        models: ChatModels,
        orchestrator: Orchestrator,
        timeout_s: float | None,
        on_end: Callable[[RequestStats], None],
    ) -> None:
        self.name = name
        self._models = models
        self._orchestrator = orchestrator
        self._timeout_s = timeout_s
        self._on_end = on_end

    async def run(
        self,
        request: TextRequest,
        sink: TextSink,
        on_prompt: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Send the answer, as ``Orchestrator.run`` does."""
        times = RequestTimes()
        lines: list[str] = []  # those that have not been sent
        ending = Ending(finish_reason=FinishReason.STOP, prompt_tokens=0, completion_tokens=0)
        has_ended = False
        ended_by: BaseException | None = None
        limit = timeout(self._timeout_s)
        try:
            async with (
                limit,
                self._orchestrator.admission.acquire(1),
                aclosing(self._models.events(self.name, request, seconds_left(limit))) as events,
            ):
                times.begun_at = asyncio.get_running_loop().time()
                async for batch in events:
                    events_of_text = []
                    for event in batch:
                        if "end" in event:
                            ending = _ending(event["end"])
                            has_ended = True
                        else:
                            events_of_text.append(event)
                    line = json.dumps(events_of_text)
                    if request.stream and events_of_text:
                        await sink.ready()
                        sink.send(TextChunk(f"{line}\n"))
                        times.note_response()
                    else:
                        lines.append(line)
            if not has_ended:  # The stream of responses has ended in order, and the answer has not.
                raise EngineError(f"{self.name}: the answer has no end event")
            on_prompt(ending.prompt_tokens)
            await sink.ready()
            sink.send(TextChunk("\n".join(lines), ending=ending))
            times.note_response()
        except BaseException as error:
            ended_by = error
            if isinstance(error, asyncio.TimeoutError) and has_expired(limit):
                ended_by = DeadlineExceeded(f"the time limit of {self._timeout_s:g} s is over")
                raise ended_by from error
            raise
        finally:
            stats = stats_of(
                request.request_id,
                ended_by,
                ending.finish_reason.value,
                prompt_tokens=ending.prompt_tokens,
                completion_tokens=ending.completion_tokens,
                traceparent=request.traceparent,
                api=request.api,
            )
            times.add_to(stats, streamed=request.stream)
            self._on_end(stats)
            ended_by = None  # whose traceback refers to this frame: a reference cycle


def _ending(end: dict[str, Any]) -> Ending:
    reason = FinishReason(end["finish_reason"])
    return Ending(**{**end, "finish_reason": reason})
