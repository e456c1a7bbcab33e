"""Triton's inference protocol (KServe v2) from the caller's side: messages of any model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from trtllm_bls.types import Array
from trtllm_bls.wire.contract import NUMPY_TYPES, bf16_bits

SERVICE = "/inference.GRPCInferenceService/"
_PARAMETER_FIELDS = {  # the field of a request's parameter, by the type of its value
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


def packed_infer_message(
    model: str,
    request_id: str,
    inputs: Iterable[tuple[str, str, Array]],
    outputs: Iterable[str] = (),
    traceparent: str | None = None,
    version: str = "",
    parameters: Mapping[str, bool | int | float | str] = MappingProxyType({}),
) -> bytes:
    """Serialise a ``ModelInferRequest``.

    ``inputs`` have a name, Triton's data type and values; a BF16 input has its values as float32.
    No ``outputs`` means all. ``traceparent`` is the W3C trace context, a parameter beside
    ``parameters``. The ``version`` of the model is by default the newest that is loaded.

    The last response has Triton's final flag, also if it is empty. (Triton's Python clients refuse
    that parameter by name, so messages are made here.) To protobuf, two messages in a row are one,
    so the part that many requests have in common is cached.
    """
    inputs = list(inputs)
    headers = tuple([(name, datatype, array.shape) for name, datatype, array in inputs])
    raws = [packed_array(datatype, array) for _, datatype, array in inputs]
    message = service_pb2.ModelInferRequest(
        id=request_id, model_version=version, raw_input_contents=raws
    )
    if traceparent:
        message.parameters["traceparent"].string_param = traceparent
    for name, value in parameters.items():
        setattr(message.parameters[name], _PARAMETER_FIELDS[type(value)], value)
    packed: bytes = _in_common(model, headers, tuple(outputs)) + message.SerializeToString()
    return packed


def is_final(response: Any) -> bool:
    """Return True if a ``ModelInferResponse`` is the last of its request."""
    parameters = response.parameters
    return "triton_final_response" in parameters and parameters["triton_final_response"].bool_param


def output_arrays(response: Any) -> Mapping[str, Array]:
    """Read the outputs of a ``ModelInferResponse`` by name; BF16 becomes float32.

    Raises ``ValueError`` for a response whose parts do not fit together.
    """
    return arrays_of(response.outputs, response.raw_output_contents)


def arrays_of(tensors: Sequence[Any], raws: Sequence[bytes]) -> Mapping[str, Array]:
    """Read the tensors of a message by name; BF16 becomes float32.

    Raises ``ValueError`` for parts that do not fit together.
    """
    if len(tensors) != len(raws):
        raise ValueError(f"{len(tensors)} outputs with the contents of {len(raws)}")
    arrays = {}
    for tensor, raw in zip(tensors, raws, strict=True):
        arrays[tensor.name] = _array(tensor.datatype, raw).reshape(tensor.shape)
    return arrays


def datatype_of(array: Array) -> str:
    """Return Triton's data type of a numpy array."""
    dtype = next(name for name, numpy_type in NUMPY_TYPES.items() if array.dtype == numpy_type)
    if dtype == "STRING":
        return "BYTES"
    return dtype


@lru_cache(maxsize=1024)
def _in_common(
    model: str, headers: tuple[tuple[str, str, tuple[int, ...]], ...], outputs: tuple[str, ...]
) -> bytes:
    """Serialise all of a request but its id and values."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, datatype, shape in headers:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    for output in outputs:
        message.outputs.add(name=output)
    packed: bytes = message.SerializeToString()
    return packed


def packed_array(datatype: str, array: Array) -> bytes:
    """Serialise the contents of a tensor; the array of a BF16 one is float32."""
    if datatype == "BYTES":
        texts = serialize_byte_tensor(array)
        if not texts.size:
            return b""
        content: bytes = texts.item()
        return content
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
