"""Calls of the other models of a server, over its gRPC port.

What a model declares is asked once. It is asked again where a request does not fit it or fails,
since the model may have been loaded anew meanwhile.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
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

_OTHER_CONFIG_SECONDS = 10.0  # for the server to send a model's configuration
_READY_POLL_SECONDS = 0.2
_Answer = TypeVar("_Answer")


class CallOptions(TypedDict, total=False):
    """Of a call of another model. ``version``: by default the newest that is loaded. ``timeout_s``:
    seconds after which it ends with an ``EngineError``. ``parameters``: of the request.
    ``sequence_id``, ``sequence_start`` and ``sequence_end``: of a model that keeps a state."""

    version: str
    timeout_s: float
    parameters: Mapping[str, bool | int | float | str]
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


@dataclass(frozen=True)
class Origin:
    """Who calls another model. ``context`` returns what the call passes on; None: nothing."""

    request_id: str
    traceparent: str | None = None
    context: Callable[[], CallContext | None] = lambda: None


@dataclass(frozen=True)
class DeclaredModel:
    """The inputs and outputs that a model declares. ``rows``: the first dimension is the batch.

    Without ``checked`` nothing is declared, and a value has the type that numpy gives it.
    """

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    rows: bool = False
    decoupled: bool = False
    checked: bool = True

    @classmethod
    def of(cls, config: Any) -> DeclaredModel:
        """From Triton's ``ModelConfig`` message."""
        sides = []
        for declared in (config.input, config.output):
            tensors = {}
            for tensor in declared:
                datatype = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
                required = not getattr(tensor, "optional", False)
                dims = tuple(tensor.dims)
                tensors[tensor.name] = Tensor(tensor.name, datatype, dims, required=required)
            sides.append(tensors)
        decoupled = config.model_transaction_policy.decoupled
        return cls(config.name, sides[0], sides[1], config.max_batch_size > 0, decoupled)

    def packed(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        origin: Origin,
        **options: Any,
    ) -> bytes:
        """A request with ``CallOptions``, serialised. Raises ``TrtllmBlsError`` for what the model
        does not take."""
        try:
            typed = self.arrays(inputs, outputs)
        except TrtllmBlsError as error:
            raise TrtllmBlsError(f"{self.name}: {error}") from error
        if unknown := options.keys() - CallOptions.__annotations__.keys():
            mend = suggestion(min(unknown), CallOptions.__annotations__)
            raise TrtllmBlsError(f"{min(unknown)} is no option of a call; {mend}")
        options.pop("timeout_s", None)
        version = options.pop("version", "")
        parameters = {**options.pop("parameters", {}), **options}
        context = origin.context()
        if context is not None:
            parameters[CONTEXT_PARAMETER] = signed_context(self.name, context)
        return packed_infer_message(
            self.name,
            origin.request_id,
            typed,
            outputs,
            origin.traceparent,
            version=version,
            parameters=parameters,
        )

    def arrays(
        self, inputs: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[tuple[str, str, Array]]:
        """Name, Triton's data type and array of each input. Raises ``TrtllmBlsError``."""
        if self.checked:
            sides = (("input", inputs, self.inputs), ("output", outputs, self.outputs))
            for side, names, known in sides:
                if unknown := set(names) - known.keys():
                    name = min(unknown)
                    problem = f"there is no such {side}; {suggestion(name, known)}"
                    raise TrtllmBlsError(f"{name}: {problem}")
            required = {name for name, tensor in self.inputs.items() if tensor.required}
            if missing := required - inputs.keys():
                raise TrtllmBlsError(f"{min(missing)}: is missing")
        return [(name, *self.typed(name, value, self.inputs)) for name, value in inputs.items()]

    def typed(self, name: str, value: Any, declared: Mapping[str, Tensor]) -> tuple[str, Array]:
        """Triton's data type and the array of one value. Raises ``TrtllmBlsError``."""
        if not self.checked:
            array = array_of(name, value)
            return datatype_of(array), array
        if name not in declared:
            raise TrtllmBlsError(f"{name}: is not declared; {suggestion(name, declared)}")
        return declared[name].datatype, declared[name].array(value, rows=self.rows)


class OtherModels:
    """``url`` is the server's gRPC port, ``names`` are models that a misspelt name may mean."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self.channel = GrpcChannel(url, tls=tls)
        self.names: Collection[str] = ()
        self._declared: dict[tuple[str, str], DeclaredModel] = {}

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        origin: Origin,
        **options: Any,
    ) -> dict[str, Array]:
        """The one response of a model that is not decoupled."""

        async def once(declared: DeclaredModel) -> dict[str, Array]:
            if declared.decoupled:
                raise EngineError(f"{model}: it is decoupled; use stream")
            message = declared.packed(inputs, outputs, origin, **options)
            return _outputs(model, await self._unary(model, "ModelInfer", message, seconds))

        seconds: float | None = options.get("timeout_s")
        return await self.as_declared(model, options.get("version", ""), once)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        origin: Origin,
        on_end: Callable[[OtherStream], object] = lambda stream: None,
        **options: Any,
    ) -> OtherStream:
        """The responses of a decoupled model."""

        def begin(declared: DeclaredModel) -> ModelStream:
            message = declared.packed(inputs, outputs, origin, **options)
            return ModelStream(model, self.channel, message)

        ask = partial(self.as_declared, model, options.get("version", ""))
        return OtherStream(model, ask, begin, on_end, options.get("timeout_s"))

    async def ready(self) -> None:
        """Return once the server is ready."""
        while True:
            with suppress(EngineError):
                answer = await self._unary("server", "ServerReady", b"", _OTHER_CONFIG_SECONDS)
                if service_pb2.ServerReadyResponse.FromString(answer).ready:
                    return
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def close(self) -> None:
        """End what runs, and disconnect."""
        await self.channel.close()

    async def as_declared(
        self, model: str, version: str, once: Callable[[DeclaredModel], Awaitable[_Answer]]
    ) -> _Answer:
        """What ``once`` makes of what the model declares; made again where it failed, and the model
        declares something else by now."""
        known = self._declared.get((model, version))
        if known is None:
            known = self._declared[model, version] = await self.ask(model, version)
        try:
            return await once(known)
        except TrtllmBlsError:
            now = known
            with suppress(EngineError):
                now = self._declared[model, version] = await self.ask(model, version)
            if now == known:
                raise
        return await once(now)

    async def ask(self, model: str, version: str) -> DeclaredModel:
        """What a model declares now. Raises ``EngineError``, with the nearest of ``names``."""
        try:
            return await self._ask(model, version)
        except EngineUnavailable:
            raise
        except EngineError as error:
            # Not the list of all: a pipeline may take the name from its caller.
            if model in self.names or not (hint := nearest(model, self.names)):
                raise
            raise EngineError(f"{error}; {hint}") from error

    async def _ask(self, model: str, version: str) -> DeclaredModel:
        request = service_pb2.ModelConfigRequest(name=model, version=version).SerializeToString()
        answer = await self._unary(model, "ModelConfig", request, _OTHER_CONFIG_SECONDS)
        return DeclaredModel.of(service_pb2.ModelConfigResponse.FromString(answer).config)

    async def _unary(self, model: str, method: str, message: bytes, seconds: float | None) -> bytes:
        try:
            return await self.channel.unary(SERVICE + method, message, seconds)
        except GrpcError as error:
            raise failure_of(model, error) from error


class OtherStream(AsyncIterator[dict[str, Array]]):
    """The responses of a decoupled model, one by one, which begins to work when the first is read.

    Leaving early in any way (``aclose``, ``timeout_s``, dropping the object, the end of a
    pipeline's request) ends the model's work.
    """

    def __init__(
        self,
        model: str,
        as_declared: Callable[[Callable[[DeclaredModel], Awaitable[Any]]], Awaitable[Any]],
        begin: Callable[[DeclaredModel], ModelStream],
        on_end: Callable[[OtherStream], object] = lambda stream: None,
        timeout_s: float | None = None,
    ) -> None:
        self.model = model
        self._as_declared = as_declared
        self._begin = begin
        self._on_end, self._timeout_s = on_end, timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._responses: ModelStream | None = None
        self._over = False
        self._problem: str | None = None
        self._is_late = False

    async def __anext__(self) -> dict[str, Array]:
        try:
            if self._problem is not None:
                raise self._left()
            if self._over:
                raise StopAsyncIteration
            if self._responses is not None:
                return await anext(self._responses)
            if self._timeout_s is not None and self._timer is None:
                late = f"did not end within {self._timeout_s:g} s"
                self._timer = self._loop.call_later(self._timeout_s, self._leave, late)
            return dict(await self._as_declared(self._first))
        except (StopAsyncIteration, TrtllmBlsError) as error:
            self._end()
            if self._problem is not None and not isinstance(error, StopAsyncIteration):
                raise self._left() from None
            raise

    def _left(self) -> EngineError:
        kind = EngineTimeout if self._is_late else EngineError
        return kind(f"{self.model}: {self._problem}")

    async def _first(self, declared: DeclaredModel) -> dict[str, Array]:
        if self._problem is not None:
            raise EngineError(self._problem)
        self._responses = self._begin(declared)
        return await anext(self._responses)

    async def aclose(self) -> None:
        """End the model's work, unless it has ended; a reader that waits gets an error."""
        if not self._over:
            self._problem = self._problem or "the stream was left before its end"
        self._end()
        if self._responses is not None:
            await self._responses.aclose()

    def _leave(self, problem: str) -> None:
        self._problem = problem
        self._is_late = True
        if self._responses is not None:
            self._leaving = self._loop.create_task(self._responses.aclose())

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self)

    def __del__(self) -> None:
        if self._responses is not None and not self._over:
            responses = self._responses
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(responses.aclose()))


def _outputs(model: str, answer: bytes) -> dict[str, Array]:
    try:
        return dict(output_arrays(service_pb2.ModelInferResponse.FromString(answer)))
    except (DecodeError, ValueError) as error:
        raise EngineError(f"{model}: its response cannot be read: {error}") from error


class ModelStream(ResponseStream[dict[str, Array]]):
    """An async iterator over the responses of a decoupled model; ``aclose`` ends its work."""

    def __init__(self, model: str, channel: GrpcChannel, message: bytes) -> None:
        super().__init__(close_or_cancel)
        self._model = model
        self._taken: deque[dict[str, Array]] = deque()
        self._call = channel.open(SERVICE + "ModelStreamInfer", self.on_messages, self.on_end)
        self._call.send(message)

    def __aiter__(self) -> ModelStream:
        return self

    async def __anext__(self) -> dict[str, Array]:
        if not self._taken:
            await self.wait()
            self._taken.extend(self.take())
        if not self._taken:
            raise StopAsyncIteration
        return self._taken.popleft()

    async def aclose(self) -> None:
        """End the model's work, unless it has ended; a reader that waits gets an error."""
        self.fail(EngineUnavailable(f"{self._model}: its request has ended"))

    def _read(self, messages: list[bytes], items: list[dict[str, Array]]) -> bool:
        for message in messages:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise _named(self._model, from_wire(reply.error_message))
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
    """What the status of a call of another model means."""
    if error.status == "DEADLINE_EXCEEDED":
        return EngineTimeout(f"{model}: {error.details}")
    if error.unreachable:
        return EngineUnavailable(f"{model}: {error.details}")
    hint = "; use request.stream" if "decoupled transaction policy" in error.details else ""
    return _named(model, from_wire(error.details + hint))


def _named(model: str, error: Exception) -> Exception:
    """The error of another model; a mistake in what it was sent is not the caller's."""
    if isinstance(error, (CallChainTooLong, CycleWithoutPlace)):
        return error  # which names all models of the chain
    if isinstance(error, InvalidRequest):
        return EngineRefusal(f"{model}: {error}", error)
    kind: type[EngineError] = EngineError
    if isinstance(error, (Overloaded, EngineUnavailable)):
        kind = EngineUnavailable
    elif isinstance(error, EngineTimeout):
        kind = EngineTimeout
    return kind(f"{model}: {error}")
