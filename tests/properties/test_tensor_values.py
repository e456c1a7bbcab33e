"""A value becomes a tensor exactly, or is refused by the tensor's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tests.helpers.tensor_values import DTYPES, expected, same, values
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.wire.contract import NUMPY_TYPES, Tensor, array_of
from trtllm_bls.wire.kserve import arrays_of, packed_infer_message


@given(value=values(), dtype=st.sampled_from(DTYPES))
@example(value=b"RIFFab\0\0", dtype="STRING")
@example(value=[np.bytes_(b"RIFFab\0\0"), b"a"], dtype="STRING")
@example(value=["", b"\x80"], dtype="STRING")
@example(value=["a\0", 5], dtype="STRING")
@example(value=[2**53 + 1, 1.0], dtype="INT64")
@example(value=[2**64, -1], dtype="UINT64")
@example(value=np.array([b"a\0"]), dtype="STRING")
@example(value=np.array([float("nan")]), dtype="BF16")
@example(value=3.4e38, dtype="BF16")
@example(value=-(2**63) - 1, dtype="FP32")
@example(value=[2**65, 2**65], dtype="FP64")
@example(value=[2**65, "a"], dtype="FP16")
@example(value="\ud800", dtype="STRING")
def test_what_is_sent_is_what_was_given(value: Any, dtype: str) -> None:
    wanted = expected(value, dtype)
    tensor = Tensor("x", dtype, (-1,))
    if wanted is None:
        with pytest.raises(TrtllmBlsError, match=r"^x: "):
            tensor.array(value)
        return
    try:
        array = tensor.array(value)
    except TrtllmBlsError:  # numpy has no type for whole numbers this large beside others
        assert isinstance(value, list) and len({type(each) for each in value}) > 1
        assert any(isinstance(each, int) and abs(each) > 2**53 for each in value)
        return
    assert array.dtype == NUMPY_TYPES[dtype] and array.dtype.isnative
    assert same(array.tolist(), wanted)
    message = packed_infer_message("any", "1", [("x", tensor.datatype, array)])
    request = service_pb2.ModelInferRequest.FromString(message)
    read = arrays_of(request.inputs, request.raw_input_contents)["x"]
    assert read.dtype == array.dtype and same(read.tolist(), wanted)


@given(value=values())
def test_without_a_declared_type_a_value_keeps_its_own(value: Any) -> None:
    try:
        array = array_of("x", value)
    except TrtllmBlsError:
        return
    kind = next(name for name, each in NUMPY_TYPES.items() if array.dtype == each)
    wanted = expected(value, kind)
    assert wanted is not None and same(array.tolist(), wanted)


@pytest.mark.parametrize(
    ("dims", "rows", "value", "shape"),
    [
        ((1,), False, 5, (1,)),
        ((1, 1), False, 5, (1, 1)),
        ((-1, 2), False, [[1, 2], [3, 4]], (2, 2)),
        ((-1, 2), False, [[1, 2, 3]], None),
        ((-1,), False, [], (0,)),
        ((2,), False, 5, None),
        ((1,), True, 5, (1, 1)),
        ((-1,), True, [1, 2, 3], (1, 3)),
        ((1,), True, [[1], [2]], (2, 1)),
        ((2,), True, [[1], [2]], None),
        ((-1,), False, [[1], [2, 3]], None),
    ],
)
def test_a_shape_is_the_declared_one(dims: Any, rows: bool, value: Any, shape: Any) -> None:
    tensor = Tensor("x", "INT32", dims)
    if shape is None:
        with pytest.raises(TrtllmBlsError, match=r"^x: (shape|its rows)"):
            tensor.array(value, rows=rows)
    else:
        assert tensor.array(value, rows=rows).shape == shape
