"""Inputs to plain values, one dict per batch row, checked against the contract table.

Triton has checked types, rank and required inputs before a model runs; here come the things it
cannot know: ranges, UTF-8, one value where one is meant, two spellings that contradict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from trtllm_bls.admission import RequestLimits
from trtllm_bls.contract import ENGINE, Model, Tensor
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import Array, Sampling, Wants

Fields = dict[str, Any]

MAX_STRINGS = 1024  # of one row; to decode many more would hold up every other stream
_MAX_WORD_BYTES = 1024  # of one of several; a word has at most 256 characters

_SAMPLING = tuple(field.name for field in fields(Sampling))
_WANTS = tuple(field.name for field in fields(Wants))
_NO_SAMPLING, _NO_WANTS = Sampling(), Wants()
# Opened by this package's messages; every other engine input is passed on as an extra.
_OPENED = {
    *(f"return_{name}" for name in _WANTS),
    *_SAMPLING,
    *("input_ids", "input_lengths", "max_tokens", "streaming", "num_return_sequences"),
    *("end_id", "pad_id", "stop_sequences", "bad_sequences", "embedding_bias"),
    *("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    *("exclude_input_in_output", "stop"),
}
EXTRAS = tuple(tensor for tensor in ENGINE.inputs if tensor.key not in _OPENED)
_EXTRA_KEYS = frozenset(tensor.key for tensor in EXTRAS)
_WANT_KEYS = frozenset(f"return_{name}" for name in _WANTS)


def read_rows(
    model: Model, arrays: Mapping[str, Array], limits: RequestLimits | None = None
) -> list[Fields]:
    """The values of every batch row by field name; what was not sent is not in the dict.

    One-element tensors become ``int``/``float``/``bool``/``str``, STRING lists tuples of ``str``,
    everything else stays an array without its batch dimension. Sizes are checked against
    ``limits`` before anything is decoded.
    """
    known = [(tensor, arrays[tensor.name]) for tensor in model.inputs if tensor.name in arrays]
    if not known:
        raise InvalidRequest("inputs", f"none of {model.name}'s inputs was sent")
    rows = len(known[0][1]) if known[0][1].ndim else 0
    if not rows:
        raise InvalidRequest(known[0][0].name, "has no batch rows")
    for tensor, array in known:
        if array.ndim == 0 or array.shape[0] != rows:
            raise InvalidRequest(
                tensor.name, f"shape {list(array.shape)} does not have the batch size {rows}"
            )
    if limits is not None:
        _check_sizes(known, rows, limits)
    return [_read_row(known, row) for row in range(rows)]


def _check_sizes(known: list[tuple[Tensor, Array]], rows: int, limits: RequestLimits) -> None:
    total = 0
    for tensor, array in known:
        if tensor.dtype != "STRING":
            total += array.nbytes
            continue
        _check_strings(tensor.name, array.size // rows)
        for item in array.flat:
            size = len(item)
            total += size
            if tensor.single:
                limits.check_text_bytes(tensor.name, size)
            elif size > _MAX_WORD_BYTES:
                problem = f"one of {size} bytes; at most {_MAX_WORD_BYTES} are allowed"
                raise InvalidRequest(tensor.name, problem)
    limits.check_request_bytes(total)


def _check_strings(name: str, number: int) -> None:
    if number > MAX_STRINGS:
        raise InvalidRequest(name, f"{number} strings; at most {MAX_STRINGS} are allowed")


def _read_row(known: list[tuple[Tensor, Array]], row: int) -> Fields:
    values: Fields = {}
    spelt: dict[str, str] = {}
    for tensor, array in known:
        value = _read_value(tensor, array[row])
        if tensor.key in spelt and values[tensor.key] != value:
            raise InvalidRequest(
                tensor.name,
                f"{value} contradicts {spelt[tensor.key]} = {values[tensor.key]}; "
                "they are two names of one option, send one of them",
            )
        values[tensor.key] = value
        spelt[tensor.key] = tensor.name
    return values


def _read_value(tensor: Tensor, element: Any) -> Any:
    if not tensor.single:
        return _texts(tensor, element) if tensor.dtype == "STRING" else element
    value = element
    if isinstance(element, (np.ndarray, np.generic)):
        if element.size != 1:
            problem = f"expected one value per prompt, got {element.size}"
            raise InvalidRequest(tensor.name, problem)
        value = element.item()
    # Else it is the object itself, of a one-dimensional array of objects.
    if tensor.dtype == "STRING":
        return _text(tensor.name, value)
    if (bounds := tensor.bounds) is not None and not bounds.low < value < bounds.high:
        tensor.check(value)  # at a bound or beyond it
    return bool(value) if tensor.dtype == "BOOL" else value


def _texts(tensor: Tensor, strings: Any) -> tuple[str, ...]:
    _check_strings(tensor.name, np.size(strings))
    return tuple(_text(tensor.name, item) for item in np.asarray(strings).reshape(-1))


def _text(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"not valid UTF-8 at byte {error.start}") from None


def sampling_of(row: Fields) -> Sampling:
    """The sampling options of one row; ``top_p <= 0`` counts as not set."""
    values = {name: row[name] for name in _SAMPLING if name in row}
    if not values:
        return _NO_SAMPLING
    if values.get("top_p", 1) <= 0:
        del values["top_p"]
    return Sampling(**values)


def wants_of(row: Fields) -> Wants:
    """Which outputs beside the tokens one row asks for."""
    if _WANT_KEYS.isdisjoint(row):
        return _NO_WANTS
    return Wants(**{name: row.get(f"return_{name}", False) for name in _WANTS})


def extras_of(row: Fields) -> dict[str, Array]:
    """The inputs that are passed on unopened, as arrays without batch dimension."""
    if _EXTRA_KEYS.isdisjoint(row):
        return {}
    return {
        tensor.name: _unopened(tensor, row[tensor.key]) for tensor in EXTRAS if tensor.key in row
    }


def _unopened(tensor: Tensor, value: Any) -> Array:
    if tensor.single:
        value = [value.encode() if tensor.dtype == "STRING" else value]
    return np.asarray(value, dtype=tensor.numpy_type)
