"""Python values that somebody may give as a tensor, of every type that Triton has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trtllm_bls.wire.contract import NUMPY_TYPES

DTYPES = tuple(NUMPY_TYPES)
_TEXTS = st.text(max_size=5) | st.sampled_from(["a\0", "\0", "é\0\0"])
_BYTES = st.binary(max_size=5) | st.sampled_from([b"RIFFab\0\0", b"\0", b""])
_BYTES |= _BYTES.map(np.bytes_)
_INTS = st.integers(-(2**65), 2**65) | st.integers(-130, 300)
_FLOATS = st.floats() | st.sampled_from([1e300, 3.4e38, 65504.0, 65520.0, 1.0, math.inf])
_SCALARS = st.one_of(_TEXTS, _BYTES, _INTS, _FLOATS, st.booleans(), st.none())


def values() -> st.SearchStrategy[Any]:
    """A scalar, a list of one kind or of several, or an array of any of numpy's types."""
    lists = [
        st.lists(each, min_size=1, max_size=4)
        for each in (_TEXTS, _BYTES, _INTS, _FLOATS, _SCALARS)
    ]
    kinds = arrays.scalar_dtypes() | st.just(np.dtype(object))
    made = kinds.flatmap(
        lambda kind: arrays.arrays(
            kind, st.integers(1, 4), elements=_TEXTS | _BYTES if kind.kind == "O" else None
        )
    )
    return st.one_of(_SCALARS, *lists, made, made.map(lambda array: array[::-1]))


def expected(value: Any, dtype: str) -> list[Any] | None:
    """The elements that a tensor of the type has to have, read one by one in Python; ``None``: the
    value cannot be such a tensor."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufUO":
            return None
        elements = value.tolist()
    else:
        elements = list(value) if isinstance(value, list) else [value]
    found = [_element(each, dtype) for each in elements]
    return None if any(each is None for each in found) else found


def _element(value: Any, dtype: str) -> Any:
    if dtype == "STRING":
        if isinstance(value, str):
            return None if any("\ud800" <= c <= "\udfff" for c in value) else value.encode()
        return bytes(value) if isinstance(value, bytes) else None  # numpy's compare without NULs
    if not isinstance(value, (bool, int, float)):
        return None
    if dtype in ("FP64", "FP32", "FP16", "BF16"):
        try:
            number = float(value)
        except OverflowError:
            return None
        rounded = _rounded(number, dtype)
        return None if math.isinf(rounded) and not math.isinf(number) else rounded
    if isinstance(value, float) and not value.is_integer():
        return None
    whole = int(value)
    if dtype == "BOOL":
        return bool(whole) if whole in (0, 1) else None
    bounds: Any = np.iinfo(NUMPY_TYPES[dtype])
    return whole if bounds.min <= whole <= bounds.max else None


def _rounded(number: float, dtype: str) -> float:
    with np.errstate(over="ignore"):
        if dtype != "BF16":
            return float(np.array(number).astype(NUMPY_TYPES[dtype]))
        single = np.float32(number)
    if not np.isfinite(single):
        return float(single)
    bits = int(single.view(np.uint32))
    low, half = bits & 0xFFFF, 0x8000
    up = low > half or (low == half and bits >> 16 & 1)
    return float(np.uint32((bits >> 16) + up << 16).view(np.float32))


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether the elements are equal, those that are no number included."""
    pairs = zip(left, right, strict=True) if len(left) == len(right) else [(0, 1)]
    return all(a == b or (a != a and b != b) for a, b in pairs)
