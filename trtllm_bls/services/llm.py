"""A language model as other code calls it: steps of an answer, as an async iterator."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from trtllm_bls.contract import BLS
from trtllm_bls.errors import CancelCause, InvalidRequest, TrtllmBlsError
from trtllm_bls.orchestrator import TextSink
from trtllm_bls.parameters import BlsParameters, Parameters
from trtllm_bls.services.deployment import Deployment
from trtllm_bls.types import ChatOptions, FinishReason, Sampling, TextChunk, TextRequest, TokenIds

_SAMPLING = frozenset(each.name for each in fields(Sampling)) - {"beam_width", "early_stopping"}
# Fields of ``TextRequest`` that shape an answer of one sequence, under their own names.
_OPTIONS = frozenset(
    {"max_tokens", "stop_words", "include_stop", "stop_token_ids", "bad_words", "timeout_s"}
    | {"add_special_tokens", "skip_special_tokens", "speculation", "prediction", "stream_interval"}
)
_FAILED = (FinishReason.ERROR, FinishReason.CANCELLED)  # an error follows
_numbers = itertools.count(1)


class Runs(Protocol):
    """What an answer comes from: ``Orchestrator``."""

    async def run(self, request: TextRequest, sink: TextSink) -> None:
        """Send the chunks of the answer to ``sink``."""


class Caller(Protocol):
    """The request of a pipeline on whose behalf a language model is called."""

    id: str
    traceparent: str | None
    tokens: int  # generated for it so far
    prompt_tokens: int
    finish_reason: str  # of the latest answer that has ended
    steps: set[Steps]  # that have not been closed


# Set by ``StreamingModel`` in the task of each request, so tasks that it starts inherit it.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass(slots=True)
class Step:
    """What is new in an answer. ``finish_reason`` is set in the last step alone.

    ``ids``: the new token ids; an id comes with the text that it completes, so the bytes of one
    character come together. ``stop_reason``: the stop string that ended the answer.
    """

    ids: TokenIds
    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Steps(AsyncIterator[Step]):
    """One answer of a language model, step by step; begins to run at once.

    A step holds all tokens that arrived since the one before, so a slow reader gets fewer, larger
    steps. Leaving before the end frees the engine's slot: ``async with`` does that at its end,
    ``aclose`` at once, and a pipeline's request when it is over. Raises what the engine raises.
    """

    def __init__(self, orchestrator: Runs, request: TextRequest) -> None:
        self._arrived: asyncio.Queue[TextChunk | None] = asyncio.Queue()  # None: the end
        self._caller = CALLER.get()
        if self._caller is not None:
            self._caller.steps.add(self)
        self._task: asyncio.Task[None] | None = asyncio.create_task(orchestrator.run(request, self))
        self._task.add_done_callback(lambda _: self._arrived.put_nowait(None))

    async def __anext__(self) -> Step:
        chunk = await self._arrived.get()
        if chunk is None:
            self._arrived.put_nowait(None)  # for a reader that asks again
            if self._task is not None:
                await self._released()  # raises what ended it
            raise StopAsyncIteration
        self._arrived.task_done()
        step = Step(tuple([token.token_id for token in chunk.tokens or ()]), chunk.text)
        if self._caller is not None:
            self._caller.tokens += len(step.ids)
        ending = chunk.ending
        if ending is not None and ending.finish_reason not in _FAILED:
            step.finish_reason = ending.finish_reason.value
            step.stop_reason = ending.stop_reason
            step.prompt_tokens = ending.prompt_tokens
            step.completion_tokens = ending.completion_tokens
            if self._caller is not None:
                self._caller.prompt_tokens += step.prompt_tokens
                self._caller.finish_reason = step.finish_reason
        return step

    async def aclose(self) -> None:
        """End the engine's work, unless it has ended. May be called twice."""
        if self._task is not None and not self._task.done():
            self._task.cancel(CancelCause.CALLER_LEFT.value)
            await asyncio.wait({self._task})  # a reader that waits is woken first, and cancelled
        if self._task is not None:  # asyncio would log an error that nobody took
            await asyncio.gather(self._released(), return_exceptions=True)

    def _released(self) -> asyncio.Task[None]:
        # The traceback of a task that failed refers to this object: kept here, both would stay
        # until a garbage collection.
        assert self._task is not None
        task, self._task = self._task, None
        if self._caller is not None:
            self._caller.steps.discard(self)
        return task

    async def __aenter__(self) -> Steps:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- the orchestrator's sink --------------------------------------------------------------

    async def ready(self) -> None:
        """Return once the reader has taken all steps."""
        await self._arrived.join()

    def send(self, chunk: TextChunk) -> None:
        """Take a chunk of the orchestrator."""
        self._arrived.put_nowait(chunk)


class LLM:
    """The language model of a deployment; any number of answers run at once on one event loop.

    Each method begins an answer and returns its steps. ``options``: fields of ``Sampling``
    (``temperature``, ``top_p``, ``seed``, …) and of ``TextRequest`` (``max_tokens``,
    ``stop_words``, ``stop_token_ids``, ``timeout_s``, …), see ``trtllm_bls.types``. What is not
    given is the deployment's default. Raises ``TrtllmBlsError`` for an option that does not exist,
    ``InvalidRequest`` for a value out of its bounds; the steps raise ``InvalidRequest`` and
    ``EngineError``.
    """

    def __init__(self, orchestrator: Runs) -> None:
        self._orchestrator = orchestrator

    def generate(self, ids: Sequence[int], **options: Any) -> Steps:
        """Continue a prompt of token ids. Special tokens are part of ``Step.text``."""
        return self._begin({"skip_special_tokens": False, **options}, prompt_ids=tuple(ids))

    def text(self, prompt: str, **options: Any) -> Steps:
        """Continue a text."""
        return self._begin(options, text=prompt)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Steps:
        """Answer a conversation (``[{"role": "user", "content": "…"}]``) by the chat template."""
        chat = ChatOptions(tools=None if tools is None else json.dumps(tools))
        return self._begin(options, messages=json.dumps(messages), chat=chat)

    def _begin(self, options: Mapping[str, Any], **prompt: Any) -> Steps:
        for name, value in options.items():
            if name not in _SAMPLING | _OPTIONS:
                known = ", ".join(sorted(_SAMPLING | _OPTIONS))
                raise TrtllmBlsError(f"{name} is no option of a language model; there are: {known}")
            tensor = BLS.input_named.get(name)
            if value is None or tensor is None or not tensor.single or tensor.dtype == "STRING":
                continue
            if not isinstance(value, (int, float)):
                raise InvalidRequest(name, f"{value!r} is not a number")
            tensor.check(value)
        caller = CALLER.get()
        request = TextRequest(
            request_id=f"{caller.id if caller else 'llm'}/{next(_numbers)}",
            traceparent=caller.traceparent if caller else None,
            stream=True,
            return_tokens=True,
            sampling=Sampling(**{k: v for k, v in options.items() if k in _SAMPLING}),
            **{"max_tokens": None, **{k: v for k, v in options.items() if k in _OPTIONS}},
            **prompt,
        )
        return Steps(self._orchestrator, request)


@asynccontextmanager
async def connect(
    engine: str, *, tokenizer: str | os.PathLike[str], **parameters: object
) -> AsyncIterator[LLM]:
    """The language model at ``engine``, in any asyncio program.

    ``engine``: ``trtllm://HOST:PORT`` or ``triton+grpc://HOST:PORT/MODEL``. ``tokenizer``: the
    directory of its tokenizer. ``parameters``: of ``tensorrt_llm_bls`` (docs/parameters.md), such
    as ``request_timeout_seconds``. Raises ``SetupError``.
    """
    given = {"engine": engine, "tokenizer_dir": os.path.abspath(tokenizer)} | parameters
    texts = {key: {"string_value": str(value)} for key, value in given.items()}
    arguments = {
        "model_config": json.dumps({"name": "tensorrt_llm_bls", "parameters": texts}),
        "model_repository": str(Path.cwd() / "tensorrt_llm_bls"),
    }
    read = Parameters(arguments, {}).read(BlsParameters)
    deployment = await asyncio.to_thread(Deployment, read)
    try:
        yield LLM(deployment.orchestrator)
    finally:
        await deployment.close()
