"""A Triton model that a user writes as one async function, around a language model that any
asyncio program may call (docs/pipelines.md).

``trtllm_bls.pipeline`` names what is for users.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trtllm_bls.contract import BLS, Tensor
from trtllm_bls.engines.triton.grpc import ModelStream, OtherModels, as_array
from trtllm_bls.errors import (
    CancelCause,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    TrtllmBlsError,
)
from trtllm_bls.orchestrator import (
    Load,
    Orchestrator,
    RequestTimes,
    has_expired,
    stats_of,
    timeout,
)
from trtllm_bls.parameters import BlsParameters, Parameters
from trtllm_bls.parameters.engine_tls import engine_tls
from trtllm_bls.python_backend.request_server import Call
from trtllm_bls.services.deployment import Deployment
from trtllm_bls.services.served_model import ServedModel
from trtllm_bls.types import (
    Array,
    ChatOptions,
    FinishReason,
    Sampling,
    TextChunk,
    TextRequest,
    TokenIds,
)

__all__ = ["EngineError", "InvalidRequest", "Tensor"]  # for ``trtllm_bls.pipeline``

_SAMPLING = frozenset(each.name for each in fields(Sampling)) - {"beam_width", "early_stopping"}
# Fields of ``TextRequest`` that shape an answer of one sequence, under their own names.
_OPTIONS = frozenset(
    {"max_tokens", "stop_words", "include_stop", "stop_token_ids", "bad_words", "timeout_s"}
    | {"add_special_tokens", "skip_special_tokens", "speculation", "prediction", "stream_interval"}
)
_FAILED = (FinishReason.ERROR, FinishReason.CANCELLED)  # an error follows
_numbers = itertools.count(1)
# The request on whose behalf a language model is called. ``StreamingModel`` sets it in the task of
# each request, so tasks that it starts inherit it.
_REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)


# --- the language model -----------------------------------------------------------------------


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


class Steps(AsyncIterator[Step], AbstractAsyncContextManager["Steps"]):
    """One answer of a language model, step by step; begins to run at once.

    A step holds all tokens that arrived since the one before, so a slow reader gets fewer, larger
    steps. Leaving before the end frees the engine's slot: ``async with`` does that at its end,
    ``aclose`` at once, and a pipeline's request when it is over. Raises what the engine raises.
    """

    def __init__(self, orchestrator: Orchestrator, request: TextRequest) -> None:
        self._arrived: asyncio.Queue[TextChunk | None] = asyncio.Queue()  # None: the end
        self._caller = _REQUEST.get()
        if self._caller is not None:
            self._caller.streams.add(self)
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
        ending = chunk.ending
        if ending is not None and ending.finish_reason not in _FAILED:
            step.finish_reason = ending.finish_reason.value
            step.stop_reason = ending.stop_reason
            step.prompt_tokens = ending.prompt_tokens
            step.completion_tokens = ending.completion_tokens
        if self._caller is not None:
            self._caller.tokens += len(step.ids)
            self._caller.prompt_tokens += step.prompt_tokens
            self._caller.finish_reason = step.finish_reason or self._caller.finish_reason
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
            self._caller.streams.discard(self)
        return task

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

    def __init__(self, orchestrator: Orchestrator) -> None:
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
        caller = _REQUEST.get()
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


# --- a model of your own ----------------------------------------------------------------------


class PipelineDeployment(Deployment):
    """A deployment whose requests are those of a pipeline, of which each may call the language
    model any number of times."""

    def __init__(self, parameters: BlsParameters, pb_utils: Any, model_name: str) -> None:
        super().__init__(parameters, pb_utils, model_name)
        self.open: set[Response] = set()
        # The pipeline's request has been admitted and is reported; its parts are neither.
        self._inner = Orchestrator(self.tokenizer, self.engine, self.defaults)

    def llm(self) -> LLM:
        """The language model that the parameters name."""
        return LLM(self._inner)

    def load(self) -> Load:
        """Of the pipeline's requests: those without a response wait."""
        responses = self.open.copy()
        waiting = sum(not response.responses for response in responses)
        tokens = self._inner.load().tokens
        return Load(len(responses) - waiting, waiting, self.admission.queued, tokens)

    @property
    def handed_over(self) -> bool:
        """A pipeline may call a model until it has ended."""
        return not self.open


class Request:
    """One request: its inputs by name (``request["wav"]``), as Triton gives them.

    ``id`` is unique in the process, ``client_id`` the caller's own. ``parameters``: the request's,
    as the caller sent them. ``traceparent``: the caller's trace context (W3C). ``tokens``,
    ``prompt_tokens``: of the language model's answers so far; ``finish_reason``: of the last one.
    """

    def __init__(self, call: Call, other_models: OtherModels) -> None:
        self._arrays, self._other_models = call.arrays, other_models
        self.id, self.client_id = call.id, call.client_id
        self.parameters: Mapping[str, Any] = json.loads(call.parameters)
        trace = self.parameters.get("traceparent")
        self.traceparent = trace if isinstance(trace, str) else None
        self.tokens = self.prompt_tokens = 0
        self.finish_reason = "stop"
        # What ``close`` ends, unless it has ended.
        self.streams: set[Steps | ModelStream] = set()
        self._calls: set[asyncio.Future[dict[str, Array]]] = set()

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            raise InvalidRequest(name, "is missing")
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def text(self, name: str) -> str:
        """The one text of a ``STRING`` input. Raises ``InvalidRequest``."""
        values = self[name].reshape(-1).tolist()
        if len(values) != 1:
            raise InvalidRequest(name, f"{len(values)} texts; send one")
        try:
            return str(values[0], "utf-8") if isinstance(values[0], bytes) else str(values[0])
        except UnicodeDecodeError as error:
            raise InvalidRequest(name, f"is not UTF-8: {error.reason}") from error

    async def infer(
        self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = ()
    ) -> dict[str, Array]:
        """The response of another model of this server. ``outputs``: those wanted; none = all.

        Cancelled with the request. Raises ``EngineError``, or ``EngineUnavailable`` while the
        server cannot be reached.
        """
        call = asyncio.ensure_future(self._other_models.infer(model, inputs, outputs, self.id))
        self._calls.add(call)
        try:
            return await call
        finally:
            self._calls.discard(call)

    def stream(
        self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = ()
    ) -> ModelStream:
        """The responses of a decoupled model of this server, one by one; otherwise as ``infer``.

        ``aclose`` ends the model's work, as the end of the request does.
        """
        stream = self._other_models.stream(model, inputs, outputs, self.id)
        self.streams.add(stream)
        return stream

    async def close(self) -> None:
        """End what the request has begun and not ended."""
        for stream in self.streams.copy():
            await stream.aclose()
        for call in self._calls:  # of tasks that ``answer`` has left behind
            call.cancel()


class Response(RequestTimes):
    """Where the outputs of one request go."""

    def __init__(self, call: Call, declared: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._call, self._declared = call, declared
        self._whole: Mapping[str, Array] = {}

    async def send(self, outputs: Mapping[str, Any], *, final: bool = False) -> None:
        """Send one response: arrays, numbers or texts by the names of declared outputs.

        Waits while the caller takes earlier ones, so the caller's pace is the pipeline's.
        ``final``: the last one; without it the end of ``answer`` ends the response.
        """
        if unknown := outputs.keys() - self._declared.keys():
            raise TrtllmBlsError(f"output {min(unknown)} is not declared by this model")
        if self.responses and not self._call.decoupled:
            raise TrtllmBlsError("this model is not decoupled and answers once per request")
        if not self._call.sequences:
            raise TrtllmBlsError("nothing can follow the last response of a request")
        arrays = {name: _typed(self._declared[name], value) for name, value in outputs.items()}
        if self._call.decoupled:
            await self._call.ready()
            self._call.send(arrays, final)
        else:
            self._whole = arrays  # leaves when nothing can go wrong any more
        self.note_response()

    def finish(self) -> None:
        """``answer`` has returned: send the one response of a model that is not decoupled."""
        if not self._call.decoupled:
            if not self.responses:
                raise TrtllmBlsError("this model is not decoupled and has not answered")
            self._call.send(self._whole, True)


class StreamingModel(ServedModel):
    """A model of a user's own, written as ``answer``; ``trtllm-bls new`` writes the files for it.

    Declare ``inputs`` and ``outputs``; Triton checks types and shapes before ``answer`` sees a
    request. Requests run concurrently on one event loop, so nothing in ``answer`` may block. A
    caller that leaves, the time limit (``request_timeout_seconds``) and a failure end ``answer`` by
    an exception at its ``await``, and with it the engine's work and calls of other models.
    """

    inputs: ClassVar[tuple[Tensor, ...]] = ()
    outputs: ClassVar[tuple[Tensor, ...]] = ()
    deployment_type = PipelineDeployment
    deployment: PipelineDeployment

    async def load(self, deployment: PipelineDeployment) -> None:
        """Called once before the first request: take ``deployment.llm()``, read files."""

    @abstractmethod
    async def answer(self, request: Request, response: Response) -> None:
        """Answer one request. An ``InvalidRequest`` becomes the caller's error INVALID_ARG."""

    async def unload(self) -> None:
        """Called once after the last request."""

    def make(self, parameters: BlsParameters) -> None:
        self.other_models = OtherModels(parameters.engine_url, engine_tls(parameters))
        self._declared = {tensor.name: tensor for tensor in self.outputs}

    async def begin(self) -> None:
        await self.load(self.deployment)

    async def end(self) -> None:
        await self.unload()
        await self.other_models.close()

    async def handle(self, call: Call) -> None:
        request = Request(call, self.other_models)
        response = Response(call, self._declared)
        _REQUEST.set(request)
        self.deployment.open.add(response)
        error: BaseException | None = None
        seconds = self.deployment.defaults.timeout_s
        limit = timeout(seconds)
        try:
            async with limit, self.deployment.admission.acquire(1):
                response.note_begin()
                await self.answer(request, response)
            response.finish()
        except BaseException as raised:
            error = _told(raised)
            if isinstance(raised, asyncio.TimeoutError) and has_expired(limit):
                error = DeadlineExceeded(f"the time limit of {seconds:g} s is over")
            if error is raised:  # as its own cause it would be a reference cycle
                raise
            raise error from raised
        finally:
            await request.close()
            self.deployment.open.discard(response)
            stats = stats_of(
                request.id,
                error,
                request.finish_reason,
                prompt_tokens=request.prompt_tokens,
                completion_tokens=request.tokens,
                traceparent=request.traceparent,
            )
            response.add_to(stats, streamed=True)
            self.deployment.reports.add(stats)
            error = None  # whose traceback refers to this frame: a reference cycle


def _told(raised: BaseException) -> BaseException:
    """What the end of a request is told as.

    A task group with one failure is that failure. ``SystemExit`` and a cancellation of the
    pipeline's own would end the event loop or look like the caller's leaving.
    """
    inner: tuple[BaseException, ...] = getattr(raised, "exceptions", ())
    if len(inner) == 1:
        return _told(inner[0])
    # Python 3.10 does not tell who cancelled a task.
    cancels = getattr(asyncio.current_task(), "cancelling", lambda: 1)()
    own_cancel = isinstance(raised, asyncio.CancelledError) and not cancels
    if own_cancel or isinstance(raised, (SystemExit, KeyboardInterrupt)):
        return RuntimeError(f"answer raised {type(raised).__name__}")
    return raised


def _typed(tensor: Tensor, value: Any) -> Array:
    """The value as the array of a declared output. Raises ``TrtllmBlsError``."""
    array = as_array(tensor.name, value)
    fits = array.ndim == len(tensor.dims) and all(
        declared in (-1, size) for declared, size in zip(tensor.dims, array.shape, strict=True)
    )
    if not fits:
        problem = f"shape {list(array.shape)}, declared {list(tensor.dims)}"
        raise TrtllmBlsError(f"output {tensor.name}: {problem}")
    if tensor.dtype == "STRING" and array.dtype == np.object_:
        return array
    cast: Array = array.astype(tensor.numpy_type) if array.dtype.kind in "biuf" else array[:0]
    # A float is rounded to its type's precision; any other value stays what it is.
    if tensor.dtype == "STRING" or not (
        cast.size == array.size and (tensor.dtype.startswith("FP") or np.array_equal(cast, array))
    ):
        raise TrtllmBlsError(f"output {tensor.name}: {value!r} is not {tensor.dtype}")
    return cast
