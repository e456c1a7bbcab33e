"""JSON values as the bytes of Triton's tensors; no I/O.

Triton cuts an integer that its tensor cannot hold to other digits, and makes room for a shape
before it looks for the values. So a value is packed here only if it fits its type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

from trtllm_bls.errors import half_character, printable
from trtllm_bls.http.limits import Refused

Datatype: TypeAlias = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
# The bytes of one element; a text has as many as its own length says.
ELEMENT_BYTES: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
_TYPE_NAMES = {"BYTES": "strings", "BOOL": "booleans", "FP32": "numbers", "FP64": "numbers"}
_LENGTH = struct.Struct("<I")  # before each text of a BYTES tensor


def wrong(field: str, problem: str) -> Refused:
    """The refusal of a member's value."""
    return Refused(400, f"{printable(field, 80)}: {problem}")


@cache
def numpy_type(datatype: str) -> np.dtype[Any]:
    """The type of Triton's numbers and BOOL in numpy. Raises ``TypeError`` for others."""
    return np.dtype(datatype.lower().replace("fp", "float"))


def flat_values(value: Any) -> Iterator[Any]:
    """The values of a list and of the lists in it, in order; anything else is one value."""
    if type(value) is list:
        for item in value:
            yield from flat_values(item)
    else:
        yield value


def packed(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    """The bytes of the tensor ``name`` with these values. Raises ``Refused``."""
    kinds = set(map(type, values))
    if datatype == "BYTES" and kinds <= {str}:
        texts = [encoded(name, value) for value in values]
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    if datatype == "BOOL" and kinds <= {bool}:
        return bytes(values)
    if "INT" in datatype and kinds <= {int}:
        limits = np.iinfo(numpy_type(datatype))
        for value in (min(values), max(values)) if values else ():
            if not limits.min <= value <= limits.max:
                raise wrong(name, f"{_digits(value)} does not fit {datatype}")
        return np.array(values, limits.dtype).tobytes()
    if datatype in ("FP32", "FP64") and kinds <= {int, float}:
        with suppress(OverflowError):
            return np.array(values, numpy_type(datatype)).tobytes()
    if datatype in ("FP16", "BF16"):
        problem = f"{datatype} has no form in JSON; send a binary tensor of infer, or gRPC"
        raise wrong(name, problem)
    type_name = _TYPE_NAMES.get(datatype, "integers")
    raise wrong(name, f"must be {type_name} ({datatype}), or a list of them")


def _digits(number: int) -> str:
    if number.bit_length() > 512:  # Python refuses to write thousands of digits
        return "an integer of more than 150 digits"
    return printable(str(number), 40)


def encoded(name: str, text: str) -> bytes:
    """``text`` as UTF-8. Raises ``Refused`` for half of a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise wrong(name, half_character(error)) from None


def texts_in(content: bytes | memoryview) -> Iterator[bytes]:
    """The texts in the bytes of a whole BYTES tensor."""
    offset = 0
    while offset < len(content):
        (size,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size + size
        yield bytes(content[offset - size : offset])


def count_texts(content: memoryview) -> int:
    """The number of texts in the bytes of a BYTES tensor; -1 where the last one is cut."""
    count = 0
    offset = 0
    end = len(content)
    while offset + _LENGTH.size <= end:
        (size,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size + size
        count += 1
    return count if offset == end else -1
