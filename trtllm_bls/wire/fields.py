"""Inputs to plain values, one dict per batch row, checked against the contract table.

Triton has checked types, rank and required inputs before a model runs; here come the things it
cannot know: ranges, UTF-8, one value where one is meant, two spellings that contradict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trtllm_bls.contract import Model, Tensor
from trtllm_bls.contract.checks import check_value
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.messages import Array

Fields = dict[str, Any]


def read_rows(model: Model, arrays: Mapping[str, Array]) -> list[Fields]:
    """The values of every batch row by field name; what was not sent is not in the dict.

    One-element tensors become ``int``/``float``/``bool``/``str``, STRING lists tuples of ``str``,
    everything else stays an array without its batch dimension.
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
    return [_read_row(known, row) for row in range(rows)]


def _read_row(known: list[tuple[Tensor, Array]], row: int) -> Fields:
    fields: Fields = {}
    spelt: dict[str, str] = {}
    for tensor, array in known:
        value = _read_value(tensor, array[row])
        if tensor.key in spelt and fields[tensor.key] != value:
            raise InvalidRequest(
                tensor.name,
                f"{value} contradicts {spelt[tensor.key]} = {fields[tensor.key]}; "
                "they are two names of one option, send one of them",
            )
        fields[tensor.key] = value
        spelt[tensor.key] = tensor.name
    return fields


def _read_value(tensor: Tensor, element: Any) -> Any:
    values = np.asarray(element).reshape(-1) if tensor.single else element
    if tensor.dtype == "STRING":
        texts = tuple(_text(tensor.name, item) for item in np.asarray(values).reshape(-1))
        return _only(tensor, texts) if tensor.single else texts
    if not tensor.single:
        return values
    value = _only(tensor, values.tolist())
    check_value(tensor, value)
    return bool(value) if tensor.dtype == "BOOL" else value


def _only(tensor: Tensor, values: Any) -> Any:
    if len(values) != 1:
        raise InvalidRequest(tensor.name, f"expected one value per prompt, got {len(values)}")
    return values[0]


def _text(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        return bytes(item).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"not valid UTF-8 at byte {error.start}") from None
