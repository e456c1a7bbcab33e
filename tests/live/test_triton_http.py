"""The program in front of Triton's HTTP port beside that port: what both answer to the same."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from trtllm_bls.http.triton import TritonHttp
from trtllm_bls.launcher import TritonServer

pytestmark = pytest.mark.live

BLS = "/v2/models/tensorrt_llm_bls"
ASK = {"text_input": "What is 12 * 9?", "max_tokens": 4}
IDS = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 3}
# Triton answers 500 to JSON of wrong types, which is the caller's mistake.
WRONG = {500: 400}


@pytest.fixture(scope="module")
def ports(server: TritonServer) -> Iterator[tuple[int, int]]:
    """Triton's own, and that of the program in front of it."""
    app: TritonHttp | None = None

    async def program(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal app
        if scope["type"] == "lifespan":
            await receive()
            app = TritonHttp(server.grpc_url, server.http_url)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await app.close()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            assert app is not None
            await app(scope, receive, send)

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(program, log_level="warning", server_header=False, date_header=False)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    yield int(server.http_url.rpartition(":")[2]), listening.getsockname()[1]
    running.should_exit = True
    thread.join()
    listening.close()


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
    {**ASK, "stream": True},
    {**ASK, "stream": True, "accumulate": True, "num_return_sequences": 2, "seed": 3, "top_k": 5},
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
    """The same JSON, refusals too; only wrong JSON is the caller's mistake, not the server's. How
    many tokens share an event depends on time: of streams the whole texts are compared."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, form, expected = asked(ports[0], "POST", f"{BLS}/{kind}", raw)
    told = asked(ports[1], "POST", f"{BLS}/{kind}", raw)
    assert told[:2] == (WRONG.get(status, status), form)
    if status == 200 and kind == "generate_stream":
        assert whole_stream(told[2]) == whole_stream(expected)
    else:
        assert members(told[2]) == members(expected)


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


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", f"{BLS}/versions/1/generate", ASK),
        ("POST", f"{BLS}/versions/2/generate", ASK),
        ("POST", f"{BLS}/versions/0001/generate", ASK),
        ("POST", f"{BLS}/versions/x/generate", ASK),
        ("POST", "/v2/models/nobody/generate", ASK),
        ("POST", "/v2/models/nobody/generate_stream", ASK),
        ("POST", f"{BLS}/generate?x=1", ASK),
        ("POST", f"{BLS}/generate/", ASK),
        ("GET", f"{BLS}/generate", None),
        ("PUT", f"{BLS}/generate", ASK),
        ("POST", "/v2/models/preprocessing/generate", {"QUERY": "a b", "REQUEST_OUTPUT_LEN": 5}),
        ("POST", "/v2/models/ensemble/generate", ASK),
        ("POST", "/v2/models/tensorrt_llm/generate", IDS),
        ("POST", "/v2/models/tensorrt_llm/generate_stream", {**IDS, "streaming": True}),
        ("POST", "/v2/models/tensorrt_llm/generate", {**IDS, "bad_words_list": [1, 2, 3]}),
        ("POST", "/v2/models/tensorrt_llm/generate", {**IDS, "lora_weights": 1.0}),
        ("GET", "/v2", None),
        ("GET", "/v2/health/ready", None),
        ("GET", "/v2/health/live", None),
        ("GET", f"{BLS}/ready", None),
        ("GET", f"{BLS}", None),
        ("GET", f"{BLS}/config", None),
        ("GET", "/v2/models/nobody/config", None),
        ("GET", "/nothing", None),
        ("POST", "/v2/repository/index", {}),
        ("POST", f"{BLS}/infer", ASK),
    ],
)
def test_every_other_path_is_answered_by_triton(
    ports: tuple[int, int], method: str, path: str, body: Any
) -> None:
    """Models of every kind, versions, unknown names, and what is not generate at all."""
    raw = None if body is None else json.dumps(body).encode()
    asked(ports[0], method, path, raw)  # so that the prompt is in the cache for both
    assert asked(ports[1], method, path, raw) == asked(ports[0], method, path, raw)


def test_an_integer_that_does_not_fit_is_refused(ports: tuple[int, int]) -> None:
    """Triton would take 99999999999 for 1215752191."""
    body = json.dumps({**ASK, "max_tokens": 99999999999}).encode()
    told = asked(ports[1], "POST", f"{BLS}/generate", body)
    assert told[::2] == (400, b'{"error":"input \'max_tokens\': 99999999999 does not fit INT32"}')


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

    def wait_for(part: str, least: float) -> None:
        until = time.monotonic() + 60
        while figure(part) < least:
            assert time.monotonic() < until

    left = figure('reason="caller_left"')
    body = json.dumps(
        {**ASK, "max_tokens": 3000, "end_id": -1, "stream": kind == "generate_stream"}
    ).encode()
    with socket.create_connection(("127.0.0.1", ports[1])) as connection:
        head = f"POST {BLS}/{kind} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for("trtllm_bls_num_requests_running", 1)
    wait_for('reason="caller_left"', left + 1)
