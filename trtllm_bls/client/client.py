"""The async client: text or tokens in, events out, over one gRPC channel.

    async with Client("127.0.0.1:8001") as client:
        async with client.stream(text_input="Once upon", max_tokens=32) as stream:
            async for event in stream:
                print(event.text, end="")

``BLS`` and ``ENGINE`` are the models whose inputs the client knows. From top to bottom: what a
caller reads, what is sent, one request on the wire, and the channel.

Light to import: numpy, grpc and tritonclient. What prints is in the modules ``terminal…``.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtllm_bls.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    SettingsError,
    TrtllmBlsError,
    from_wire,
    half_character,
)
from trtllm_bls.settings.parameters import nearest
from trtllm_bls.types import Backoff
from trtllm_bls.wire.contract import BLS, ENGINE, MODELS, Model, Tensor
from trtllm_bls.wire.grpc_client import MOST_WAITING, MOST_WAITING_BYTES, Arrivals
from trtllm_bls.wire.kserve import is_final, output_arrays, packed_infer_message

__all__ = ["BLS", "ENGINE", "Client", "Event", "Model", "Result", "Stream", "Tls"]


# --- what a caller reads: one event per response, one result per request -----------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """A response of the server.

    ``text`` is that of the first beam; ``texts`` has one string per beam, none in a response
    without text. ``final`` marks the last response of the whole request, which may be empty.
    ``finish_reason`` comes with the last response of a sequence, from servers that tell.
    ``outputs`` holds all other tensors as sent, batch dimension included. ``received_at`` is
    ``time.perf_counter()`` at arrival, in seconds.
    """

    texts: tuple[str, ...] = ()
    sequence_index: int = 0
    batch_index: int = 0
    final: bool = False
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    outputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    received_at: float

    @property
    def text(self) -> str:
        """The first beam's text; empty where the response has none."""
        if not self.texts:
            return ""
        return self.texts[0]


def read_event(response: Any, received_at: float) -> Event:
    """Make the event of a ``ModelInferResponse``."""
    arrays = dict(output_arrays(response))
    return Event(
        texts=_texts(arrays.pop("text_output", None)),
        sequence_index=_number(arrays.pop("sequence_index", None)) or 0,
        batch_index=_number(arrays.pop("batch_index", None)) or 0,
        final=is_final(response),
        finish_reason=_reason(arrays.pop("finish_reason", None)),
        stop_reason=_reason(arrays.pop("stop_reason", None)),
        num_input_tokens=_number(arrays.pop("num_input_tokens", None)),
        num_output_tokens=_number(arrays.pop("num_output_tokens", None)),
        outputs=arrays,
        received_at=received_at,
    )


def _texts(array: NDArray[Any] | None) -> tuple[str, ...]:
    if array is None:
        return ()
    return tuple(item.decode("utf-8", "replace") for item in array.reshape(-1))


def _reason(array: NDArray[Any] | None) -> str | None:
    texts = _texts(array)
    if not texts:
        return None
    return texts[0] or None  # a response that ends nothing has an empty text


def _number(array: NDArray[Any] | None) -> int | None:
    if array is None or array.size == 0:
        return None
    return int(array.reshape(-1)[0])


@dataclass(frozen=True, kw_only=True)
class Result:
    """A whole answer. ``started_at`` is when the request was sent, on the events' clock."""

    request_id: str
    started_at: float
    events: tuple[Event, ...]

    @cached_property
    def texts(self) -> Mapping[tuple[int, int], str]:
        """Each sequence's text (first beam), by batch index and sequence index."""
        texts: dict[tuple[int, int], str] = {}
        for event in self.events:
            if event.texts:
                key = (event.batch_index, event.sequence_index)
                texts[key] = texts.get(key, "") + event.text
        return texts

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.texts.get((0, 0), "")

    @property
    def finish_reason(self) -> str | None:
        """The reason why the first sequence ended; ``None`` where the server does not tell."""
        for event in reversed(self.events):
            if event.finish_reason and (event.batch_index, event.sequence_index) == (0, 0):
                return event.finish_reason
        return None


# --- what is sent: the caller's values as one message, by the contract table -------------------

# Names, types and shapes are checked here. Servers differ in ranges and check those themselves.

# numpy's kinds of values that convert to each type without loss; others are whole numbers.
_NUMPY_KINDS = {"BOOL": "b", "FP16": "fiu", "FP32": "fiu"}
_MAX_CHARACTERS = 80  # for a value in an error


def infer_request(
    model: Model, fields: Mapping[str, Any], request_id: str, outputs: Sequence[str] = ()
) -> Any:
    """Make a ``ModelInferRequest`` of ``fields`` by wire name; ``None`` values are not sent.

    ``outputs`` are the names of those to send back; none means every output. A value without a
    batch dimension holds for every row of the batch. Raises ``InvalidRequest`` for a name the model
    does not have and a value that does not fit its type or shape.
    """
    values = {name: value for name, value in fields.items() if value is not None}
    for tensor in model.inputs:
        if tensor.required and tensor.name not in values:
            raise InvalidRequest(tensor.name, f"{model.name} needs it and it was not given")
    for name in values:
        if name not in model.input_named:
            hint = nearest(name, model.input_named)
            raise InvalidRequest(name, f"{model.name} has no such input; {hint}".rstrip("; "))
    arrays = {name: _array(model.input_named[name], value) for name, value in values.items()}
    rows = max(map(len, arrays.values()), default=1)
    inputs = []
    for name, array in arrays.items():
        dtype = model.input_named[name].dtype.replace("STRING", "BYTES")  # as messages name it
        if len(array) not in (1, rows):
            problem = f"given for {len(array)} prompts, but the batch has {rows}"
            raise InvalidRequest(name, problem)
        if len(array) < rows:
            array = np.repeat(array, rows, axis=0)
        inputs.append((name, dtype, array))
    packed = packed_infer_message(model.name, request_id, inputs, outputs)
    return service_pb2.ModelInferRequest.FromString(packed)


def _array(tensor: Tensor, value: Any) -> NDArray[Any]:
    """Return ``[rows, *dims]``; one row where the value has no batch dimension."""
    try:
        if tensor.dtype == "STRING":
            array = _encoded(np.asarray(value, dtype=object))
        else:
            array = np.asarray(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(tensor.name, half_character(error)) from None
    except (AttributeError, ValueError):  # no text; nested lists of unequal lengths
        raise _misfit(tensor, value) from None
    if array.size and tensor.dtype != "STRING":
        if array.dtype.kind not in _NUMPY_KINDS.get(tensor.dtype, "iu"):
            raise _misfit(tensor, value)
        if tensor.dtype not in _NUMPY_KINDS:
            limits: Any = np.iinfo(tensor.numpy_type)
            if array.min() < limits.min or array.max() > limits.max:
                raise _misfit(tensor, value)
    array = array.astype(tensor.numpy_type)
    rank = len(tensor.dims)
    if array.ndim == 0:
        array = array.reshape(1)
    if tensor.single and array.ndim == 1:
        array = array.reshape(-1, 1)  # one per row
    elif array.ndim == rank:
        array = array[np.newaxis]
    if array.ndim != rank + 1 or len(array) == 0:
        raise _misfit(tensor, value)
    for dim, size in zip(tensor.dims, array.shape[1:], strict=True):
        if dim not in (-1, size):
            raise _misfit(tensor, value)
    return array


def _encoded(texts: NDArray[Any]) -> NDArray[Any]:
    """Encode the texts of an array; raises ``AttributeError`` for an item that is no text."""
    items = []
    for item in texts.flat:
        if not isinstance(item, bytes):
            item = item.encode()
        items.append(item)
    return np.array(items, object).reshape(texts.shape)


def _misfit(tensor: Tensor, value: Any) -> InvalidRequest:
    text = repr(value)
    if isinstance(value, np.ndarray):
        text = str(value)
    text = " ".join(text.split())
    if len(text) > _MAX_CHARACTERS:
        text = text[:_MAX_CHARACTERS] + "..."
    if tensor.single:
        expected = f"one {tensor.dtype} value"
    else:
        dims = ", ".join("any" if size == -1 else str(size) for size in tensor.dims)
        expected = f"{tensor.dtype} values of shape [{dims}]"
    return InvalidRequest(tensor.name, f"{text} cannot be sent; expected {expected}")


# --- one request on the wire, from sending to the last byte ------------------------------------

# - Every request has a gRPC stream of its own. Its sending side closes right after the request, so
#   the server ends the stream when the request is over.
# - A reader takes responses off the wire as they arrive; the caller takes events at its own pace.
# - A caller that leaves before the final response cancels the request on the server.
# - After the final response nothing is cancelled: Triton 24.10 leaks a request if a cancel meets
#   its final response. The reader reads on until the server ends the stream.

# A server that has sent its final response ends the stream within milliseconds; one that has not
# done so within this many seconds never will.
END_OF_STREAM_S = 5.0
# The longest pause before the first retry, and before any; each is drawn from 0 to its longest, so
# that clients which failed together do not come back together.
RETRY_S = Backoff(0.4, 5.0)


class Reader(Arrivals[Event]):
    """A reader of one call, ahead of ``next``.

    It reads until ``MOST_WAITING`` events or ``MOST_WAITING_BYTES`` wait; further responses then
    stay at the server, by gRPC's flow control.
    """

    def __init__(
        self, call: Any, translate: Callable[[grpc.RpcError | None], TrtllmBlsError]
    ) -> None:
        """``translate(None)`` is the error for a call that ended before its request was sent."""
        super().__init__()
        self._events: deque[Event] = deque()
        self._caught_up = asyncio.Event()
        self._call = call
        self._translate = translate
        self._answered = False  # the final response, or the error in its place, has arrived
        self._cancelled = False  # by ``cancel``
        self.task = asyncio.create_task(self._read())

    async def next(self) -> Event | None:
        """Return the next event; ``None`` after the last.

        Raises the error that ended the stream.
        """
        if not self._events:
            await self.wait()
            self._events.extend(self.take())
            self._caught_up.set()
        if not self._events:
            return None
        return self._events.popleft()

    def cancel(self) -> bool:
        """Cancel the request on the server unless it is answered; return True if it was."""
        self._cancelled = True
        self._caught_up.set()  # the remaining events are dropped
        return not self._answered and bool(self._call.cancel())

    @staticmethod
    async def join(readers: Collection[Reader]) -> None:
        """Wait until their streams are over; after ``END_OF_STREAM_S`` close them from here."""
        if readers:
            await asyncio.wait({reader.task for reader in readers}, timeout=END_OF_STREAM_S)
        for reader in readers:
            reader._call.cancel()

    async def _read(self) -> None:
        marks_final = False  # the server marks final responses
        is_empty = True
        try:
            async for message in self._call:
                is_empty = False
                received_at = time.perf_counter()
                if message.error_message:
                    self._answered = True
                    self.fail(from_wire(message.error_message))
                    continue
                event = read_event(message.infer_response, received_at)
                parameters = message.infer_response.parameters
                marks_final = marks_final or "triton_final_response" in parameters
                self._answered = self._answered or event.final
                self.put([event])
                self._waiting_bytes += message.ByteSize()
                is_full = len(self._items) == MOST_WAITING
                if (is_full or self._waiting_bytes > MOST_WAITING_BYTES) and not self._cancelled:
                    self._caught_up.clear()
                    await self._caught_up.wait()
            if (marks_final or is_empty) and not self._answered:
                problem = "the server ended the stream before the answer was complete"
                self.fail(ConnectionFailed(problem))
            self.end()
        except asyncio.CancelledError:  # the client was closed, unless ``cancel`` was called
            if self._cancelled:
                self.fail(ConnectionFailed("the client was closed during the request"))
            else:
                # grpc.aio itself cancels a call that is over before its request is written.
                self.fail(self._translate(None))
        except grpc.RpcError as error:
            self.fail(self._translate(error))
        except Exception as error:  # for example an array shorter than its shape
            self.fail(EngineError(f"unreadable response: {error}"))
        self._call.cancel()  # nothing to do for a stream that is over


class Stream:
    """The events of one request: an async iterator, and a context manager that closes it.

    The request is sent when the first event is asked for. Leaving early in any way (``aclose``,
    the end of ``async with``, cancelling the task that waits for an event, dropping the object)
    ends the work on the server. Iteration raises ``ConnectionFailed``, ``DeadlineExceeded`` or
    the server's error (``InvalidRequest``, ``Overloaded``, ``EngineError``, ...) after the events
    that came before; a cancelled stream just ends.

    ``begin(seconds)`` sends the request, to be answered within that time. It is called again up to
    ``retries`` times if the connection failed or the server was overloaded before the first
    response, after the seconds that the server named. ``deadline_s`` bounds all attempts together.
    """

    def __init__(
        self,
        request_id: str,
        begin: Callable[[float | None], Reader],
        retries: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.started_at: float | None = None  # time.perf_counter() at sending
        self.cancelled = False  # before the final response
        self._begin = begin
        self._retries = retries  # those that are left
        self._deadline_s = deadline_s
        self._cancelling = asyncio.Event()  # ends the pause before another try
        self._reader: Reader | None = None
        self._answered = False
        self._over = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        if self._over or self.cancelled:
            raise StopAsyncIteration
        if self._answered:
            await self.aclose()
            raise StopAsyncIteration
        try:
            if self._reader is None:
                event = await self._first()
            else:
                event = await self._reader.next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except TrtllmBlsError:
            self._over = True
            if self.cancelled:
                raise StopAsyncIteration from None
            raise
        if event is None or self.cancelled:
            self._over = True
            raise StopAsyncIteration
        self._answered = event.final
        return event

    async def _first(self) -> Event | None:
        """Send the request, retrying as configured; return the first event of its answer."""
        self.started_at = time.perf_counter()
        over_at = math.inf
        if self._deadline_s is not None:
            over_at = self.started_at + self._deadline_s
        max_pause = RETRY_S.shortest
        while True:
            remaining_s = None
            if self._deadline_s is not None:
                remaining_s = over_at - time.perf_counter()
            self._reader = self._begin(remaining_s)
            try:
                event = await self._reader.next()
                break
            except (ConnectionFailed, Overloaded) as error:
                pause = random.uniform(0, max_pause)
                if isinstance(error, Overloaded) and error.retry_after_s is not None:
                    pause += error.retry_after_s
                if not self._retries or time.perf_counter() + pause >= over_at:
                    raise
            max_pause = RETRY_S.after(max_pause)
            self._retries -= 1
            self._reader = None  # it is over; there is nothing to cancel on the server
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._cancelling.wait(), pause)
            if self.cancelled:
                return None
        self._retries = 0
        return event

    def cancel(self) -> None:
        """End the request on the server; iteration ends without an error.

        Does nothing once the final response has arrived. May be called by another task.
        """
        if self._over or self.cancelled:
            return
        self.cancelled = self._reader is None or self._reader.cancel() or self._retries > 0
        self._cancelling.set()

    async def aclose(self) -> None:
        """Cancel an unfinished request; return when this side of the stream is over."""
        self.cancel()
        self._over = True
        if self._reader:
            await Reader.join([self._reader])

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._reader:  # ``break`` out of a plain ``async for`` ends here
            self._reader.cancel()


# --- the channel, any number of requests on it, and what its failures are called ---------------

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a stream may be silent for long
    # A retry that finds gRPC waiting to connect again fails at once.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
# By default a gRPC server closes a connection that is pinged more often than every 300 s.
KEEPALIVE_S = 310.0

# grpc.aio's message if a call ends before its request is written, whatever the reason.
_UNSENT = "Internal error from Core"
_CLOCKS_DIFFER_S = 0.05  # gRPC's deadline may come so much before ours


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files (PEM) of a TLS connection; the system's root certificates are the default.

    ``server_name``: the name in the server's certificate, if it is not the host of the URL.
    """

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None
    server_name: str | None = None

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Tls | None:
        """Read a command's options (``command_options.TlsConnection``); ``None`` = no TLS."""
        fields = {
            "root_certificates": options["tls_ca"],
            "private_key": options["tls_key"],
            "certificate_chain": options["tls_cert"],
            "server_name": options["tls_server_name"],
        }
        if not options["tls"] and not any(fields.values()):
            return None
        return cls(**fields)

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files for gRPC. Raises ``SettingsError`` for one that cannot be read."""
        contents: dict[str, bytes] = {}
        for name in ("root_certificates", "private_key", "certificate_chain"):
            path: Path | None = getattr(self, name)
            if path is None:
                continue
            try:
                contents[name] = path.read_bytes()
            except OSError as error:
                title = name.replace("_", " ")
                raise SettingsError(f"{title}: cannot read {path}: {error.strerror}") from error
        return grpc.ssl_channel_credentials(**contents)


_C = TypeVar("_C", bound="Client")


class Client:
    """A client of one Triton server over gRPC: ``async with Client("127.0.0.1:8001") as client:``.

    Belongs to the event loop that entered it: a request in another loop, before entering or after
    leaving is a ``RuntimeError``. ``url`` is ``host:port``. Leaving cancels what still runs.
    ``compression`` is ``gzip``, ``deflate`` or none. ``retries``: how often a request is sent again
    if it failed before its first response because the connection was refused or broke, or the
    server was overloaded. A retry has the same id and the same deadline, and follows a random pause
    of at most 0.4 s, 0.8 s, ... 5 s. ``keepalive_s``: seconds of silence before the client pings
    the server. Raises ``SettingsError`` for invalid values.
    """

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | None = None,
        compression: str | None = None,
        retries: int = 0,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        if url.startswith(("http://", "https://", "grpc://")):
            raise SettingsError(f"url: {url!r} has a scheme; write host:port, gRPC is understood")
        if retries < 0:
            raise SettingsError(f"retries: {retries} is not allowed; it must be at least 0")
        if not url:
            raise SettingsError("url: is empty; write host:port, where gRPC is served")
        if keepalive_s <= 0:
            raise SettingsError(f"keepalive_s: {keepalive_s} is not allowed; it must be above 0")
        self.url = url
        self.retries = retries
        self._credentials: grpc.ChannelCredentials | None = None
        if tls is not None:
            self._credentials = tls.credentials()
        self._compression: grpc.Compression | None = None
        if compression:
            self._compression = grpc.Compression[compression.title()]
        keepalive = ("grpc.keepalive_time_ms", int(keepalive_s * 1000))
        self._options: list[tuple[str, Any]] = [*_CHANNEL_OPTIONS, keepalive]
        if tls is not None and tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        if url.rpartition(":")[0] in _THIS_MACHINE:  # whatever proxy the environment names
            self._options.append(("grpc.enable_http_proxy", 0))
        self._channel: Any = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[Reader] = set()

    async def __aenter__(self: _C) -> _C:
        if self._stub is not None:
            raise RuntimeError("the client is open already")
        self._loop = asyncio.get_running_loop()
        settings = {"options": self._options, "compression": self._compression}
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.url, **settings)
        else:
            self._channel = grpc.aio.secure_channel(self.url, self._credentials, **settings)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel unfinished requests, let finished ones end, close the channel."""
        if self._channel is None:
            return
        self._stub = None
        readers = tuple(self._readers)
        for reader in readers:
            reader.cancel()
        try:
            await Reader.join(readers)
        finally:
            await self._channel.close()

    def stream(
        self,
        model: str | Model = BLS,
        *,
        deadline_s: float | None = None,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        **fields: Any,
    ) -> Stream:
        """Return the answer to one request as it comes; ``fields`` are inputs by wire name.

        Values may be Python scalars, strings, lists or numpy arrays, with or without a batch
        dimension; ``None`` means "not given". A model name outside the contract is taken for a
        text model; for a renamed one pass ``dataclasses.replace(ENGINE, name=...)``. Streaming
        is asked for unless ``fields`` say otherwise. ``deadline_s`` bounds the whole request.
        Raises ``InvalidRequest`` at once for a field that cannot be sent.
        """
        contract = _contract_of(model)
        for flag in ("stream", "streaming"):
            if flag in contract.input_named:
                fields.setdefault(flag, True)
        request_id = request_id or uuid.uuid4().hex
        message = infer_request(contract, fields, request_id, outputs)
        begin = partial(self._send, message, deadline_s)
        return Stream(request_id, begin, self.retries, deadline_s)

    async def generate(self, model: str | Model = BLS, **arguments: Any) -> Result:
        """Return the whole answer; ``arguments`` and errors as for ``stream`` and its iteration.

        With ``stream=False`` it is one response, also from a model that is not decoupled: Triton
        serves those on a gRPC stream as well, so no unary call is needed.
        """
        async with self.stream(model, **arguments) as stream:
            events = tuple([event async for event in stream])
            assert stream.started_at is not None
            return Result(request_id=stream.request_id, started_at=stream.started_at, events=events)

    async def stop(self, request_id: str, model: str | Model = ENGINE) -> None:
        """Ask an engine model to end its running request of that id.

        The running request still gets its final answer, with what was generated so far.
        """
        required = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0}
        await self.generate(model, request_id=request_id, stop=True, **required)

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        """Return True if ``model`` is ready; false also for one that the server does not have.

        Raises ``ConnectionFailed`` or ``DeadlineExceeded`` without an answer.
        """
        request: Any = service_pb2.ModelReadyRequest(name=model)
        over_at = time.monotonic() + timeout_s
        try:
            answer = await self._stub.ModelReady(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            problem = _translated(self.url, timeout_s, over_at, error)
            if isinstance(problem, (ConnectionFailed, DeadlineExceeded)):
                raise problem from error
            return False
        return bool(answer.ready)

    def _send(self, message: Any, deadline_s: float | None, remaining_s: float | None) -> Reader:
        if self._stub is None:
            raise RuntimeError("the client is not open: use it as 'async with Client(...)'")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "the client was opened in another event loop: open one in this loop too, "
                "with 'async with Client(...)'"
            )
        over_at = None
        if remaining_s is not None:
            # Before gRPC's: it counts while it makes the call, which takes long on a busy machine.
            over_at = time.monotonic() + remaining_s
        call = self._stub.ModelStreamInfer(iter([message]), timeout=remaining_s)
        reader = Reader(call, partial(_translated, self.url, deadline_s, over_at))
        self._readers.add(reader)
        reader.task.add_done_callback(lambda _: self._readers.discard(reader))
        return reader


def _contract_of(model: str | Model) -> Model:
    """Return the model with the tensors that a caller means; another name is a text model's."""
    if isinstance(model, Model):
        return model
    for contract in MODELS:
        if contract.name == model:
            return contract
    return replace(BLS, name=model)


def _translated(
    url: str, deadline_s: float | None, over_at: float | None, error: grpc.RpcError | None
) -> TrtllmBlsError:
    """Translate gRPC's error to ours; ``None`` if the call ended before its request was sent.

    ``over_at`` is the deadline on the monotonic clock.
    """
    code = grpc.StatusCode.INTERNAL
    details = _UNSENT
    if error is not None:
        code = error.code()
        details = " ".join((error.details() or "").split())
    if code is grpc.StatusCode.INTERNAL and details == _UNSENT:
        code = grpc.StatusCode.UNAVAILABLE
        if over_at is not None and time.monotonic() > over_at - _CLOCKS_DIFFER_S:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        details = "the call ended before the request was sent"
    if code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionFailed(f"{url}: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s is not None:
        return DeadlineExceeded(f"no complete answer within {deadline_s:g} s")
    return EngineError(f"{code.name}: {details}")
