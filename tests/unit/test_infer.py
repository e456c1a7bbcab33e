"""The body of ``infer``: nothing of it reaches Triton but typed values, written anew."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_bls.http.budgets import MAX_ELEMENTS, MAX_TEXTS
from trtllm_bls.http.infer import Forwarded, KeySalt, read_infer, read_settings
from trtllm_bls.http.keys import salt_of
from trtllm_bls.http.limits import Refused
from trtllm_bls.http.values import ELEMENT_BYTES, texts_in

INT64_MAX = 2**63 - 1


def tensor(**fields: Any) -> dict[str, Any]:
    """An input of one integer, with other ``fields``; ``None`` leaves a field out."""
    whole = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1], **fields}
    return {name: value for name, value in whole.items() if value is not None}


def binary(size: object, **fields: Any) -> dict[str, Any]:
    """An input whose values follow the JSON."""
    return tensor(data=None, parameters={"binary_data_size": size}, **fields)


def read(body: object, rest: bytes = b"", limit: int = 200_000, **options: Any) -> Forwarded:
    """Read a body whose JSON is ``body`` and is followed by ``rest``."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = b"%d" % len(raw) if rest else b""
    return read_infer(raw + rest, length, limit, **options)


def parts(forwarded: Forwarded) -> tuple[Any, bytes]:
    """The JSON and the tensors' bytes that Triton gets."""
    size = forwarded.json_bytes
    assert size is not None
    return json.loads(forwarded.content[:size]), forwarded.content[size:]


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def test_values_become_binary_data_behind_the_json() -> None:
    """Triton's JSON parser sees no value of a tensor, and no member that nobody knows."""
    inputs = [
        {**tensor(name="a", shape=[2, 1], data=[[1], [-2]]), "unknown": 1},
        tensor(name="b", datatype="BYTES", shape=[1, 2], data=["ä", ""]),
        tensor(name="c", datatype="BOOL", shape=[1], data=[True]),
        binary(4, name="d", datatype="FP16", shape=[1, 2]),
        tensor(name="e", shape=[3, 0], data=[]),
    ]
    outputs = [{"name": "z", "parameters": {"binary_data": True, "unknown": 1}}, {"name": "y"}]
    sent = {"id": "i", "unknown": 1, "inputs": inputs, "outputs": outputs}
    text, content = parts(read({**sent, "parameters": {"note": 0.5, "priority": 3}}, b"half"))
    sizes = {"a": 8, "b": 10, "c": 1, "d": 4, "e": 0}
    expected = []
    for each in inputs:
        kept = {key: each[key] for key in ("name", "datatype", "shape")}
        expected.append({**kept, "parameters": {"binary_data_size": sizes[each["name"]]}})
    assert text == {
        "id": "i",
        "inputs": expected,
        "outputs": [{"name": "z", "parameters": {"binary_data": True}}, {"name": "y"}],
        "parameters": {"note": 0.5, "priority": 3},
    }
    assert content == struct.pack("<ii", 1, -2) + texts("ä".encode(), b"") + b"\1half"


def test_one_tensor_without_json_is_passed_on() -> None:
    """Triton takes its name and its type from the model."""
    assert read_infer(b"\xff", b"0", 10) == Forwarded(b"\xff", 0)


def test_a_tensor_in_shared_memory_needs_the_control_apis() -> None:
    """Its size has to be that of its shape, and it has no values beside."""
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    sent = {"inputs": [tensor(data=None, shape=[2], parameters=region)]}
    text, content = parts(read(sent, has_shared_memory=True))
    assert text["inputs"][0]["parameters"] == region and content == b""
    for wrong, problem in (
        ({"shared_memory_region": "r"}, "shared_memory_byte_size is missing"),
        ({"shared_memory_byte_size": 8}, "shared_memory_region is missing"),
        ({**region, "shared_memory_byte_size": 9}, "9 bytes do not fill"),
        ({**region, "shared_memory_offset": -1}, "shared_memory_offset"),
        ({**region, "binary_data_size": 8}, "send neither data nor binary data"),
    ):
        body = {"inputs": [tensor(data=None, shape=[2], parameters=wrong)]}
        with pytest.raises(Refused, match=problem):
            read(body, has_shared_memory=True)
    for body in (sent, {"inputs": [tensor()], "outputs": [{"name": "z", "parameters": region}]}):
        with pytest.raises(Refused, match="serve --open-control-apis opens it"):
            read(body)


def test_a_key_has_a_kv_cache_of_its_own() -> None:
    """A salt is added for each row, and one that the client sent is made one of its key."""
    salt = KeySalt("k1", (-1, 1))
    rows = {"inputs": [tensor(shape=[2, 1], data=[1, 2])]}
    text, content = parts(read(rows, salt=salt))
    added = text["inputs"][1]
    assert (added["name"], added["datatype"], added["shape"]) == ("cache_salt", "BYTES", [2, 1])
    first, second = texts_in(content[8:])
    assert first == second and first.startswith(b"key:") and b"k1" not in first
    sent = texts(b"mine")
    own = tensor(name="cache_salt", datatype="BYTES", shape=[1, 1], data=["mine"])
    packed_own = binary(len(sent), name="cache_salt", datatype="BYTES", shape=[1, 1])
    for body, rest in (({"inputs": [tensor(), own]}, b""), ({"inputs": [packed_own]}, sent)):
        text, content = parts(read(body, rest, salt=salt))
        size = text["inputs"][-1]["parameters"]["binary_data_size"]
        assert list(texts_in(content[-size:])) == [salt_of("k1", "mine").encode()]
    wrong = tensor(name="cache_salt")
    with pytest.raises(Refused, match="cache_salt: must be strings"):
        read({"inputs": [wrong]}, salt=salt)


WRONG: list[tuple[dict[str, Any], str]] = [
    # Triton ends its process for the first, and touches a gigabyte for the second.
    (tensor(shape=[INT64_MAX]), f"x: the shape .* has more than {MAX_ELEMENTS} elements"),
    (tensor(shape=[2**26 - 1, 1, 1]), "x: 1 values do not fill the shape"),
    (tensor(shape=[2**32, 2**32]), "x: the shape .* has more than"),  # 0 in 64 bits
    (tensor(shape=[2**62, 4, 0], data=[]), "x: the shape .* has more than"),
    (tensor(shape=[MAX_TEXTS + 1], datatype="BYTES"), f"more than {MAX_TEXTS} elements"),
    (tensor(shape=[2, 1]), r"x: 1 values do not fill the shape \[2, 1\] of INT32"),
    (tensor(shape=[-1]), r"at `\$.inputs\[0\].shape\[0\]`"),
    (tensor(shape=["x"]), r"at `\$.inputs\[0\].shape\[0\]`"),
    (tensor(shape=[1.5]), r"at `\$.inputs\[0\].shape\[0\]`"),
    (tensor(shape=[2**63]), r"at `\$.inputs\[0\].shape\[0\]`"),
    (tensor(shape=[1] * 33), r"length <= 32 - at `\$.inputs\[0\].shape`"),
    (tensor(shape=None), "missing required field `shape`"),
    (tensor(shape=5), r"at `\$.inputs\[0\].shape`"),
    (tensor(data=5), r"at `\$.inputs\[0\].data`"),
    (tensor(data="x"), r"at `\$.inputs\[0\].data`"),
    (tensor(data=[None]), r"x: must be integers \(INT32\)"),
    (tensor(data=[{}]), "x: must be integers"),
    (tensor(data=[1.0]), "x: must be integers"),
    (tensor(data=[True]), "x: must be integers"),
    (tensor(data=["1"]), "x: must be integers"),
    (tensor(data=[2**31]), "x: 2147483648 does not fit INT32"),
    (tensor(data=[10**300]), "x: an integer of more than 150 digits does not fit INT32"),
    (tensor(data=[[1], [2]]), "x: 2 values do not fill"),
    (tensor(data=None), "x: has no values"),
    (tensor(datatype="BYTES"), "x: must be strings"),
    (tensor(datatype="BOOL"), "x: must be booleans"),
    (tensor(datatype="FP32", data=["a"]), "x: must be numbers"),
    (tensor(datatype="FP16", data=[1.0]), "x: FP16 has no form in JSON; send a binary tensor"),
    (tensor(datatype="FOO"), r"at `\$.inputs\[0\].datatype`"),
    (tensor(datatype=5), r"at `\$.inputs\[0\].datatype`"),
    (tensor(name=5), r"at `\$.inputs\[0\].name`"),
    (tensor(parameters=5), r"at `\$.inputs\[0\].parameters`"),
    (tensor(parameters={"binary_data_size": 4}), "x: has data and binary_data_size"),
    (binary(-1), r"at `\$.inputs\[0\].parameters.binary_data_size`"),
    (binary("4"), r"at `\$.inputs\[0\].parameters.binary_data_size`"),
    (binary(True), r"at `\$.inputs\[0\].parameters.binary_data_size`"),
    (binary(4), "x: binary_data_size is 4, and 0 bytes are left in the body"),
    (binary(0), r"x: 0 bytes do not fill the shape \[1\] of INT32"),
    (binary(0, datatype="BYTES"), "x: 0 texts do not fill the shape"),
]


@pytest.mark.parametrize(("wrong", "problem"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_input_is_refused_by_its_place(wrong: dict[str, Any], problem: str) -> None:
    """Triton ends, answers 500 or takes another value for each of these."""
    with pytest.raises(Refused, match=problem) as refused:
        read({"inputs": [wrong]})
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("rest", "fields", "problem"),
    [
        (b"123", {"size": 3}, "x: 3 bytes do not fill the shape"),
        (b"12345", {"size": 4}, "1 bytes follow the last binary tensor"),
        (texts(b"a", b"b"), {"size": 10, "datatype": "BYTES"}, "x: 2 texts do not fill"),
        (texts(b"a")[:-1], {"size": 4, "datatype": "BYTES"}, "x: the last text is cut"),
        (texts(b"a") + b"\0", {"size": 6, "datatype": "BYTES"}, "x: the last text is cut"),
        (b"\xff" * 8, {"size": 8, "datatype": "BYTES"}, "x: the last text is cut"),
    ],
)
def test_binary_data_fills_its_shape_exactly(
    rest: bytes, fields: dict[str, Any], problem: str
) -> None:
    """No byte is missing, and none is left."""
    size = fields.pop("size")
    with pytest.raises(Refused, match=problem):
        read({"inputs": [binary(size, **fields)]}, rest)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("sequence_id", [0, 2**64 - 1, "a"], [-1, 2**64, True, 1.5]),
        ("sequence_start", [True, False], [1, "true", 0.5]),
        ("sequence_end", [True, False], [0, ""]),
        ("priority", [0, 5, 2**64 - 1], [-1, 1.5, "1", True, 2**64]),
        ("timeout", [0, 10**9], [-1, 1.5, "1", False]),
        ("binary_data_output", [True], [1, "x"]),
        ("note", [1, -(2**63), 1.5, "x", True], [2**63, -(2**63) - 1, None, [1], {}]),
        ("triton_final_response", [], [True]),
    ],
)
def test_parameters_of_the_protocol_have_types(
    name: str, right: list[Any], wrong: list[Any]
) -> None:
    """The refusal names the parameter; those of the model may be of any plain type."""
    for value in right:
        text, _ = parts(read({"inputs": [tensor()], "parameters": {name: value}}))
        assert text["parameters"] == {name: value}
    for value in wrong:
        with pytest.raises(Refused, match="parameters"):
            read({"inputs": [tensor()], "parameters": {name: value}})


@pytest.mark.parametrize(
    ("body", "length", "status", "problem"),
    [
        (b"{}", b"3", 400, "Inference-Header-Content-Length: send the bytes of JSON, of 2"),
        (b"{}", b"-1", 400, "Inference-Header-Content-Length"),
        (b"{}", b"0x1", 400, "Inference-Header-Content-Length"),
        (b"{}", b"9" * 5000, 400, "Inference-Header-Content-Length"),
        (b" " * 10_001, b"", 413, "larger than 10000 bytes .--max-body-bytes.; send values as bin"),
        (b'{"inputs": "\xff"}', b"", 400, "not UTF-8 at byte 12"),
        (b'{"inputs": 5}', b"", 400, r"Expected `array`, got `int` - at `\$.inputs`"),
        (b'{"inputs":[{"name":"x","datatype":"' + b"F" * 5000, b"", 400, "JSON"),
        ({"inputs": [tensor(shape=[0, 2], data=[])] * 2}, b"", 400, "they have no rows"),
        ({"inputs": []}, b"", 400, "they have no rows"),
        ({"inputs": [tensor()] * 2}, b"", 400, "x: is sent twice"),
        ({"inputs": [tensor()], "outputs": [{"name": "z"}] * 2}, b"", 400, "z: is asked for twice"),
        ({"inputs": [tensor()] * 1001}, b"", 400, "inputs"),
        ({"inputs": [tensor()], "outputs": [{"name": "z"}] * 1001}, b"", 400, "outputs"),
        (
            {"inputs": [tensor()], "parameters": dict.fromkeys(map(str, range(1001)), 1)},
            b"",
            400,
            "1000",
        ),
        (
            {"inputs": [tensor()], "outputs": [{"name": "t", "parameters": {"classification": 1}}]},
            b"",
            400,
            "outputs: t: classification is not served",
        ),
    ],
)
def test_a_body_that_triton_does_not_bear_is_refused(
    body: Any, length: bytes, status: int, problem: str
) -> None:
    """Before Triton sees it, with the place of the mistake."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    limit = 200_000 if isinstance(body, dict) else 10_000
    with pytest.raises(Refused, match=problem) as refused:
        read_infer(raw, length, limit)
    assert refused.value.status == status
    assert len(refused.value.message) < 1000


@given(
    st.sampled_from(sorted(ELEMENT_BYTES)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 70),
)
def test_only_the_product_of_the_shape_is_taken(datatype: str, shape: list[int], size: int) -> None:
    """Of any numeric type: as many bytes as the shape has elements, no more and no fewer."""
    expected = int(np.prod(shape, dtype=int)) * ELEMENT_BYTES[datatype]
    other = tensor(name="other", data=[0])
    body = {"inputs": [binary(size, datatype=datatype, shape=shape), other]}
    if size == expected:
        _, content = parts(read(body, b"\1" * size))
        assert content == b"\1" * size + bytes(4)
    else:
        with pytest.raises(Refused, match="do not fill"):
            read(body, b"\1" * size)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.data())
def test_whatever_is_sent_is_understood_or_refused(data: st.DataObject) -> None:
    """Any JSON in the place of any member: the client's mistake, or tensors of the right size."""
    place = data.draw(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]))
    body = {"inputs": [tensor(**{place: data.draw(JSON_VALUES)})]}
    raw = json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass")
    try:
        text, content = parts(read_infer(raw, b"", 10_000))
    except Refused as refused:
        assert refused.status == 400
    else:
        (written,) = text["inputs"]
        num_bytes = int(np.prod(written["shape"], dtype=int)) * ELEMENT_BYTES[written["datatype"]]
        assert written["parameters"] == {"binary_data_size": len(content)}
        assert len(content) == num_bytes


def test_json_may_be_as_large_as_its_limit() -> None:
    """And not a byte larger."""
    body = b'{"log_verbose_level": 1}'
    read_settings(body, len(body))
    with pytest.raises(Refused) as refused:
        read_settings(body, len(body) - 1)
    assert refused.value.status == 413
