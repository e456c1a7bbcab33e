"""Triton's inference protocol (KServe v2) from the caller's side: messages of any model, and the
one state of a stream of responses.

Engines, pipelines and port 8000 read their streams through ``ResponseStream``, so that all have the
same bounds, the same ends, and leave their calls by the same rule.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from trtllm_bls.errors import EngineError, Overloaded, TrtllmBlsError
from trtllm_bls.types import Array
from trtllm_bls.wire.contract import NUMPY_TYPES, bf16_bits
from trtllm_bls.wire.grpc_client import GrpcCall, GrpcError, ignore

SERVICE = "/inference.GRPCInferenceService/"
MOST_WAITING = 16_384  # items of one stream; a reader that is further behind is given up
MOST_WAITING_BYTES = 8 * 2**20  # of one call's messages; from there on the server is held back
_FIELDS = {  # of a request's parameter, by the type of its value
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}

Item = TypeVar("Item")


class Arrivals(Generic[Item]):
    """Items that arrive on the event loop while one reader takes them; adding never waits.

    It runs until ``end``, ``fail`` or ``aclose``, or until its reader is ``MOST_WAITING`` items
    behind; then it is over, and what is added is dropped. What has arrived before can still be
    taken. ``_let_go`` is called once, as it ends.
    """

    def __init__(self) -> None:
        self._arrived: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_bytes = 0  # of a call's messages that arrived while others waited
        self._over = False
        self._error: Exception | None = None

    def put(self, items: Iterable[Item]) -> None:
        """More items; ignored once it is over."""
        if self._over:
            return
        self._arrived.extend(items)
        if len(self._arrived) > MOST_WAITING:
            self._arrived.clear()
            self.fail(Overloaded(f"its reader is more than {MOST_WAITING} responses behind"))
        elif self._arrived:
            self._wake()

    def end(self) -> None:
        """No more items: the last one has arrived."""
        if not self._over:
            self._over = True
            self._let_go(finished=True)
            self._wake()

    def fail(self, error: Exception) -> None:
        """No more items: ``wait`` raises ``error`` once those that have arrived are taken."""
        if not self._over:
            self._over, self._error = True, error
            self._let_go(finished=False)
            self._wake()

    async def wait(self) -> None:
        """Return once ``take`` has something to give, or nothing more will come.

        Raises the error that ended the stream, once. A reader that is cancelled here may still
        ``take`` what has arrived.
        """
        if not self._arrived and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._arrived:
            error, self._error = self._error, None
            raise error

    def take(self) -> list[Item]:
        """All that has arrived since the last call; after ``wait``, nothing means the end."""
        arrived, self._arrived = self._arrived, []
        if self._waiting_bytes:
            if self._waiting_bytes > MOST_WAITING_BYTES:
                self._read_on()
            self._waiting_bytes = 0
        return arrived

    async def aclose(self) -> None:
        """End the work at once, unless it has ended. May be called twice."""
        if not self._over:
            self._over = True
            self._let_go(finished=False)
            self._wake()

    def _let_go(self, *, finished: bool) -> None:
        """Free what makes the items: the last one has arrived, or its work is to end now."""

    def _read_on(self) -> None:
        """The reader has caught up after more than ``MOST_WAITING_BYTES`` waited for it."""

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ResponseStream(Arrivals[Item]):
    """The answer to one request that a server sends over a call of its own.

    It ends as soon as its last response, an error, the call's end or a message that cannot be read
    arrives, whenever its reader looks. The call is then let go, once: closed in order after the
    last response, since Triton 24.10 keeps a request for ever whose cancel meets that one; else
    cancelled. While messages of ``MOST_WAITING_BYTES`` wait, the server may send no more of them:
    it keeps the rest until the reader takes these. A subclass opens ``_call`` with ``on_messages``
    and ``on_end``.
    """

    _call: GrpcCall

    @abstractmethod
    def _read(self, messages: list[bytes], items: list[Item]) -> bool:
        """Add what ``messages`` hold to ``items``; whether the last response is among them."""

    @abstractmethod
    def _failure(self, error: GrpcError | None) -> Exception:
        """The error for a call that ended before the last response; ``None``: with status OK."""

    def on_messages(self, messages: list[bytes]) -> None:
        """Messages of the call have arrived."""
        items: list[Item] = []
        try:
            last = self._read(messages, items)
        except Exception as error:
            self.put(items)
            self.fail(error if isinstance(error, TrtllmBlsError) else self._unreadable(error))
            return
        is_behind = bool(self._arrived)
        self.put(items)
        if last:
            self.end()
        elif is_behind:  # otherwise there is no more than one read of the socket
            self._waiting_bytes += sum(map(len, messages))
            if self._waiting_bytes > MOST_WAITING_BYTES:
                self._call.hold()

    def on_end(self, error: GrpcError | None) -> None:
        """The call has ended."""
        self.fail(self._failure(error))

    def _read_on(self) -> None:
        self._call.release()

    def _unreadable(self, error: Exception) -> Exception:
        return EngineError(f"a response cannot be read: {error}")

    def _let_go(self, *, finished: bool) -> None:
        self._call.on_messages = self._call.on_end = ignore
        if finished:
            self._call.half_close()
        else:
            self._call.cancel()


def packed_infer_message(
    model: str,
    request_id: str,
    inputs: Iterable[tuple[str, str, Array]],
    outputs: Iterable[str] = (),
    traceparent: str | None = None,
    version: str = "",
    parameters: Mapping[str, bool | int | float | str] = MappingProxyType({}),
) -> bytes:
    """A ``ModelInferRequest``, serialised. ``inputs``: name, Triton's data type, values; no outputs
    = all. ``traceparent``: the W3C trace context, a parameter beside ``parameters``. ``version``:
    of the model; by default the newest that is loaded.

    A BF16 input is given as float32. The last response has Triton's final flag, also if it is
    empty. (Triton's Python clients refuse that parameter by name, so messages are made here.) To
    protobuf, two messages in a row are one. So what many requests have in common is kept.
    """
    inputs = list(inputs)
    headers = tuple([(name, datatype, array.shape) for name, datatype, array in inputs])
    raws = [packed_array(datatype, array) for _, datatype, array in inputs]
    own = service_pb2.ModelInferRequest(
        id=request_id, model_version=version, raw_input_contents=raws
    )
    if traceparent:
        own.parameters["traceparent"].string_param = traceparent
    for name, value in parameters.items():
        setattr(own.parameters[name], _FIELDS[type(value)], value)
    packed: bytes = _in_common(model, headers, tuple(outputs)) + own.SerializeToString()
    return packed


def is_final(response: Any) -> bool:
    """Whether a ``ModelInferResponse`` is the last of its request."""
    parameters = response.parameters
    return "triton_final_response" in parameters and parameters["triton_final_response"].bool_param


def output_arrays(response: Any) -> Mapping[str, Array]:
    """The outputs of a ``ModelInferResponse`` by name; BF16 becomes float32.

    Raises ``ValueError`` for a response whose parts do not fit together.
    """
    return arrays_of(response.outputs, response.raw_output_contents)


def arrays_of(tensors: Sequence[Any], raws: Sequence[bytes]) -> Mapping[str, Array]:
    """Tensors of a message by name; BF16 becomes float32.

    Raises ``ValueError`` for parts that do not fit together.
    """
    if len(tensors) != len(raws):
        raise ValueError(f"{len(tensors)} outputs with the contents of {len(raws)}")
    return {
        tensor.name: _array(tensor.datatype, raw).reshape(tensor.shape)
        for tensor, raw in zip(tensors, raws, strict=True)
    }


def datatype_of(array: Array) -> str:
    """Triton's data type of a numpy array."""
    found = next(name for name, numpy_type in NUMPY_TYPES.items() if array.dtype == numpy_type)
    return "BYTES" if found == "STRING" else found


@lru_cache(maxsize=1024)
def _in_common(
    model: str, headers: tuple[tuple[str, str, tuple[int, ...]], ...], outputs: tuple[str, ...]
) -> bytes:
    """All of a request but its id and values."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, datatype, shape in headers:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    for output in outputs:
        message.outputs.add(name=output)
    packed: bytes = message.SerializeToString()
    return packed


def packed_array(datatype: str, array: Array) -> bytes:
    """The contents of a tensor; those of BF16 are given as float32."""
    if datatype == "BYTES":
        texts = serialize_byte_tensor(array)
        return texts.item() if texts.size else b""
    if datatype == "BF16":
        return bf16_bits(array).tobytes()
    return array.tobytes()


def _array(datatype: str, raw: bytes) -> Array:
    if datatype == "BYTES":
        texts: Array = deserialize_bytes_tensor(raw)
        return texts
    if datatype == "BF16":
        return (np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    if datatype not in NUMPY_TYPES:
        raise ValueError(f"an output of type {datatype}")
    return np.frombuffer(raw, dtype=NUMPY_TYPES[datatype])
