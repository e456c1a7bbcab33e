"""JSON values as the bytes of Triton's tensors; no I/O.

Triton truncates an integer that does not fit its tensor, and allocates a shape before it looks for
the values. So a value is packed here only if it fits its type.
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
# Bytes of one element. Each text of a BYTES tensor begins with its length instead.
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
    """Return the refusal of a member's value."""
    return Refused(400, f"{printable(field, 80)}: {problem}")


@cache
def numpy_type(datatype: str) -> np.dtype[Any]:
    """Return numpy's type for Triton's numbers and BOOL. Raises ``TypeError`` for other types."""
    return np.dtype(datatype.lower().replace("fp", "float"))


def flat_values(value: Any) -> Iterator[Any]:
    """Yield the values of a list and of the lists in it, in order; anything else is one value."""
    if type(value) is list:
        for item in value:
            yield from flat_values(item)
    else:
        yield value


def packed(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    """Return the bytes of the tensor ``name`` with these values. Raises ``Refused``."""
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
    """Encode ``text`` as UTF-8. Raises ``Refused`` for half of a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise wrong(name, half_character(error)) from None


def texts_in(content: bytes | memoryview) -> Iterator[bytes]:
    """Yield the texts in the bytes of a whole BYTES tensor."""
    offset = 0
    while offset < len(content):
        (size,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size + size
        yield bytes(content[offset - size : offset])


def count_texts(content: memoryview) -> int | None:
    """Count the texts in the bytes of a BYTES tensor; ``None`` where the last one is cut."""
    count = 0
    offset = 0
    end = len(content)
    while offset + _LENGTH.size <= end:
        (size,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size + size
        count += 1
    if offset != end:
        return None
    return count
