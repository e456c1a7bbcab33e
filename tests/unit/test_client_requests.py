"""Values to one inference message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtllm_bls.client.client import infer_request
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.wire.contract import BLS, ENGINE


def text_request(**fields: Any) -> Any:
    return infer_request(BLS, {"text_input": "Hi", "max_tokens": 4} | fields, "7")


def sent(request: Any, name: str) -> tuple[str, list[int], bytes]:
    """One input's type, shape and bytes on the wire."""
    names = [tensor.name for tensor in request.inputs]
    tensor = request.inputs[names.index(name)]
    return tensor.datatype, list(tensor.shape), request.raw_input_contents[names.index(name)]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text_input", "Ö", ("BYTES", [1, 1], b"\x02\0\0\0\xc3\x96")),
        ("text_input", b"\xff", ("BYTES", [1, 1], b"\x01\0\0\0\xff")),
        ("text_input", "", ("BYTES", [1, 1], b"\0\0\0\0")),
        ("stop_words", ["a", "\n"], ("BYTES", [1, 2], b"\x01\0\0\0a\x01\0\0\0\n")),
        ("stop_words", "a", ("BYTES", [1, 1], b"\x01\0\0\0a")),
        ("stop_words", [], ("BYTES", [1, 0], b"")),
        ("top_k", 3, ("INT32", [1, 1], b"\x03\0\0\0")),
        ("top_k", np.array([[3]], np.int64), ("INT32", [1, 1], b"\x03\0\0\0")),
        ("temperature", 1, ("FP32", [1, 1], b"\0\0\x80\x3f")),
        ("seed", 2**64 - 1, ("UINT64", [1, 1], b"\xff" * 8)),
        ("stream", True, ("BOOL", [1, 1], b"\x01")),
        ("lora_config", [[1, 0, 8]], ("INT32", [1, 1, 3], b"\x01\0\0\0\0\0\0\0\x08\0\0\0")),
        ("lora_weights", np.ones((1, 2)), ("FP16", [1, 1, 2], b"\0\x3c\0\x3c")),
    ],
)
def test_values_become_the_contract_s_type_and_shape(
    name: str, value: Any, expected: tuple[str, list[int], bytes]
) -> None:
    """Python and numpy values, with a batch dimension added where there is none."""
    assert sent(text_request(**{name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("top_k", "three", "'three' cannot be sent; expected one INT32 value"),
        ("top_k", 0.5, "0.5 cannot be sent; expected one INT32 value"),
        ("top_k", True, "True cannot be sent; expected one INT32 value"),
        ("top_k", 2**31, "2147483648 cannot be sent; expected one INT32 value"),
        ("max_tokens", 2**32 + 5, "4294967301 cannot be sent; expected one INT32 value"),
        ("timeout_ms", 2**32 + 1, "4294967297 cannot be sent; expected one INT32 value"),
        ("timeout_ms", 10**30, "0 cannot be sent; expected one INT32 value"),
        ("seed", -1, "-1 cannot be sent; expected one UINT64 value"),
        ("seed", 2**64, "18446744073709551616 cannot be sent; expected one UINT64 value"),
        ("stream", 1, "1 cannot be sent; expected one BOOL value"),
        ("text_input", 5, "5 cannot be sent; expected one STRING value"),
        ("stop_words", [["a"], ["b", "c"]], "expected STRING values of shape [any]"),
        ("lora_config", [1, 0, 8], "[1, 0, 8] cannot be sent; expected INT32 values of shape"),
        ("lora_config", [[1, 0]], "expected INT32 values of shape [any, 3]"),
        ("text_input", np.zeros((0, 1), object), "expected one STRING value"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: Any, problem: str) -> None:
    """The error has the field, the value and what was expected."""
    with pytest.raises(InvalidRequest) as caught:
        text_request(**{name: value})
    assert caught.value.field == name
    assert problem in str(caught.value)


def test_an_error_shows_no_more_than_a_line_of_a_value() -> None:
    """A prompt of a megabyte is not repeated in the message."""
    with pytest.raises(InvalidRequest) as caught:
        text_request(top_k="x\n" * 10_000)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_an_unknown_field_is_refused_with_its_likely_name() -> None:
    """Names come from the model's own table: the engine's are not the text model's."""
    with pytest.raises(InvalidRequest, match="tensorrt_llm_bls has no such input; did you mean"):
        text_request(tempratur=1)
    with pytest.raises(InvalidRequest, match=r"xyz: tensorrt_llm_bls has no such input$"):
        text_request(xyz=1)


def test_none_is_not_sent() -> None:
    """``None`` is how a caller says nothing; it does not do for a required input."""
    assert [tensor.name for tensor in text_request(top_k=None).inputs] == [
        "text_input",
        "max_tokens",
    ]
    with pytest.raises(InvalidRequest, match="max_tokens: tensorrt_llm_bls needs it"):
        text_request(max_tokens=None)


def test_a_value_without_batch_dimension_holds_for_every_row() -> None:
    """A list for a one-value input is one value per row."""
    request = text_request(text_input=["a", "b"], top_p=[0.5, 1.0], stop_words=["x"])
    assert sent(request, "text_input")[1:] == ([2, 1], b"\x01\0\0\0a\x01\0\0\0b")
    assert sent(request, "max_tokens")[1:] == ([2, 1], b"\x04\0\0\0" * 2)
    assert sent(request, "top_p")[1] == [2, 1]
    assert sent(request, "stop_words")[1:] == ([2, 1], b"\x01\0\0\0x" * 2)


def test_rows_must_agree() -> None:
    """Two batch sizes in one request are a mistake that the server could not explain as well."""
    with pytest.raises(InvalidRequest, match="top_p: given for 2 prompts, but the batch has 3"):
        text_request(text_input=["a", "b", "c"], top_p=[0.5, 1.0])


def test_the_message_names_model_id_and_outputs() -> None:
    """And asks for the empty final response, without which the end could only be guessed."""
    fields = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 4}
    request = infer_request(ENGINE, fields, "7", ("output_ids", "sequence_length"))
    assert (request.model_name, request.id) == ("tensorrt_llm", "7")
    assert [output.name for output in request.outputs] == ["output_ids", "sequence_length"]
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert sent(request, "input_ids") == ("INT32", [1, 2], b"\x01\0\0\0\x02\0\0\0")
