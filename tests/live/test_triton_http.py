"""The program in front of Triton's HTTP port beside that port: what both answer to the same."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient import http as http_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.helpers.triton_front import KEY, Front, in_front_of
from tests.helpers.waiting import until
from trtllm_bls.errors import defects
from trtllm_bls.http.routes import ROUTES
from trtllm_bls.operate.tritonserver import TritonServer

pytestmark = pytest.mark.live

BLS = "/v2/models/tensorrt_llm_bls"
JSON = "application/json"
ASK = {"text_input": "What is 12 * 9?", "max_tokens": 4}
IDS = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 3}
# Triton answers 500 to JSON of wrong types, which is the caller's mistake.
WRONG = {500: 400}


@pytest.fixture(scope="module")
def front(server: TritonServer) -> Iterator[Front]:
    with in_front_of(server.grpc_url, server.http_url) as running:
        yield running


@pytest.fixture(scope="module")
def ports(server: TritonServer, front: Front) -> tuple[int, int]:
    """Triton's own, and that of the program in front of it."""
    return int(server.http_url.rpartition(":")[2]), front.port


def asked(port: int, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        method, path, body, {"Content-Type": "application/json"} if method == "POST" else {}
    )
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, answer.getheader("content-type") or "", data


BODIES: list[dict[str, Any] | bytes] = [
    ASK,
    {**ASK, "id": "abc", "return_num_input_tokens": True, "return_log_probs": True},
    # More tokens than one round of drafts gives, so that they never are one response.
    {**ASK, "stream": True, "max_tokens": 40},
    {
        **ASK,
        "stream": True,
        "max_tokens": 40,
        "accumulate": True,
        "num_return_sequences": 2,
        "seed": 3,
        "top_k": 5,
    },
    {**ASK, "text_input": ["What is 12 * 9?"], "max_tokens": [4]},
    {**ASK, "text_input": ["a", "b"], "max_tokens": [2, 3], "stream": True},
    {**ASK, "text_input": ["a", "b"]},
    {**ASK, "text_input": [["a"]]},
    {**ASK, "stop_words": ["12", "x"], "foo": 1, "parameters": {"temperature": 0.3, "bar": "x"}},
    {**ASK, "stop_words": []},
    {**ASK, "messages": json.dumps([{"role": "user", "content": "hä \x1f \U0001f600"}])},
    {**ASK, "text_input": 'quotes " and \\ and / and \x7f', "id": '\x1f\x7f/"ä'},
    {},
    [],  # type: ignore[list-item]
    b"",
    b"{",
    b"null",
    b'{"text_input":"a"} x',
    b'{"text_input":"a","max_tokens":1,"max_tokens":2}',
    b'{"text_input":"\xff","max_tokens":1}',
    b'{"text_input":"\\ud800","max_tokens":1}',
    b'\xef\xbb\xbf{"text_input":"a","max_tokens":1}',
    b'{"text_input":"a","max_tokens":NaN}',
    b'{"text_input":"a\nb","max_tokens":1}',
    {**ASK, "max_tokens": "4"},
    {**ASK, "max_tokens": 1.5},
    {**ASK, "max_tokens": -3},
    {**ASK, "max_tokens": -3, "stream": True},
    {**ASK, "max_tokens": [1, 2]},
    {**ASK, "text_input": 5},
    {**ASK, "text_input": None},
    {**ASK, "stream": 1},
    {**ASK, "temperature": True},
    {**ASK, "temperature": 1},
    {**ASK, "foo": [1]},
    {**ASK, "foo": None},
    {**ASK, "parameters": 5},
    {**ASK, "id": 5},
]


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_generate_is_answered_as_triton_answers_it(
    ports: tuple[int, int], kind: str, body: Any
) -> None:
    """The same JSON; a refusal of this program has the same form, but names the member. How many
    tokens share an event depends on time: of streams the whole texts are compared."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, form, expected = asked(ports[0], "POST", f"{BLS}/{kind}", raw)
    told = asked(ports[1], "POST", f"{BLS}/{kind}", raw)
    assert told[0] == WRONG.get(status, status)
    by_model = status == 200 or b"INVALID_ARG" in told[2] or b"[request id" in told[2]
    assert told[1] == (form if by_model else "application/json")
    if status == 200 and kind == "generate_stream":
        assert whole_stream(told[2]) == whole_stream(expected)
    elif by_model:
        assert members(told[2]) == members(expected)
    else:  # refused before Triton sees it
        assert [name for name, _ in members(told[2])] == ["error"]


def members(data: bytes) -> list[tuple[str, Any]]:
    """Of an answer in one piece, or of the only event of a refused stream."""
    return list(json.loads(data.removeprefix(b"data: ")).items())


def whole_stream(data: bytes) -> list[tuple[str, list[str], dict[str, Any]]]:
    """Of each sequence its text, and the names and values of its last event's other members."""
    texts: dict[int, str] = {}
    last: dict[int, dict[str, Any]] = {}
    *events, rest = data.split(b"\n\n")
    assert rest == b""
    for event in events:
        assert event.startswith(b"data: ")
        members = json.loads(event.removeprefix(b"data: "))
        assert list(members) == sorted(members)
        index = members.get("sequence_index", 0)
        texts[index] = texts.get(index, "") + members.pop("text_output", "")
        last[index] = members
    return [(texts[index], list(last[index]), last[index]) for index in sorted(texts)]


def ids_of_stream(data: bytes) -> tuple[list[int], dict[str, Any]]:
    """Return all token ids, and the first event's members that are not of its tokens."""
    ids: list[int] = []
    firsts: list[dict[str, Any]] = []
    for event in data.removesuffix(b"\n\n").split(b"\n\n"):
        members = json.loads(event.removeprefix(b"data: "))
        of_event = members.pop("output_ids")
        if isinstance(of_event, int):  # Triton writes a list of one as its item
            of_event = [of_event]
        assert members.pop("sequence_length") == len(of_event)
        ids += of_event
        firsts.append(members)
    return ids, firsts[0]


INFER = {
    "inputs": [
        {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["a b"]},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [5]},
    ]
}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", f"{BLS}/versions/1/generate", ASK),
        ("POST", f"{BLS}/versions/2/generate", ASK),
        ("POST", f"{BLS}/versions/0001/generate", ASK),
        ("POST", "/v2/models/nobody/generate", ASK),
        ("POST", "/v2/models/nobody/generate_stream", ASK),
        ("POST", f"{BLS}/generate?x=1", ASK),
        ("POST", "/v2/models/preprocessing/generate", {"QUERY": "a b", "REQUEST_OUTPUT_LEN": 5}),
        ("POST", "/v2/models/ensemble/generate", ASK),
        ("POST", "/v2/models/tensorrt_llm/generate", IDS),
        ("POST", "/v2/models/tensorrt_llm/generate_stream", {**IDS, "streaming": True}),
        ("GET", "/v2", None),
        ("GET", "/v2/health/ready", None),
        ("GET", "/v2/health/live", None),
        ("GET", f"{BLS}/ready", None),
        ("GET", f"{BLS}", None),
        ("GET", f"{BLS}/versions/1", None),
        ("GET", f"{BLS}/config", None),
        ("GET", f"{BLS}/config?x=1", None),
        ("GET", "/v2/models/nobody/config", None),
        ("POST", "/v2/models/preprocessing/infer", INFER),
        ("POST", f"{BLS}/infer", INFER),
    ],
)
def test_what_the_table_has_is_answered_as_triton_answers_it(
    ports: tuple[int, int], method: str, path: str, body: Any
) -> None:
    """Models of every kind, versions, unknown names, and what is not generate at all. How many
    tokens share an event depends on time."""
    raw = None if body is None else json.dumps(body).encode()
    asked(ports[0], method, path, raw)  # so that the prompt is in the cache for both
    *head, told = asked(ports[1], method, path, raw)
    *expected_head, expected = asked(ports[0], method, path, raw)
    assert head == expected_head
    if head[0] == 200 and path.endswith("/generate_stream"):
        assert ids_of_stream(told) == ids_of_stream(expected)
    else:
        assert told == expected


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", f"{BLS}/versions/x/generate", 404),
        ("POST", f"{BLS}/generate/", 404),
        ("GET", f"{BLS}/generate", 405),
        ("PUT", f"{BLS}/generate", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/tensorrt_llm%5Fbls", 404),
        ("GET", "/v2/health/../models/tensorrt_llm_bls", 404),
        ("POST", "/v2/repository/index", 403),
    ],
)
def test_what_it_has_not_is_refused_with_tritons_status(
    ports: tuple[int, int], front: Front, method: str, path: str, status: int
) -> None:
    """In Triton's form, without asking it."""
    before = len(front.forwarded)
    told = asked(ports[1], method, path, b"{}" if method == "POST" else None)
    assert told[:2] == (status, "application/json") and [*json.loads(told[2])] == ["error"]
    assert len(front.forwarded) == before
    assert asked(ports[0], method, path, b"{}" if method == "POST" else None)[0] == status


def test_binary_tensors_reach_the_model(front: Front) -> None:
    """By Triton's published client, packed and not; its headers of length are not those it sent."""
    with http_client.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        query = http_client.InferInput("QUERY", [1, 1], "BYTES")
        query.set_data_from_numpy(np.array([["a b"]], object))
        count = http_client.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
        count.set_data_from_numpy(np.array([[5]], np.int32))
        for packing in (None, "gzip", "deflate"):
            told = client.infer(
                "preprocessing",
                [query, count],
                request_compression_algorithm=packing,
                response_compression_algorithm=packing,
            )
            assert told.as_numpy("REQUEST_INPUT_LEN").shape == (1, 1)
        assert client.get_model_metadata("preprocessing")["name"] == "preprocessing"


# --- neighbours of what is served -----------------------------------------------------------------

FORMS = (
    *("application/json", "Application/JSON; charset=utf-8", "application/jsonX", "", " ", "*/*"),
    *("application/x-www-form-urlencoded", "application/x-www-form-urlencodedX", "text/plain;x"),
    *("APPLICATION/X-WWW-FORM-URLENCODED", "multipart/form-data; boundary=x", "application/json,"),
    *("application/octet-stream", "application/json\tx", "\xff"),
)
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get")
SPOILS = (
    *("/", "//", "/.", "/..", "/../", "/x/..", ";a=b", "?x=1", "#f", "%00", "%2f", "%2e%2e", "%20"),
    *(
        "X",
        ".",
        "..",
        "%",
        "\\",
        "\xe9",
        "%c3%a9",
        "%252e",
        "/versions/1",
        "/versions/",
        "*",
        "%0a",
    ),
)
HEADERS = (
    *("content-encoding: gzip", "content-encoding: deflate", "content-encoding: identity"),
    *("accept-encoding: gzip", "expect: 100-continue", "connection: Upgrade\r\nupgrade: h2c"),
    *("x-http-method-override: GET", "content-type: text/plain", "authorization: Bearer x"),
    *("inference-header-content-length: 2", "inference-header-content-length: -1", "te: trailers"),
    *("inference-header-content-length: 99999999999", "traceparent: \xff", "closed by serve: x"),
    *("triton_grpc_error: true", "host: [", "transfer-encoding: chunked", "content-length: 1"),
)
BODIES_SENT = (
    *(b"", b"{}", b"[]", b"null", json.dumps(ASK).encode(), json.dumps(INFER).encode(), b"\xff"),
    *(gzip.compress(json.dumps(INFER).encode()), b'{"a":' * 5000, b"a=1&" * 1000, b"\0" * 100),
)
ALLOWED = {"host", "accept-encoding", "content-type", "content-length"}


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[str, str, list[str], bytes]:
    """Method, target, headers and body of a request that is nearly one of the table."""
    row = draw(st.sampled_from(ROUTES))
    models = st.sampled_from(("preprocessing", "tensorrt_llm_bls", "tensorrt_llm_bls/versions/1"))
    path = row.path.replace("{model}", draw(models)).replace("{name}", "x")
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 3)))):
        place = draw(st.sampled_from([at for at, each in enumerate(path + "/") if each == "/"]))
        at = draw(st.just(place) | st.integers(0, len(path)))
        how = draw(st.integers(0, 3))
        if how == 0 and at < len(path):
            path = f"{path[:at]}%{ord(path[at]):02x}{path[at + 1 :]}"
        elif how == 1:
            path = path[:at] + path[at:].swapcase()
        else:
            path = path[:at] + draw(st.sampled_from(SPOILS)) + path[at:]
    method = draw(st.just(row.method) | st.sampled_from(METHODS))
    body = draw(st.sampled_from(BODIES_SENT) | st.binary(max_size=9))
    form = draw(st.sampled_from(FORMS) | st.just("application/json"))
    headers = [f"content-type: {form}", *draw(st.lists(st.sampled_from(HEADERS), max_size=2))]
    return method, path, headers, body


def status_of(port: int, method: str, path: str, headers: list[str], body: bytes) -> int:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall("\r\n".join([*lines, *headers, "", ""]).encode("latin-1"))
        with suppress(ConnectionError):  # refused already
            raw.sendall(body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = raw.recv(65536)
            assert part, answer
            answer += part
            answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    return int(answer.split()[1])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(neighbours(), st.sampled_from((None, KEY)))
def test_nothing_but_the_table_reaches_triton(
    front: Front, asked_for: tuple[str, str, list[str], bytes], key: str | None
) -> None:
    """Neighbours of every row, with and without a key: only what a row names is forwarded, as this
    program wrote it. Whatever else it is, it is the client's mistake, and Triton lives."""
    method, path, headers, body = asked_for
    before = len(front.forwarded)
    defects.clear()
    keyed = [f"authorization: Bearer {key}"] if key else []
    status = status_of(front.keyed, method, path, [*keyed, *headers], body)
    assert (status < 500 or status == 501) and not defects
    target = re.split("[?#]", path)[0].encode("latin-1")  # a fragment is no part of it
    rows = [row for row in ROUTES if row.method == method and row.pattern.fullmatch(target)]
    if not (key or any(row.keyless for row in rows)):
        assert status in (400, 401, 431)  # 400: this is not HTTP
    if not rows or rows[0].control:
        assert 400 <= status < 500
    sent = front.forwarded[before:]
    assert len(sent) <= (bool(rows) and not rows[0].control and not rows[0].by_grpc)
    for each in sent:
        head, _, content = each.partition(b"\r\n\r\n")
        line, *fields = head.decode("ascii").split("\r\n")
        assert line == f"{method} {target.decode()} HTTP/1.1"
        found = dict(field.lower().split(": ", 1) for field in fields)
        assert len(found) == len(fields)
        assert found.keys() <= ALLOWED | {name.decode() for name in rows[0].headers}
        assert int(found.get("content-length", 0)) == len(content)
        assert found.get("content-type", JSON) in (JSON, "application/octet-stream")
        assert ("content-type" in found) == bool(rows[0].body)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ["/v2/health/ready", f"{BLS}/generate", f"{BLS}/infer", "/x", "/"])
def test_no_form_of_any_spelling_reaches_triton(front: Front, path: str, form: str) -> None:
    """6 MB of one end Triton 24.10."""
    before = len(front.forwarded)
    header = [f"content-type: {form}"] if form else []
    assert 400 <= status_of(front.port, "POST", path, header, b"a=1&" * 1_500_000) < 500
    assert len(front.forwarded) == before
    assert status_of(front.port, "GET", "/v2/health/live", [], b"") == 200


@pytest.mark.parametrize("depth", [200, 100_000])
@pytest.mark.parametrize("kind", ["generate", "generate_stream", "infer"])
def test_no_depth_of_json_reaches_triton(front: Front, kind: str, depth: int) -> None:
    """200 kB of brackets end Triton 24.10."""
    for text in (b'{"inputs": ' + b"[" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        sent = b'{"text_input": "a", ' + text[1:]
        path = f"{BLS.replace('tensorrt_llm_bls', 'preprocessing')}/{kind}"
        assert status_of(front.port, "POST", path, ["content-type: application/json"], sent) == 400
    assert status_of(front.port, "GET", "/v2/health/live", [], b"") == 200


TOKENS = {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1], "data": [5]}


@pytest.mark.parametrize(
    ("model", "fields", "problem"),
    [
        # Each of the first four ends Triton 24.10 or makes it touch a gigabyte; the others got 500.
        ("postprocessing", {**TOKENS, "shape": [2**63 - 1]}, "TOKENS_BATCH: the shape"),
        ("postprocessing", {**TOKENS, "shape": [2**28, 1, 1]}, "TOKENS_BATCH: the shape"),
        ("postprocessing", {**TOKENS, "shape": [2**32, 2**32]}, "TOKENS_BATCH: the shape"),
        ("tensorrt_llm_bls", {**TOKENS, "shape": [2**63 - 1]}, "TOKENS_BATCH: the shape"),
        ("postprocessing", {**TOKENS, "data": 5}, "data"),
        ("postprocessing", {**TOKENS, "data": [None]}, "TOKENS_BATCH: must be integers"),
        ("postprocessing", {**TOKENS, "shape": [2]}, "TOKENS_BATCH: 1 values do not fill"),
        ("postprocessing", {**TOKENS, "parameters": {"binary_data_size": -1}}, "binary_data_size"),
    ],
)
def test_an_infer_that_triton_does_not_bear_is_refused(
    front: Front, model: str, fields: dict[str, Any], problem: str
) -> None:
    """Triton never sees it, and lives."""
    before = len(front.forwarded)
    body = json.dumps({"inputs": [fields]}).encode()
    status, _, answer = asked(front.port, "POST", f"/v2/models/{model}/infer", body)
    assert status == 400 and problem in json.loads(answer)["error"]
    assert len(front.forwarded) == before
    assert asked(front.port, "GET", f"{BLS}/ready", None)[0] == 200


@pytest.mark.parametrize("shape", [[2**63 - 1], [2**28, 1, 1], [2**32, 2**32]])
def test_such_a_shape_does_not_end_triton_over_grpc(server: TritonServer, shape: list[int]) -> None:
    """Nothing of this package stands before that port; Triton compares the shape with the bytes."""
    message = service_pb2.ModelInferRequest(model_name="postprocessing")
    message.inputs.add(name="TOKENS_BATCH", datatype="INT32", shape=shape)
    message.raw_input_contents.append(b"\5\0\0\0")
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(message, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live


def infer_bodies() -> st.SearchStrategy[tuple[dict[str, Any], bytes]]:
    """The JSON of ``infer`` and the bytes behind it, each member nearly right."""
    numbers = st.sampled_from((0, 1, 2, 5, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 1.0, True, "1"))
    shapes = st.lists(numbers, max_size=4) | st.just([1, 1]) | st.just([1, 1, 1])
    values = st.recursive(numbers | st.none() | st.just("a b"), st.lists, max_leaves=6)
    types = st.sampled_from(("INT32", "BYTES", "BOOL", "FP32", "FP16", "UINT64", "X"))
    sizes = st.fixed_dictionaries({"binary_data_size": numbers})
    names = st.sampled_from(("QUERY", "REQUEST_OUTPUT_LEN", "TOKENS_BATCH", "text_input", "x"))
    tensors = st.fixed_dictionaries(
        {"name": names, "datatype": types, "shape": shapes},
        optional={"data": values, "parameters": sizes},
    )
    own = st.sampled_from(("priority", "timeout", "sequence_id", "sequence_start", "note"))
    bodies = st.fixed_dictionaries(
        {"inputs": st.lists(tensors | st.sampled_from(INFER["inputs"]), min_size=1, max_size=3)},
        optional={"parameters": st.dictionaries(own, numbers), "id": st.just("i") | numbers},
    )
    return st.tuples(bodies, st.binary(max_size=16))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(infer_bodies(), st.sampled_from(("preprocessing", "postprocessing", "tensorrt_llm_bls")))
def test_no_infer_is_a_defect_of_the_server(
    front: Front, sent: tuple[dict[str, Any], bytes], model: str
) -> None:
    """Tensors of any shape, type, size and value: answered, or the client's mistake."""
    defects.clear()
    text = json.dumps(sent[0]).encode()
    headers = ["content-type: application/json"]
    if sent[1]:
        headers.append(f"inference-header-content-length: {len(text)}")
    path = f"/v2/models/{model}/infer"
    status = status_of(front.port, "POST", path, headers, text + sent[1])
    assert status < 500 or status == 501  # the model streams, which infer cannot
    assert not defects


def test_an_integer_that_does_not_fit_is_refused(ports: tuple[int, int]) -> None:
    """Triton would take 99999999999 for 1215752191."""
    body = json.dumps({**ASK, "max_tokens": 99999999999}).encode()
    told = asked(ports[1], "POST", f"{BLS}/generate", body)
    assert told[::2] == (400, b'{"error":"max_tokens: 99999999999 does not fit INT32"}')


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
def test_when_the_caller_leaves_the_model_stops(
    ports: tuple[int, int], server: TritonServer, kind: str
) -> None:
    """Through Triton's own port a ``generate`` would run to its end."""

    def figure(part: str) -> float:
        port = int(server.metrics_url.split(":")[2].split("/")[0])
        lines = asked(port, "GET", "/metrics", None)[2].decode().splitlines()
        found = [line for line in lines if part in line and not line.startswith("#")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    body = json.dumps(
        {**ASK, "max_tokens": 3000, "end_id": -1, "stream": kind == "generate_stream"}
    ).encode()
    head = f"POST {BLS}/{kind} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ends = "trtllm_bls_requests_total"

    def is_stopped() -> bool:
        """Return false where the whole answer had come before this caller left."""
        until(lambda: not figure("trtllm_bls_num_requests_running"))
        left = figure('reason="caller_left"')
        before = figure(ends)
        with socket.create_connection(("127.0.0.1", ports[1]), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            until(lambda: figure("trtllm_bls_num_requests_running") or figure(ends) > before)
        until(lambda: figure(ends) > before)
        return figure('reason="caller_left"') > left

    until(is_stopped)
