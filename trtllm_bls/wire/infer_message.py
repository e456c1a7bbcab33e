"""Messages of Triton's gRPC inference protocol (KServe v2): requests and outputs as arrays."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import (
    deserialize_bytes_tensor,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from trtllm_bls.contract.tensors import NUMPY_TYPES
from trtllm_bls.types import Array

_ID = struct.Struct("<i")
_RAW_OF_4 = b"\x32\x04"  # how protobuf writes that 4 bytes of raw_output_contents follow
NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})


def infer_message(
    model: str,
    request_id: str,
    inputs: Iterable[tuple[str, str, Array]],
    outputs: Iterable[str] = (),
) -> Any:
    """A ``ModelInferRequest``. ``inputs``: name, Triton's data type, values; no outputs = all.

    A BF16 input is given as float32. The last response has Triton's final flag, also if it is
    empty. (Triton's Python clients refuse that parameter by name, so messages are made here.)
    """
    packed = packed_infer_message(model, request_id, inputs, outputs)
    return service_pb2.ModelInferRequest.FromString(packed)


def packed_infer_message(
    model: str,
    request_id: str,
    inputs: Iterable[tuple[str, str, Array]],
    outputs: Iterable[str] = (),
    parameters: Mapping[str, str] = NO_PARAMETERS,
) -> bytes:
    """The same, serialised.

    To protobuf, two messages in a row are one. So what many requests have in common is kept.
    """
    inputs = list(inputs)
    headers = tuple([(name, datatype, array.shape) for name, datatype, array in inputs])
    own = service_pb2.ModelInferRequest(
        id=request_id, raw_input_contents=[_raw(datatype, array) for _, datatype, array in inputs]
    )
    for key, value in parameters.items():
        own.parameters[key].string_param = value
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
    outputs, raws = response.outputs, response.raw_output_contents
    if len(outputs) != len(raws):
        raise ValueError(f"{len(outputs)} outputs with the contents of {len(raws)}")
    return {
        output.name: _array(output.datatype, raw).reshape(output.shape)
        for output, raw in zip(outputs, raws, strict=True)
    }


class RepeatedMessage:
    """Packed responses that differ from one another in a single id alone, as a stream's do.

    To see that costs a fraction of reading one.
    """

    def __init__(self) -> None:
        self._before = self._after = b""
        self._size = -1

    def note(self, packed: bytes, raws: Sequence[bytes], ids_at: int) -> None:
        """``packed`` has been read: of its two outputs, the one at ``ids_at`` is one id."""
        end = b"".join([_RAW_OF_4 + raw for raw in raws])
        known = len(end) == 12 and packed.endswith(end)
        self._size = len(packed) if known else -1
        place = len(packed) - (4 if ids_at else 10)
        self._before, self._after = packed[:place], packed[place + 4 :]

    def next_id(self, packed: bytes) -> tuple[int, ...] | None:
        """The id of a message that is otherwise the noted one; ``None`` of any other."""
        if len(packed) != self._size or not packed.startswith(self._before):
            return None
        found = _ID.unpack_from(packed, len(self._before))
        return found if found[0] >= 0 and packed.endswith(self._after) else None


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


def _raw(datatype: str, array: Array) -> bytes:
    if datatype == "BYTES":
        packed = serialize_byte_tensor(array)
        return packed.item() if packed.size else b""
    if datatype == "BF16":
        return _to_bf16(array).tobytes()
    return array.tobytes()


def _array(datatype: str, raw: bytes) -> Array:
    if datatype == "BYTES":
        texts: Array = deserialize_bytes_tensor(raw)
        return texts
    if datatype == "BF16":
        return (np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    numpy_type = NUMPY_TYPES.get(datatype) or triton_to_np_dtype(datatype)
    if numpy_type is None:
        raise ValueError(f"an output of type {datatype}")
    return np.frombuffer(raw, dtype=numpy_type)


def _to_bf16(array: Array) -> Array:
    """The upper halves of float32 numbers, rounded to the nearest, to even where there are two.

    The oldest tritonclient that is supported cannot do this.
    """
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def place_of_ids(outputs: Any, raws: Any) -> int | None:
    """Which of two outputs holds the ids, if the other is their number and both are well formed."""
    first, second = (output.SerializeToString() for output in outputs)
    return _place_in(first, second, len(raws[0]), len(raws[1]))


@lru_cache(maxsize=256)
def _place_in(first: bytes, second: bytes, *sizes: int) -> int | None:
    """Kept, since an engine's responses differ in little but their ids."""
    read = service_pb2.ModelInferResponse.InferOutputTensor.FromString
    outputs = [read(first), read(second)]
    names = [output.name for output in outputs]
    if sorted(names) != ["output_ids", "sequence_length"]:
        return None
    if any(output.datatype != "INT32" for output in outputs):
        return None
    place = names.index("output_ids")
    if [*outputs[place].shape] != [1, 1, sizes[place] / 4]:
        return None
    return place if set(outputs[1 - place].shape) <= {1} else None
