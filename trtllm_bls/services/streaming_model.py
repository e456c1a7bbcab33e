"""A Triton model that a user writes as one async function: ``StreamingModel``."""

from __future__ import annotations

import asyncio
import json
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from trtllm_bls.contract import Tensor
from trtllm_bls.engines.triton.other_models import ModelStream, OtherModels, as_array
from trtllm_bls.errors import (
    CancelCause,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    TrtllmBlsError,
)
from trtllm_bls.orchestrator import Orchestrator, has_expired, outcome_of
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.parameters.engine_tls import engine_tls
from trtllm_bls.python_backend.request_server import Call
from trtllm_bls.services.deployment import Deployment
from trtllm_bls.services.llm import CALLER, LLM, Steps
from trtllm_bls.services.served_model import ServedModel
from trtllm_bls.types import Array, Outcome, RequestStats

__all__ = ["EngineError", "InvalidRequest", "Tensor"]
__all__ += ["PipelineDeployment", "Request", "Response", "StreamingModel"]

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout


class PipelineDeployment(Deployment):
    """A deployment whose requests are those of a pipeline, of which each may call the language
    model any number of times."""

    def __init__(self, parameters: BlsParameters, pb_utils: Any, model_name: str) -> None:
        super().__init__(parameters, pb_utils, model_name)
        self.open: set[Request] = set()
        self.timeout_s = self.defaults.timeout_s
        # The pipeline's request has been admitted and is reported; its parts are neither.
        self._inner = Orchestrator(self.tokenizer, self.engine, self.defaults)

    def llm(self) -> LLM:
        """The language model that the parameters name."""
        return LLM(self._inner)

    def load(self) -> tuple[int, int]:
        """See ``Orchestrator.load``."""
        requests = self.open.copy()
        waiting = sum(not request.responses for request in requests)
        return len(requests) - waiting, waiting

    @property
    def queued(self) -> int:
        """Requests that have not been admitted."""
        return self.admission.queued

    @property
    def tokens(self) -> int:
        """See ``Deployment.tokens``."""
        return self._inner.tokens

    @property
    def handed_over(self) -> bool:
        """A pipeline may call a model until it has ended."""
        return not self.open


class Request:
    """One request: its inputs by name (``request["wav"]``), as Triton gives them.

    ``id`` is unique in the process, ``client_id`` the caller's own. ``parameters``: the request's,
    as the caller sent them. ``traceparent``: the caller's trace context (W3C).
    """

    def __init__(self, call: Call, model: StreamingModel) -> None:
        self._call, self._model = call, model
        self.id, self.client_id = call.id, call.client_id
        self.parameters: Mapping[str, Any] = json.loads(call.parameters)
        trace = self.parameters.get("traceparent")
        self.traceparent = trace if isinstance(trace, str) else None
        now = asyncio.get_running_loop().time
        self.arrived_at, self._clock = now(), now
        self.begun_at: float | None = None
        self.first_at = self.last_at = 0.0
        self.longest_gap = 0.0
        self.responses = self.tokens = self.prompt_tokens = 0
        self.finish_reason = "stop"  # of the last answer of the language model
        self.steps: set[Steps] = set()
        self._whole: Mapping[str, Array] = {}
        self._streams: set[ModelStream] = set()
        self._calls: set[asyncio.Future[dict[str, Array]]] = set()

    def __getitem__(self, name: str) -> Array:
        if name not in self._call.arrays:
            raise InvalidRequest(name, "is missing")
        return self._call.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._call.arrays

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
        work = self._model.other_models.infer(model, inputs, outputs, self.id)
        call = asyncio.ensure_future(work)
        self._calls.add(call)
        try:
            return await call
        finally:
            self._calls.discard(call)
            call.cancel()

    def stream(
        self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str] = ()
    ) -> ModelStream:
        """The responses of a decoupled model of this server, one by one; otherwise as ``infer``.

        ``aclose`` ends the model's work, as the end of the request does.
        """
        stream = self._model.other_models.stream(model, inputs, outputs, self.id)
        self._streams.add(stream)
        return stream

    # --- used by StreamingModel and Response --------------------------------------------------

    async def send(self, outputs: Mapping[str, Any], final: bool) -> None:
        """See ``Response.send``."""
        declared, decoupled = self._model.declared, self._model.decoupled
        if unknown := outputs.keys() - declared.keys():
            raise TrtllmBlsError(f"output {min(unknown)} is not declared by this model")
        if self.responses and not decoupled:
            raise TrtllmBlsError("this model is not decoupled and answers once per request")
        if not self._call.sequences:
            raise TrtllmBlsError("nothing can follow the last response of a request")
        arrays = {name: _typed(declared[name], value) for name, value in outputs.items()}
        if decoupled:
            await self._call.ready()
        now = self._clock()
        if self.responses:
            self.longest_gap = max(self.longest_gap, now - self.last_at)
        else:
            self.first_at = now
        self.last_at = now
        self.responses += 1
        if decoupled:
            self._call.send(arrays, final)
        else:
            self._whole = arrays  # leaves when nothing can go wrong any more

    def finish(self) -> None:
        """``answer`` has returned: send the one response of a model that is not decoupled."""
        if self._model.decoupled:
            return
        if not self.responses:
            raise TrtllmBlsError("this model is not decoupled and has not answered")
        self._call.send(self._whole, True)

    async def close(self) -> None:
        """End what the request has begun and not ended."""
        for steps in self.steps.copy():
            await steps.aclose()
        for stream in self._streams:
            await stream.aclose()
        for call in self._calls:  # of tasks that ``answer`` has left behind
            call.cancel()

    def stats(self, error: BaseException | None) -> RequestStats:
        """The figures of the request, which is over."""
        outcome, reason = Outcome.SUCCESS, self.finish_reason
        if isinstance(error, DeadlineExceeded):
            outcome, reason = Outcome.CANCELLED, CancelCause.DEADLINE.value
        elif error is not None:
            outcome, reason = outcome_of(error)
        return RequestStats(
            request_id=self.id,
            outcome=outcome,
            reason=reason,
            error=str(error) if isinstance(error, Exception) else None,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            responses=self.responses,
            duration_s=self._clock() - self.arrived_at,
            queue_s=None if self.begun_at is None else self.begun_at - self.arrived_at,
            ttft_s=self.first_at - self.arrived_at if self.responses else None,
            longest_gap_s=self.longest_gap if self.responses > 1 else None,
            traceparent=self.traceparent,
        )


class Response:
    """Where the outputs of one request go."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def send(self, outputs: Mapping[str, Any], *, final: bool = False) -> None:
        """Send one response: arrays, numbers or texts by the names of declared outputs.

        Waits while the caller takes earlier ones, so the caller's pace is the pipeline's.
        ``final``: the last one; without it the end of ``answer`` ends the response.
        """
        await self._request.send(outputs, final)


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
        """See ``ServedModel``."""
        self.other_models = OtherModels(parameters.engine_url, engine_tls(parameters))
        self.declared = {tensor.name: tensor for tensor in self.outputs}
        self.decoupled = parameters.decoupled

    async def begin(self) -> None:
        """See ``ServedModel``."""
        await self.load(self.deployment)

    async def end(self) -> None:
        """See ``ServedModel``."""
        await self.unload()
        await self.other_models.close()

    async def handle(self, call: Call) -> None:
        """See ``ServedModel``."""
        request, seconds = Request(call, self), self.deployment.timeout_s
        CALLER.set(request)
        self.deployment.open.add(request)
        error: BaseException | None = None
        limit = timeout(seconds)
        try:
            async with limit, self.deployment.admission.acquire(1):
                request.begun_at = asyncio.get_running_loop().time()
                await self.answer(request, Response(request))
            request.finish()
        except BaseException as raised:
            error = _told(raised)
            if isinstance(raised, asyncio.TimeoutError) and has_expired(limit):
                error = DeadlineExceeded(f"the time limit of {seconds:g} s is over")
            if error is raised:  # as its own cause it would be a reference cycle
                raise
            raise error from raised
        finally:
            await request.close()
            self.deployment.open.discard(request)
            self.deployment.reports.add(request.stats(error))
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
