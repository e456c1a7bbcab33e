"""Triton's JSON forms without a Triton; tests/live/test_triton_http.py compares them with it."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from trtllm_bls.http.generate import (
    error_json,
    infer_request,
    is_final,
    response_json,
)
from trtllm_bls.http.keys import salt_of
from trtllm_bls.http.limits import Refused
from trtllm_bls.http.values import texts_in

INPUTS = {
    "text": ("BYTES", [-1, 1]),
    "cache_salt": ("BYTES", [-1, 1]),
    "ids": ("INT32", [-1, -1]),
    "words": ("INT32", [-1, 2, -1]),
    "share": ("FP32", [-1, 1]),
    "flag": ("BOOL", [1]),
    "half": ("FP16", [-1]),
    "big": ("UINT64", [1]),
}


def metadata() -> Any:
    answer = service_pb2.ModelMetadataResponse(name="m")
    for name, (datatype, shape) in INPUTS.items():
        answer.inputs.add(name=name, datatype=datatype, shape=shape)
    return answer


def asked(body: object, key: str = "") -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    inputs = {each.name: each for each in metadata().inputs}
    trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    packed = infer_request(raw, "m", inputs, "3", trace, key)
    return service_pb2.ModelInferRequest.FromString(packed)


def tensor(body: object, name: str, key: str = "") -> tuple[list[int], bytes]:
    request = asked(body, key)
    places = {each.name: place for place, each in enumerate(request.inputs)}
    return list(request.inputs[places[name]].shape), request.raw_input_contents[places[name]]


def test_members_become_inputs_and_parameters() -> None:
    """Those of ``parameters`` as if they stood outside it; what Triton would read is left out."""
    body = {"id": "x", "text": "hä", "note": 1, "parameters": {"flag": True, "on": False, "a": 0.5}}
    request = asked({**body, "priority": 3, "timeout": 1, "triton_final_response": True})
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "x")
    assert [each.name for each in request.inputs] == ["text", "flag"]
    assert list(request.raw_input_contents) == [struct.pack("<I", 3) + "hä".encode(), b"\x01"]
    values = {
        k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in request.parameters.items()
    }
    assert values.pop("traceparent").startswith("00-aaaa")
    assert values == {
        "id": "x",
        "note": 1,
        "on": False,
        "a": 0.5,
        "triton_enable_empty_final_response": True,
    }


def test_a_key_has_a_kv_cache_of_its_own() -> None:
    """As on the OpenAI API's port; also where two keys send the same salt. No key is told."""

    def salts(key: str, **body: object) -> tuple[list[int], list[bytes]]:
        shape, content = tensor({"text": ["a", "b"], **body}, "cache_salt", key)
        return shape, list(texts_in(content))

    for shape, (first, second) in (salts("k1"), salts("k2")):
        assert shape == [2, 1] and first == second and first.startswith(b"key:")
    assert salts("k1") != salts("k2")
    own = salts("k1", cache_salt=["s", "t"])
    assert own[1] == [salt_of("k1", "s").encode(), salt_of("k1", "t").encode()]
    assert own != salts("k2", cache_salt=["s", "t"])
    assert salts("", cache_salt=["s", "t"])[1] == [b"s", b"t"]
    with pytest.raises(Refused, match="cache_salt: must be strings"):
        salts("k1", cache_salt=[1, 2])
    assert [each.name for each in asked({"text": "a"}).inputs] == ["text"]
    assert not any(b"k1" in salt for salt in (*own[1], *salts("k1")[1]))


@pytest.mark.parametrize(
    ("body", "name", "shape"),
    [
        ({"text": "a"}, "text", [1, 1]),
        ({"text": ["a", "b"]}, "text", [2, 1]),
        ({"ids": [1, 2, 3]}, "ids", [1, 3]),
        ({"ids": [[1, [2]], [], 3]}, "ids", [1, 3]),
        ({"ids": []}, "ids", [1, 0]),
        ({"words": [1, 2, 3, 4]}, "words", [1, 2, 2]),
        ({"share": 1}, "share", [1, 1]),
    ],
)
def test_values_fill_the_innermost_open_dimension(body: object, name: str, shape: Any) -> None:
    """As many as the fixed dimensions leave."""
    assert tensor(body, name)[0] == shape


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"{", "the body is not JSON"),
        (b'{"ids": 1, "ids": 2}', "ids: is sent twice; send it once"),
        (b'{"text": "\\ud800"}', "text: .* send both halves"),
        ({"text": 1}, r"text: must be strings \(BYTES\)"),
        ({"text": ["a", 1]}, r"text: must be strings \(BYTES\)"),
        ({"ids": "1"}, r"ids: must be integers \(INT32\)"),
        ({"ids": 1.5}, "ids: must be integers"),
        ({"ids": True}, "ids: must be integers"),
        ({"ids": [[1], {}]}, "ids: must be integers"),
        ({"ids": None}, "ids: must be integers"),
        ({"words": [1, 2, 3]}, r"words: 3 values do not fill the shape \[-1, 2, -1\]"),
        ({"flag": 1}, "flag: must be booleans"),
        ({"flag": [True, False]}, "flag: 2 values do not fill"),
        ({"half": 1.0}, "half: FP16 has no form in JSON; send a binary tensor"),
        ({"share": True}, "share: must be numbers"),
        ({"note": [1]}, "note: the model has no such input"),
        ({"note": {}}, "note: the model has no such input"),
        ({"note": None}, "note: the model has no such input"),
        ({"note": 2**63}, "note: the model has no such input"),
        ({"note": "\ud800"}, "note: .* send both halves"),
        ({"parameters": 1}, "parameters: must be an object"),
        ({"parameters": {"a": {}}}, "a: the model has no such input"),
        ({"id": 1}, "id: must be a string"),
        (b'{"text": "a"} x', "the body is not JSON"),
    ],
)
def test_a_wrong_body_is_refused_by_its_member(body: object, told: str) -> None:
    """With what to send in its place."""
    with pytest.raises(Refused, match=told) as refused:
        asked(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(("name", "value"), [("ids", 2**31), ("ids", -(2**31) - 1), ("big", -1)])
def test_an_integer_that_does_not_fit_is_refused(name: str, value: int) -> None:
    """Triton would cut it to other digits without a word."""
    with pytest.raises(Refused, match=f"{name}: {value} does not fit"):
        asked({name: value})


def test_more_parameters_than_triton_bears_are_refused() -> None:
    """Its time for them grows with the square of their number."""
    asked({f"note{n}": n for n in range(1000)})
    with pytest.raises(Refused, match="more than 1000 members"):
        asked({f"note{n}": n for n in range(1001)})
    many = ", ".join(f'"note{n}": 1' for n in range(1001))
    with pytest.raises(Refused, match="more than 1000 members"):
        asked(f'{{{many}, "parameters": 1}}'.encode())


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8))
def test_integers_arrive_as_they_are(values: list[int]) -> None:
    """In order, little endian."""
    assert tensor({"ids": values}, "ids")[1] == np.array(values, "<i4").tobytes()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_texts_come_back_as_they_were_sent(texts: list[str]) -> None:
    """A request's strings, sent back as a response's, are the same JSON values."""
    _, content = tensor({"text": texts}, "text")
    response = service_pb2.ModelInferResponse(model_name="m", model_version="1", id="ä\x1f")
    response.outputs.add(name="text", datatype="BYTES", shape=[len(texts), 1])
    response.raw_output_contents.append(content)
    told = json.loads(response_json(response))
    assert told["text"] == (texts if len(texts) > 1 else texts[0])
    assert (told["id"], list(told)) == ("ä\x1f", ["id", "model_name", "model_version", "text"])


def test_a_response_is_written_as_triton_writes_it() -> None:
    """Sorted members, a single value without brackets, parameters among the outputs."""
    response = service_pb2.ModelInferResponse(model_name="m", model_version="1")
    response.parameters["triton_final_response"].bool_param = True
    response.parameters["sequence_end"].bool_param = False
    response.parameters["sequence_id"].int64_param = 0
    for name, datatype, values in (
        ("score", "FP32", np.array([-0.1, 1e-7], np.float32)),
        ("none", "INT32", np.array([], np.int32)),
        ("yes", "BOOL", np.array([True])),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        response.raw_output_contents.append(values.tobytes())
    assert is_final(response)
    assert response_json(response) == (
        b'{"model_name":"m","model_version":"1","none":[],'
        b'"score":[-0.10000000149011612,1.0000000116860974e-07],'
        b'"sequence_end":false,"sequence_id":0,"yes":true}'
    )


def test_bytes_that_are_no_text_pass_unchanged() -> None:
    """As Triton writes them: a caller that reads bytes has them."""
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="x", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(struct.pack("<I", 2) + b"\xff\x1f")
    assert b'"x":"\xff\\u001f"' in response_json(response)
    assert error_json('a "b"\n') == b'{"error":"a \\"b\\"\\n"}'


@given(st.lists(st.floats(), min_size=2, max_size=8))
def test_numbers_mean_themselves(values: list[float]) -> None:
    """JSON has neither infinity nor NaN."""
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="x", datatype="FP64", shape=[len(values)])
    response.raw_output_contents.append(np.array(values, np.float64).tobytes())
    told = json.loads(response_json(response), parse_constant=pytest.fail)["x"]
    assert told == [value if np.isfinite(value) else None for value in values]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_parameter_beyond_64_bits_is_refused(value: int) -> None:
    """The largest and the smallest number of 64 bits are passed on."""
    nearest = value - 1 if value > 0 else value + 1
    assert asked({"note": nearest}).parameters["note"].int64_param == nearest
    with pytest.raises(Refused, match=r"note: .* 64-bit number"):
        asked({"note": value})


def test_the_smallest_of_several_numbers_has_to_fit_too() -> None:
    """Between numbers that fit, and whatever the largest is."""
    with pytest.raises(Refused, match=r"ids: -2147483649 does not fit"):
        asked({"ids": [1, -(2**31) - 1, 2]})
