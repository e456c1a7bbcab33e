"""The JSON of Triton's ``generate`` extension: a body to tensors, a response to JSON. No I/O.

A body is a flat object. A member named like an input of the model becomes that tensor, every other
member a parameter of the request; the members of ``parameters`` are treated as if they stood
outside it. ``tests/live/test_triton_http.py`` compares all of it with Triton's own answers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import isfinite, prod
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from trtllm_bls.http.guard import Refused

# What Triton reads from a gRPC request's parameters for itself. ``generate`` has no such meaning
# for them: a model sees them as parameters like all others, and they change nothing.
_READ_BY_TRITON = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
)
_FINAL = "triton_final_response"
_MOST_PARAMETERS = 1000
_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


class LeftToTriton(Exception):
    """The body is not one that this module reads: Triton answers it, nearly always by refusing."""


@cache
def _numpy_type(datatype: str) -> np.dtype[Any]:
    """Of Triton's numbers and BOOL. Raises ``TypeError`` for others."""
    return np.dtype(datatype.lower().replace("fp", "float"))


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object, in order; a dict would hide a repeated key, which is wrong."""


def infer_request(
    body: bytes, model: str, inputs: Mapping[str, Any], version: str, traceparent: str = ""
) -> service_pb2.ModelInferRequest:
    """``body`` as a request to ``model``, whose metadata has these ``inputs``, by name.

    Raises ``LeftToTriton``. Raises ``Refused`` for an integer that its input's type cannot hold,
    which Triton would cut to other digits, and for more parameters than a request may have, whose
    time in Triton grows with the square of their number.
    """
    try:
        members = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_Members)
    except (ValueError, RecursionError) as error:  # of UTF-8 as well
        raise LeftToTriton from error
    if not isinstance(members, _Members):
        raise LeftToTriton
    flat: list[tuple[str, Any]] = []
    for key, value in members:
        if key != "parameters":
            flat.append((key, value))
        elif isinstance(value, _Members):
            flat += value
        else:
            raise LeftToTriton
    if len({key for key, _ in flat}) < len(flat):
        raise LeftToTriton
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for key, value in flat:
        if key in inputs:
            _add_input(request, inputs[key], value)
        elif key not in _READ_BY_TRITON and not key.startswith("triton_"):
            if len(request.parameters) == _MOST_PARAMETERS:
                problem = f"more than {_MOST_PARAMETERS} members are no inputs of the model"
                raise Refused(400, problem)
            _set_parameter(request.parameters[key], value)
    request_id = dict(members).get("id", "")
    if not isinstance(request_id, str):
        raise LeftToTriton
    request.id = request_id
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if traceparent:
        request.parameters["traceparent"].string_param = traceparent
    return request


def _set_parameter(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = _encoded(value)
    else:
        raise LeftToTriton


def _add_input(request: Any, declared: Any, value: Any) -> None:
    """Add a tensor; the innermost open dimension takes what the others leave."""
    values = value if isinstance(value, list) and not isinstance(value, _Members) else [value]
    content, count, dims = _packed(declared, values), len(values), declared.shape
    fixed = prod(dim for dim in dims if dim >= 0)
    shape = [1 if dim < 0 else dim for dim in dims]
    open_dims = [place for place, dim in enumerate(dims) if dim < 0]
    if open_dims and fixed and count % fixed == 0:
        shape[open_dims[-1]] = count // fixed
    elif count != fixed:
        raise LeftToTriton
    request.inputs.add(name=declared.name, datatype=declared.datatype, shape=shape)
    request.raw_input_contents.append(content)


def _packed(declared: Any, values: Sequence[Any]) -> bytes:
    kinds, datatype = set(map(type, values)), declared.datatype
    if datatype == "BYTES" and kinds <= {str}:
        texts = [_encoded(value) for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BOOL" and kinds <= {bool}:
        return bytes(values)
    if "INT" in datatype and kinds <= {int}:
        held = np.iinfo(_numpy_type(datatype))
        for value in (min(values), max(values)) if values else ():
            if not held.min <= value <= held.max:
                problem = f"input '{declared.name}': {value} does not fit {datatype}"
                raise Refused(400, problem)
        return np.array(values, held.dtype).tobytes()
    if datatype in ("FP32", "FP64") and kinds <= {int, float}:
        with suppress(OverflowError):
            return np.array(values, _numpy_type(datatype)).tobytes()
    raise LeftToTriton


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise LeftToTriton from error


def is_final(response: Any) -> bool:
    """Whether the ``ModelInferResponse`` is the last of its request."""
    return _FINAL in response.parameters and bool(response.parameters[_FINAL].bool_param)


def response_json(response: Any) -> bytes:
    """A ``ModelInferResponse`` as one JSON object, its members sorted by name."""
    members: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        members["id"] = response.id
    for key, parameter in response.parameters.items():
        if key != _FINAL:
            members[key] = getattr(parameter, parameter.WhichOneof("parameter_choice"))
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        values: list[Any] = []
        if output.datatype != "BYTES":
            numbers = np.frombuffer(content, _numpy_type(output.datatype)).tolist()
            # JSON has no infinity. RapidJSON writes nothing in its place, which no client can read.
            values = [number if isfinite(number) else None for number in numbers]
        else:
            place = 0
            while place < len(content):
                (size,) = struct.unpack_from("<I", content, place)
                place += 4 + size
                # Bytes that are not UTF-8 are passed on as they are, as Triton does.
                values.append(content[place - size : place].decode("utf-8", "surrogateescape"))
        members[output.name] = values[0] if len(values) == 1 else values
    return _written(members)


def error_json(message: str) -> bytes:
    """The body of an error."""
    return _written({"error": message})


def _written(members: Mapping[str, Any]) -> bytes:
    return _encode(members).encode("utf-8", "surrogateescape")
