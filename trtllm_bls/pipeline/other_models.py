"""Calls of the other models of a server, over its gRPC port.

A model's declaration (its inputs and outputs) is fetched once. The model may be loaded anew later,
so a request that does not fit the declaration, or fails, has it fetched again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from trtllm_bls.errors import (
    CallChainTooLong,
    CycleWithoutPlace,
    EngineError,
    EngineRefusal,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    TrtllmBlsError,
    from_wire,
)
from trtllm_bls.settings.parameters import nearest, suggestion
from trtllm_bls.types import Array
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, CallContext, signed_context
from trtllm_bls.wire.contract import Tensor, array_of
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError, ResponseStream, close_or_cancel
from trtllm_bls.wire.kserve import (
    SERVICE,
    datatype_of,
    is_final,
    output_arrays,
    packed_infer_message,
)

_DECLARATION_SECONDS = 10.0  # timeout of a request for a model's configuration
_READY_POLL_SECONDS = 0.2
_CallResult = TypeVar("_CallResult")


class CallOptions(TypedDict, total=False):
    """The options of a call of another model.

    ``version``: by default the newest that is loaded. ``timeout_s``: seconds after which the call
    ends with an ``EngineError``. ``parameters``: the parameters of the request. ``sequence_id``,
    ``sequence_start`` and ``sequence_end``: for a model that keeps a state.
    """

    version: str
    timeout_s: float
    parameters: Mapping[str, bool | int | float | str]
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


@dataclass(frozen=True)
class Origin:
    """The request that calls another model. ``context``: returns the call's context, if any."""

    request_id: str
    traceparent: str | None = None
    context: Callable[[], CallContext | None] = lambda: None


@dataclass(frozen=True)
class DeclaredModel:
    """The inputs and outputs that a model declares. ``rows``: the first dimension is the batch.

    If ``checked`` is False, nothing is declared, and a value has the type that numpy gives it.
    """

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    rows: bool = False
    decoupled: bool = False
    checked: bool = True

    @classmethod
    def of(cls, config: Any) -> DeclaredModel:
        """Return the declaration in Triton's ``ModelConfig`` message."""
        return cls(
            name=config.name,
            inputs=_declared_tensors(config.input),
            outputs=_declared_tensors(config.output),
            rows=config.max_batch_size > 0,
            decoupled=config.model_transaction_policy.decoupled,
        )

    def packed(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        origin: Origin,
        **options: Any,
    ) -> bytes:
        """Return a serialised request with ``CallOptions``.

        Raises ``TrtllmBlsError`` for values that do not fit the declaration.
        """
        try:
            arrays = self.arrays(inputs, outputs)
        except TrtllmBlsError as error:
            raise TrtllmBlsError(f"{self.name}: {error}") from error
        if unknown := options.keys() - CallOptions.__annotations__.keys():
            remedy = suggestion(min(unknown), CallOptions.__annotations__)
            raise TrtllmBlsError(f"{min(unknown)} is no option of a call; {remedy}")
        options.pop("timeout_s", None)
        version = options.pop("version", "")
        parameters = {**options.pop("parameters", {}), **options}
        context = origin.context()
        if context is not None:
            parameters[CONTEXT_PARAMETER] = signed_context(self.name, context)
        return packed_infer_message(
            self.name,
            origin.request_id,
            arrays,
            outputs,
            origin.traceparent,
            version=version,
            parameters=parameters,
        )

    def arrays(
        self, inputs: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[tuple[str, str, Array]]:
        """Return name, Triton's data type and array of each input. Raises ``TrtllmBlsError``."""
        if self.checked:
            self._check_names("input", inputs, self.inputs)
            self._check_names("output", outputs, self.outputs)
            required = {name for name, tensor in self.inputs.items() if tensor.required}
            if missing := required - inputs.keys():
                raise TrtllmBlsError(f"{min(missing)}: is missing")
        arrays = []
        for name, value in inputs.items():
            datatype, array = self.typed(name, value, self.inputs)
            arrays.append((name, datatype, array))
        return arrays

    def _check_names(
        self, kind: str, names: Collection[str], tensors: Mapping[str, Tensor]
    ) -> None:
        """Raise ``TrtllmBlsError`` for a name that the model does not declare."""
        if unknown := set(names) - tensors.keys():
            name = min(unknown)
            raise TrtllmBlsError(f"{name}: there is no such {kind}; {suggestion(name, tensors)}")

    def typed(self, name: str, value: Any, tensors: Mapping[str, Tensor]) -> tuple[str, Array]:
        """Return Triton's data type and the array of one value. Raises ``TrtllmBlsError``."""
        if not self.checked:
            array = array_of(name, value)
            return datatype_of(array), array
        if name not in tensors:
            raise TrtllmBlsError(f"{name}: is not declared; {suggestion(name, tensors)}")
        return tensors[name].datatype, tensors[name].array(value, rows=self.rows)


def _declared_tensors(messages: Iterable[Any]) -> dict[str, Tensor]:
    """Return the inputs or the outputs in Triton's ``ModelConfig`` by name."""
    tensors = {}
    for message in messages:
        datatype = model_config_pb2.DataType.Name(message.data_type).removeprefix("TYPE_")
        required = not getattr(message, "optional", False)
        dims = tuple(message.dims)
        tensors[message.name] = Tensor(message.name, datatype, dims, required=required)
    return tensors


class OtherModels:
    """The models of a server. ``url``: its gRPC port. ``names``: hints for misspelt names."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self.channel = GrpcChannel(url, tls=tls)
        self.names: Collection[str] = ()
        self._models: dict[tuple[str, str], DeclaredModel] = {}  # by name and version

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        origin: Origin,
        **options: Any,
    ) -> dict[str, Array]:
        """Return the one response of a model that is not decoupled."""
        seconds: float | None = options.get("timeout_s")

        async def attempt(declaration: DeclaredModel) -> dict[str, Array]:
            if declaration.decoupled:
                raise EngineError(f"{model}: it is decoupled; use stream")
            message = declaration.packed(inputs, outputs, origin, **options)
            return _outputs(model, await self._unary(model, "ModelInfer", message, seconds))

        return await self.as_declared(model, options.get("version", ""), attempt)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        origin: Origin,
        on_end: Callable[[OtherStream], object] = lambda stream: None,
        **options: Any,
    ) -> OtherStream:
        """Return the responses of a decoupled model."""

        def start(declaration: DeclaredModel) -> ModelStream:
            message = declaration.packed(inputs, outputs, origin, **options)
            return ModelStream(model, self.channel, message)

        as_declared = partial(self.as_declared, model, options.get("version", ""))
        return OtherStream(model, as_declared, start, on_end, options.get("timeout_s"))

    async def ready(self) -> None:
        """Return once the server is ready."""
        while True:
            with suppress(EngineError):
                answer = await self._unary("server", "ServerReady", b"", _DECLARATION_SECONDS)
                if service_pb2.ServerReadyResponse.FromString(answer).ready:
                    return
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def close(self) -> None:
        """End the calls that run, and disconnect."""
        await self.channel.close()

    async def as_declared(
        self, model: str, version: str, attempt: Callable[[DeclaredModel], Awaitable[_CallResult]]
    ) -> _CallResult:
        """Return the result of ``attempt``, which gets the model's declaration.

        If it fails, the declaration is fetched anew. If that is another one, there is a second
        attempt.
        """
        cached = self._models.get((model, version))
        if cached is None:
            cached = await self.fetch(model, version)
            self._models[model, version] = cached
        try:
            return await attempt(cached)
        except TrtllmBlsError:
            current = cached
            with suppress(EngineError):
                current = await self.fetch(model, version)
                self._models[model, version] = current
            if current == cached:
                raise
        return await attempt(current)

    async def fetch(self, model: str, version: str) -> DeclaredModel:
        """Fetch a model's declaration. Raises ``EngineError``, with the nearest of ``names``."""
        try:
            return await self._fetch(model, version)
        except EngineUnavailable:
            raise
        except EngineError as error:
            # A pipeline may take the name from its caller, who must not learn all names.
            hint = nearest(model, self.names)
            if model in self.names or not hint:
                raise
            raise EngineError(f"{error}; {hint}") from error

    async def _fetch(self, model: str, version: str) -> DeclaredModel:
        request = service_pb2.ModelConfigRequest(name=model, version=version).SerializeToString()
        answer = await self._unary(model, "ModelConfig", request, _DECLARATION_SECONDS)
        return DeclaredModel.of(service_pb2.ModelConfigResponse.FromString(answer).config)

    async def _unary(self, model: str, method: str, message: bytes, seconds: float | None) -> bytes:
        try:
            return await self.channel.unary(SERVICE + method, message, seconds)
        except GrpcError as error:
            raise failure_of(model, error) from error


class OtherStream(AsyncIterator[dict[str, Array]]):
    """The responses of a decoupled model, one by one. The call is sent when the first is read.

    Leaving early in any way (``aclose``, ``timeout_s``, dropping the object, the end of a
    pipeline's request) ends the model's work.
    """

    def __init__(
        self,
        model: str,
        as_declared: Callable[[Callable[[DeclaredModel], Awaitable[Any]]], Awaitable[Any]],
        start: Callable[[DeclaredModel], ModelStream],
        on_end: Callable[[OtherStream], object] = lambda stream: None,
        timeout_s: float | None = None,
    ) -> None:
        self.model = model
        self._as_declared = as_declared
        self._start = start
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._responses: ModelStream | None = None
        self._has_ended = False
        self._problem: str | None = None  # why this side ended the call, if it did
        self._is_late = False

    async def __anext__(self) -> dict[str, Array]:
        try:
            if self._problem is not None:
                raise self._problem_error()
            if self._has_ended:
                raise StopAsyncIteration
            if self._responses is not None:
                return await anext(self._responses)
            if self._timeout_s is not None and self._timer is None:
                problem = f"did not end within {self._timeout_s:g} s"
                self._timer = self._loop.call_later(self._timeout_s, self._expire, problem)
            return dict(await self._as_declared(self._first_response))
        except (StopAsyncIteration, TrtllmBlsError) as error:
            self._end()
            if self._problem is not None and not isinstance(error, StopAsyncIteration):
                raise self._problem_error() from None
            raise

    def _problem_error(self) -> EngineError:
        kind = EngineTimeout if self._is_late else EngineError
        return kind(f"{self.model}: {self._problem}")

    async def _first_response(self, declaration: DeclaredModel) -> dict[str, Array]:
        if self._problem is not None:
            raise EngineError(self._problem)
        self._responses = self._start(declaration)
        return await anext(self._responses)

    async def aclose(self) -> None:
        """End the model's work, unless it has ended. A reader that waits gets an error."""
        if not self._has_ended and self._problem is None:
            self._problem = "the stream was left before its end"
        self._end()
        if self._responses is not None:
            await self._responses.aclose()

    def _expire(self, problem: str) -> None:
        self._problem = problem
        self._is_late = True
        if self._responses is not None:
            self._closing = self._loop.create_task(self._responses.aclose())

    def _end(self) -> None:
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self)

    def __del__(self) -> None:
        if self._responses is not None and not self._has_ended:
            responses = self._responses
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(responses.aclose()))


def _outputs(model: str, answer: bytes) -> dict[str, Array]:
    try:
        return dict(output_arrays(service_pb2.ModelInferResponse.FromString(answer)))
    except (DecodeError, ValueError) as error:
        raise EngineError(f"{model}: its response cannot be read: {error}") from error


class ModelStream(ResponseStream[dict[str, Array]]):
    """An async iterator over the responses of a decoupled model. ``aclose`` ends its work."""

    def __init__(self, model: str, channel: GrpcChannel, message: bytes) -> None:
        super().__init__(close_or_cancel)
        self._model = model
        self._responses: deque[dict[str, Array]] = deque()
        self._call = channel.open(SERVICE + "ModelStreamInfer", self.on_messages, self.on_end)
        self._call.send(message)

    def __aiter__(self) -> ModelStream:
        return self

    async def __anext__(self) -> dict[str, Array]:
        if not self._responses:
            await self.wait()
            self._responses.extend(self.take())
        if not self._responses:
            raise StopAsyncIteration
        return self._responses.popleft()

    async def aclose(self) -> None:
        """End the model's work, unless it has ended. A reader that waits gets an error."""
        self.fail(EngineUnavailable(f"{self._model}: its request has ended"))

    def _read(self, messages: list[bytes], items: list[dict[str, Array]]) -> bool:
        for message in messages:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise _error_of_model(self._model, from_wire(reply.error_message))
            if reply.infer_response.outputs:
                items.append(dict(output_arrays(reply.infer_response)))
            if is_final(reply.infer_response):
                return True
        return False

    def _failure(self, error: GrpcError | None) -> Exception:
        return failure_of(self._model, error or GrpcError("INTERNAL", "ended in mid-stream"))

    def _unreadable(self, error: Exception) -> EngineError:
        return EngineError(f"{self._model}: a response cannot be read: {error}")


def failure_of(model: str, error: GrpcError) -> Exception:
    """Return the error of a failed call of another model."""
    if error.status == "DEADLINE_EXCEEDED":
        return EngineTimeout(f"{model}: {error.details}")
    if error.unreachable:
        return EngineUnavailable(f"{model}: {error.details}")
    text = error.details
    if "decoupled transaction policy" in text:
        text += "; use request.stream"
    return _error_of_model(model, from_wire(text))


def _error_of_model(model: str, error: Exception) -> Exception:
    """Return another model's error with its name. A refusal is the pipeline's mistake."""
    if isinstance(error, (CallChainTooLong, CycleWithoutPlace)):
        return error  # it names all models of the chain
    if isinstance(error, InvalidRequest):
        return EngineRefusal(f"{model}: {error}", error)
    kind: type[EngineError] = EngineError
    if isinstance(error, (Overloaded, EngineUnavailable)):
        kind = EngineUnavailable
    elif isinstance(error, EngineTimeout):
        kind = EngineTimeout
    return kind(f"{model}: {error}")
