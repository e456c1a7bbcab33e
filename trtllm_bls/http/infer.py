"""Read the body of ``infer`` into typed values and write it anew for Triton; no I/O.

Triton 24.10 ends its process, or answers 500, where a shape, a size or a value is not what it
expects: it allocates as many elements as a shape names before it looks for them. So a body is
forwarded only if it was read here, and every tensor has a type that Triton knows, a shape whose
product is the number of its elements, and exactly these elements. The elements follow the JSON as
bytes, so Triton's parser of JSON sees no value of a tensor at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from trtllm_bls.errors import printable
from trtllm_bls.http.budgets import MAX_DIMENSIONS, MAX_ELEMENTS, MAX_MEMBERS, MAX_TEXTS
from trtllm_bls.http.keys import salt_of
from trtllm_bls.http.limits import Refused, check_json
from trtllm_bls.http.values import (
    ELEMENT_BYTES,
    Datatype,
    count_texts,
    flat_values,
    packed,
    texts_in,
    wrong,
)
from trtllm_bls.types import CacheSalt

_INT64_BOUND = 2**63
_UINT64 = 2**64

Parameters: TypeAlias = Annotated[
    dict[str, bool | int | float | str], msgspec.Meta(max_length=MAX_MEMBERS)
]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_INT64_BOUND - 1)]
_Optional: TypeAlias = msgspec.UnsetType


class SharedMemory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The place of a tensor in a shared-memory region that is registered."""

    shared_memory_region: str | _Optional = msgspec.UNSET
    shared_memory_byte_size: Size | _Optional = msgspec.UNSET
    shared_memory_offset: Size | _Optional = msgspec.UNSET


class InputParameters(SharedMemory, omit_defaults=True, kw_only=True):
    """The place of an input's values that are not in the JSON."""

    binary_data_size: Size | _Optional = msgspec.UNSET


class OutputParameters(SharedMemory, omit_defaults=True, kw_only=True):
    """The form in which the client wants an output."""

    binary_data: bool | _Optional = msgspec.UNSET
    classification: Any = msgspec.UNSET


class InferOutput(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An output that the client asks for."""

    name: str
    parameters: OutputParameters | _Optional = msgspec.UNSET


class InferInput(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A tensor, whose values are here, follow the JSON or lie in shared memory."""

    name: str
    datatype: Datatype
    shape: Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    parameters: InputParameters | _Optional = msgspec.UNSET
    data: list[Any] | _Optional = msgspec.UNSET


class InferBody(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The JSON of ``infer``. Members that have no field here are not forwarded."""

    id: str = ""
    parameters: Parameters = {}
    inputs: Annotated[list[InferInput], msgspec.Meta(max_length=MAX_MEMBERS)]
    outputs: Annotated[list[InferOutput], msgspec.Meta(max_length=MAX_MEMBERS)] = []


SALT_INPUT = "cache_salt"


@dataclass(frozen=True)
class KeySalt:
    """A key that shares no KV cache with other keys, and the ``shape`` of a model's salts."""

    key: str
    shape: tuple[int, ...]

    def of_request(self, inputs: Sequence[InferInput]) -> tuple[InferInput, bytes]:
        """Return an input with a salt for each row of a request, and its bytes.

        It is for a request that names no salt.
        """
        num_rows = 1
        if inputs[0].shape:
            num_rows = inputs[0].shape[0]
        shape = [num_rows if size < 0 else size for size in self.shape]
        salt = str(CacheSalt(salt_of(self.key), required=False))
        content = packed(SALT_INPUT, "BYTES", [salt] * math.prod(shape))
        parameters = InputParameters(binary_data_size=len(content))
        tensor = InferInput(name=SALT_INPUT, datatype="BYTES", shape=shape, parameters=parameters)
        return tensor, content

    def of_client(self, tensor: InferInput, content: bytes | memoryview) -> bytes:
        """Replace each salt that a client sent by one that no other key has; return the bytes."""
        if tensor.datatype != "BYTES":
            raise wrong(SALT_INPUT, "must be strings (BYTES), or a list of them")
        texts = [text.decode("utf-8", "replace") for text in texts_in(content)]
        salts = packed(SALT_INPUT, "BYTES", [salt_of(self.key, text) for text in texts])
        tensor.parameters = InputParameters(binary_data_size=len(salts))
        return salts


@dataclass(frozen=True)
class Forwarded:
    """A body as Triton gets it: ``json_bytes`` of JSON, then the tensors' bytes.

    ``json_bytes`` is ``None`` where the body is JSON alone.
    """

    content: bytes
    json_bytes: int | None


def read_infer(
    body: bytes,
    json_length: bytes,
    max_json_bytes: int,
    *,
    has_shared_memory: bool = False,
    salt: KeySalt | None = None,
) -> Forwarded:
    """Read the body of an ``infer`` and write it anew.

    ``json_length``: the client's header of that name, empty where it sent none.
    ``has_shared_memory``: the server's shared-memory API is open. ``salt``: the salt of the
    client's key, where the model takes one. Raises ``Refused``.
    """
    size = _json_size(body, json_length)
    if size == 0:  # one tensor without JSON, whose name and type Triton takes from the model
        return Forwarded(body, 0)
    request = _decoded(body[:size], max_json_bytes)
    _check_outputs(request.outputs, has_shared_memory)
    _check_parameters(request.parameters)
    if all(tensor.shape[:1] == [0] for tensor in request.inputs):
        problem = "they have no rows, which Triton never answers; send at least one"
        raise Refused(400, f"inputs: {problem}")
    binary = memoryview(body)[size:]
    contents: list[bytes | memoryview] = []
    names = set[str]()
    for tensor in request.inputs:
        if tensor.name in names:
            raise wrong(tensor.name, "is sent twice; send it once")
        names.add(tensor.name)
        content, binary = _content(tensor, binary, has_shared_memory)
        if salt is not None and tensor.name == SALT_INPUT:
            content = salt.of_client(tensor, content)
        contents.append(content)
    if binary:
        problem = f"{len(binary)} bytes follow the last binary tensor; send what the JSON names"
        raise Refused(400, f"inputs: {problem}")
    if salt is not None and SALT_INPUT not in names:
        tensor, content = salt.of_request(request.inputs)
        request.inputs.append(tensor)
        contents.append(content)
    text = msgspec.json.encode(request)
    return Forwarded(b"".join([text, *contents]), len(text))


def read_settings(body: bytes, max_json_bytes: int) -> Forwarded:
    """Read the JSON object of a control API and write it anew. Raises ``Refused``."""
    return Forwarded(msgspec.json.encode(_decoded(body, max_json_bytes, dict)), None)


def _json_size(body: bytes, json_length: bytes) -> int:
    if not json_length:
        return len(body)
    if json_length.isdigit() and len(json_length) < 10:
        size = int(json_length)
        if size <= len(body):
            return size
    header = "Inference-Header-Content-Length"
    raise Refused(400, f"{header}: send the bytes of JSON, of {len(body)} in the body")


def _decoded(text: bytes, max_bytes: int, kind: type[Any] = InferBody) -> Any:
    if len(text) > max_bytes:
        limit = f"{max_bytes} bytes (--max-body-bytes)"
        raise Refused(413, f"the JSON is larger than {limit}; send values as binary tensors")
    check_json(text)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        problem = printable(str(error), 300)
        raise Refused(400, f"the body is not JSON that this path takes: {problem}") from None


# --- parameters ---------------------------------------------------------------------------------


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _UINT64


def _is_sequence(value: object) -> bool:
    return isinstance(value, str) or _is_count(value)


# The parameters of a request that Triton itself reads. Any other parameter is for the model.
_TYPED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "sequence_id": (_is_sequence, "must be a string or an integer from 0 to 18446744073709551615"),
    "sequence_start": (_is_bool, "must be true or false"),
    "sequence_end": (_is_bool, "must be true or false"),
    "priority": (_is_count, "must be an integer from 0 to 18446744073709551615"),
    "timeout": (_is_count, "must be microseconds, an integer from 0 to 18446744073709551615"),
    "binary_data_output": (_is_bool, "must be true or false"),
}


def _check_parameters(parameters: Mapping[str, object]) -> None:
    for name, value in parameters.items():
        place = f"parameters.{name}"
        if name.startswith("triton_"):
            raise wrong(place, "names that begin with triton_ are Triton's own; choose another")
        is_allowed, problem = _TYPED.get(name, (None, ""))
        if is_allowed is not None:
            if not is_allowed(value):
                raise wrong(place, problem)
        elif isinstance(value, int) and not -_INT64_BOUND <= value < _INT64_BOUND:
            raise wrong(place, "must fit 64 bits")


def _check_outputs(outputs: Sequence[InferOutput], has_shared_memory: bool) -> None:
    names = set[str]()
    for output in outputs:
        name = printable(output.name, 80)
        if output.name in names:
            raise Refused(400, f"outputs: {name}: is asked for twice; name it once")
        names.add(output.name)
        parameters = output.parameters
        if parameters is msgspec.UNSET:
            continue
        if parameters.classification is not msgspec.UNSET:
            # Triton divides by zero where the output is a text.
            problem = "classification is not served; read the tensor itself"
            raise Refused(400, f"outputs: {name}: {problem}")
        _check_region(f"outputs: {name}", parameters, has_shared_memory)


def _check_region(place: str, parameters: SharedMemory, has_shared_memory: bool) -> bool:
    """Return true where the tensor lies in shared memory. Raises ``Refused``."""
    size = parameters.shared_memory_byte_size
    offset = parameters.shared_memory_offset
    if parameters.shared_memory_region is msgspec.UNSET:
        if size is not msgspec.UNSET or offset is not msgspec.UNSET:
            raise Refused(400, f"{place}: shared_memory_region is missing")
        return False
    if not has_shared_memory:
        remedy = "send the values; serve --open-control-apis opens it"
        raise Refused(400, f"{place}: shared memory is closed; {remedy}")
    if size is msgspec.UNSET:
        raise Refused(400, f"{place}: shared_memory_byte_size is missing")
    return True


# --- tensors ------------------------------------------------------------------------------------


def _content(
    tensor: InferInput, binary: memoryview, has_shared_memory: bool
) -> tuple[bytes | memoryview, memoryview]:
    """Return the tensor's bytes, and the part of ``binary`` that follows them.

    The values of ``tensor`` become binary data that follows the JSON. Raises ``Refused``.
    """
    num_elements = _num_elements(tensor)
    parameters = tensor.parameters
    if parameters is msgspec.UNSET:
        parameters = InputParameters()
    size = parameters.binary_data_size
    values = tensor.data
    if _check_region(printable(tensor.name, 80), parameters, has_shared_memory):
        if size is not msgspec.UNSET or values is not msgspec.UNSET:
            raise wrong(tensor.name, "lies in shared memory; send neither data nor binary data")
        num_bytes = parameters.shared_memory_byte_size
        expected = num_elements * ELEMENT_BYTES.get(tensor.datatype, 0)
        if tensor.datatype != "BYTES" and num_bytes != expected:
            raise wrong(tensor.name, _mismatch(f"{num_bytes} bytes", tensor))
        return b"", binary
    if size is not msgspec.UNSET:
        if values is not msgspec.UNSET:
            raise wrong(tensor.name, "has data and binary_data_size; send one of them")
        if size > len(binary):
            problem = f"binary_data_size is {size}, and {len(binary)} bytes are left in the body"
            raise wrong(tensor.name, problem)
        content = binary[:size]
        _check_binary(tensor, content, num_elements)
        return content, binary[size:]
    if values is msgspec.UNSET:
        raise wrong(tensor.name, "has no values; send data, or binary_data_size")
    flat = list(flat_values(values))
    if len(flat) != num_elements:
        raise wrong(tensor.name, _mismatch(f"{len(flat)} values", tensor))
    packed_values = packed(tensor.name, tensor.datatype, flat)
    tensor.data = msgspec.UNSET
    tensor.parameters = InputParameters(binary_data_size=len(packed_values))
    return packed_values, binary


def _num_elements(tensor: InferInput) -> int:
    """Return the number of elements that the shape names. Raises ``Refused``."""
    limit = MAX_ELEMENTS
    if tensor.datatype == "BYTES":
        limit = MAX_TEXTS
    # Dimensions beside a zero are limited too, as a program may compute strides from them.
    if math.prod(size for size in tensor.shape if size) > limit:
        problem = f"the shape {_shape(tensor)} has more than {limit} elements; send fewer"
        raise wrong(tensor.name, problem)
    return math.prod(tensor.shape)


def _check_binary(tensor: InferInput, content: memoryview, num_elements: int) -> None:
    if tensor.datatype == "BYTES":
        num_texts = count_texts(content)
        if num_texts is None:
            raise wrong(tensor.name, "the last text is cut; send 4 bytes of length and the text")
        if num_texts != num_elements:
            raise wrong(tensor.name, _mismatch(f"{num_texts} texts", tensor))
    elif len(content) != num_elements * ELEMENT_BYTES[tensor.datatype]:
        raise wrong(tensor.name, _mismatch(f"{len(content)} bytes", tensor))


def _mismatch(elements: str, tensor: InferInput) -> str:
    return f"{elements} do not fill the shape {_shape(tensor)} of {tensor.datatype}"


def _shape(tensor: InferInput) -> str:
    return printable(str(tensor.shape), 80)
