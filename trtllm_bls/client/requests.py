"""Turns the caller's values into one inference message, by the contract table.

Checks names, types and shapes. The server checks ranges, because servers differ in them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_bls.contract import Model, Tensor
from trtllm_bls.errors import InvalidRequest, half_character
from trtllm_bls.wire.engine_client import infer_message

# numpy's kinds of values that convert to each type without loss.
_KINDS = {"BOOL": "b", "FP16": "fiu", "FP32": "fiu", "STRING": "OSU"}
_WHOLE_NUMBERS = "iu"
_MOST_CHARACTERS = 80


def infer_request(
    model: Model, fields: Mapping[str, Any], request_id: str, outputs: Sequence[str] = ()
) -> Any:
    """A ``ModelInferRequest`` of ``fields`` by wire name; ``None`` values are not sent.

    ``outputs`` are the names of those to send back; none means every output. A value without a
    batch dimension holds for every row of the batch. Raises ``InvalidRequest`` for a name the model
    does not have and a value that does not fit its type or shape.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for tensor in model.inputs:
        if tensor.required and tensor.name not in given:
            raise InvalidRequest(tensor.name, f"{model.name} needs it and it was not given")
    arrays = {name: _array(_input(model, name), value) for name, value in given.items()}
    rows = max((len(array) for array in arrays.values()), default=1)
    inputs = []
    for name, array in arrays.items():
        dtype = model.input_named[name].dtype.replace("STRING", "BYTES")  # as messages name it
        inputs.append((name, dtype, _for_rows(name, array, rows)))
    return infer_message(model.name, request_id, inputs, outputs)


def _input(model: Model, name: str) -> Tensor:
    tensor = model.input_named.get(name)
    if tensor is not None:
        return tensor
    close = difflib.get_close_matches(name, model.input_named, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InvalidRequest(name, f"{model.name} has no such input{hint}")


def _array(tensor: Tensor, value: Any) -> NDArray[Any]:
    """``[rows, *dims]``; one row where the value has no batch dimension."""
    try:
        array = np.asarray(value, dtype=object if tensor.dtype == "STRING" else None)
    except ValueError:  # nested lists of unequal lengths
        raise _misfit(tensor, value) from None
    array = _typed(tensor, value, array)
    rank = len(tensor.dims)
    if array.ndim == 0:
        array = array.reshape(1)
    if tensor.single and array.ndim == 1:
        array = array.reshape(-1, 1)  # one per row
    elif array.ndim == rank:
        array = array[np.newaxis]
    fits = array.ndim == rank + 1 and all(
        wanted in (-1, size) for wanted, size in zip(tensor.dims, array.shape[1:], strict=True)
    )
    if not fits or len(array) == 0:
        raise _misfit(tensor, value)
    return array


def _typed(tensor: Tensor, value: Any, array: NDArray[Any]) -> NDArray[Any]:
    if tensor.dtype == "STRING":
        try:
            texts = [item if isinstance(item, bytes) else item.encode() for item in array.flat]
        except AttributeError:
            raise _misfit(tensor, value) from None
        except UnicodeEncodeError as error:
            raise InvalidRequest(tensor.name, half_character(error)) from None
        return np.array(texts, object).reshape(array.shape)
    if array.size and array.dtype.kind not in _KINDS.get(tensor.dtype, _WHOLE_NUMBERS):
        raise _misfit(tensor, value)
    if array.size and tensor.dtype not in _KINDS:
        limits: Any = np.iinfo(tensor.numpy_type)
        if array.min() < limits.min or array.max() > limits.max:
            raise _misfit(tensor, value)
    return array.astype(tensor.numpy_type)


def _misfit(tensor: Tensor, value: Any) -> InvalidRequest:
    text = str(value) if isinstance(value, np.ndarray) else repr(value)
    text = " ".join(text.split())
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "..."
    if tensor.single:
        expected = f"one {tensor.dtype} value"
    else:
        dims = ", ".join("any" if size == -1 else str(size) for size in tensor.dims)
        expected = f"{tensor.dtype} values of shape [{dims}]"
    return InvalidRequest(tensor.name, f"{text} cannot be sent; expected {expected}")


def _for_rows(name: str, array: NDArray[Any], rows: int) -> NDArray[Any]:
    if len(array) == rows:
        return array
    if len(array) == 1:
        return np.repeat(array, rows, axis=0)
    raise InvalidRequest(name, f"given for {len(array)} prompts, but the batch has {rows}")
