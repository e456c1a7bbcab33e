"""Errors: OpenAI's shape, the caller's names, and the status that clients act on."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.request
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest

from doubles.scripted import Fault
from tests.helpers.openai_server import MODEL, RunningApi, ScriptedBackend
from tests.helpers.scripted_text import PROMPT, prompt_ids, saying, tokenizer
from tests.helpers.waiting import until, with_room
from tests.openai.conftest import SAYS, Connect
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    SettingsError,
    defects,
    from_wire,
)
from trtllm_bls.http import limits as guard
from trtllm_bls.http.keys import KEYS_VARIABLE, read_keys
from trtllm_bls.openai import generating
from trtllm_bls.openai.schema import CompletionRequest, decode
from trtllm_bls.orchestrator.orchestrator import Admission, Defaults
from trtllm_bls.text.json_values import json_value
from trtllm_bls.types import CacheSalt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hi"}]


def ask(
    api: RunningApi, path: str, body: Any = None, headers: Any = JSON, method: str = "POST"
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers; every error has OpenAI's four keys."""
    connection = http.client.HTTPConnection(api.host, api.port, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    if answer.status >= 400:
        assert found.keys() == {"error"}
        assert found["error"].keys() == {"message", "type", "param", "code"}
        kind = "invalid_request_error" if answer.status < 500 else "server_error"
        assert found["error"]["type"] == {429: "rate_limit_error"}.get(answer.status, kind)
        assert answer.headers["x-request-id"]
    return answer.status, found.get("error", found), dict(answer.headers)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, **fields}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": MODEL}, "prompt"),
    (completion(temperature=3), "temperature"),
    (completion(temperature="hot"), "temperature"),
    (completion(top_p=1.5), "top_p"),
    (completion(n=0), "n"),
    (completion(n=2.5), "n"),
    (completion(max_tokens=0), "max_tokens"),
    (completion(max_tokens=2**40), "max_tokens"),
    (chat(max_tokens=0), "max_tokens"),
    (completion(structured_outputs={"choice": ["a", 1]}), "structured_outputs.choice[1]"),
    (completion(guided_regex="a", guided_choice=["a"]), "guided_regex"),
    (completion(max_tokens=2**32 + 5), "max_tokens"),
    (chat(max_completion_tokens=2**32 + 5), "max_completion_tokens"),
    (completion(top_k=2**32 + 5), "top_k"),
    (completion(min_tokens=2**32 + 5), "min_tokens"),
    (completion(seed=2**64 + 5), "seed"),
    (completion(prompt=[2**32 + 5]), "prompt"),
    (completion(stop=["1", "2", "3", "4", "5"]), "stop"),
    (completion(stop=""), "stop"),
    (completion(stop=[1]), "stop[0]"),
    (completion(logprobs=21), "logprobs"),
    (completion(logit_bias={"a": 1}), "logit_bias"),
    (completion(logit_bias={"99999999": 1}), "logit_bias"),
    (completion(logit_bias={str(tokenizer().model_vocab_size): 1}), "logit_bias"),
    (completion(logit_bias={"1": 101}), "logit_bias[...]"),
    (completion(best_of=2), "best_of"),
    (completion(suffix="x"), "suffix"),
    (completion(min_p=1.5), "min_p"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=[1, "a"]), "prompt[1]"),
    (completion(prompt=[True]), "prompt"),
    (completion(prompt=[10**8]), "prompt"),
    (completion(prompt=""), "prompt"),
    (completion(stream_options={"include_usage": True}), "stream_options"),
    (completion(response_format={"type": "json_object"}), "response_format"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    (chat(messages=[]), "messages"),
    (chat(messages=[1]), "messages[0]"),
    (chat(messages=[{"role": "king", "content": ""}]), "messages[0].role"),
    (chat(messages=[{"role": "user"}]), "messages[0].content"),
    (chat(messages=[{"role": "user", "content": [{}]}]), "messages[0].content[0].type"),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0]"),
    (completion(grammar="root ::= a"), "grammar"),
    (completion(regex="a", ebnf='root ::= "a"'), "regex"),
    (chat(json_schema="{}"), "json_schema"),
    (chat(stop_sequences=["a"]), "stop_sequences"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(functions=[{}]), "functions"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs"),
]


def test_wrong_values_are_refused_by_the_callers_names(connect: Connect) -> None:
    """With 400, before the engine hears of them; the next request works."""
    engine = saying(SAYS)
    api, client = connect(engine)
    for body, param in WRONG:
        path = COMPLETIONS if "prompt" in body or "messages" not in body else CHAT
        status, error, _ = ask(api, path, body)
        assert (status, error.get("param")) == (400, param), (body, error)
        assert error["type"] == "invalid_request_error"
        assert param in error["message"] and "\n" not in error["message"]
    assert engine.requests == []
    assert client.completions.create(model=MODEL, prompt=PROMPT).choices


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b'{"temperature": 1e999, "model": "scripted", "prompt": "x"}',
        b'{"model": "scripted", "prompt": "\xff"}',
        b'{"model": "scripted", "prompt": "x", "further": ' + b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"model": "scripted", "seed": ' + b"9" * 5000 + b', "prompt": "x"}',
    ],
)
def test_bodies_that_are_no_json_of_ours_are_refused(connect: Connect, body: bytes) -> None:
    """Whatever is wrong with them, it is the caller's mistake."""
    api, _ = connect()
    assert ask(api, COMPLETIONS, body)[0] == 400


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\uDC80 \ud83d\ude42", "\ufffd \U0001f642"),
        (rb"\ud83d\ud83d\ude42\uD83d", "\ufffd\U0001f642\ufffd"),
        (rb"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
    ],
)
def test_half_a_character_is_read_as_one_that_cannot_be(written: bytes, read: str) -> None:
    """Node's JSON keeps what a cut within an emoji leaves; whole ones and text stay."""
    body = rb'{"model": "m", "prompt": ["%b"], "\ud83d": 1}' % written
    assert decode(body, CompletionRequest).prompt == [read]


def test_a_prompt_that_is_too_long_says_so_as_clients_expect(connect: Connect) -> None:
    """The code for some, the sentence for others."""
    _, client = connect(saying(SAYS, max_sequence_tokens=40))
    long = [{"role": "user", "content": PROMPT * 50}]
    for param, ask_for in (
        ("prompt", lambda: client.completions.create(model=MODEL, prompt=PROMPT * 50)),
        ("prompt", lambda: client.completions.create(model=MODEL, prompt=[5] * 50)),
        (
            "messages",
            lambda: client.chat.completions.create(model=MODEL, messages=long, stream=True),
        ),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask_for()
        assert caught.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 40 tokens" in str(caught.value)
        assert caught.value.param == param


def test_a_prompt_leaves_room_for_a_token(connect: Connect) -> None:
    """Of a sequence of 40 tokens a prompt takes 39 at most; the engine hears of no longer one."""
    engine = saying(SAYS, max_sequence_tokens=40)
    _, client = connect(engine)
    assert client.completions.create(model=MODEL, prompt=[5] * 39, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 40, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 40 tokens" in str(caught.value)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (EngineError("broken"), 502, openai.InternalServerError),
        (EngineUnavailable("gone"), 503, openai.InternalServerError),
        (EngineStalled("no token for 30 s"), 503, openai.InternalServerError),
        (Overloaded("full"), 429, openai.RateLimitError),
        (InvalidRequest("runtime_top_k", "no"), 400, openai.BadRequestError),
        (from_wire("Prompt length 9 exceeds maximum input length"), 400, openai.BadRequestError),
        (RuntimeError("secret"), 500, openai.InternalServerError),
    ],
)
def test_what_the_engine_raises_has_its_status(
    connect: Connect, raised: Exception, status: int, kind: type, stream: bool
) -> None:
    """Also of a stream, while nothing of it has been sent."""
    engine = saying(SAYS)
    engine.fault = Fault(error=raised)
    _, client = connect(engine)
    with pytest.raises(kind) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, stream=stream)
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.status_code == status
    assert "secret" not in str(caught.value)
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))
    engine.fault = None
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3).choices


def test_an_error_tells_what_the_engine_knows(connect: Connect) -> None:
    """How long a sequence may be, where that was unknown before; when there is room again."""
    engine = saying(SAYS)
    api, _ = connect(engine)
    engine.fault = Fault(error=PromptTooLong("input_ids", 50, 39))
    status, error, _ = ask(api, COMPLETIONS, completion())
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert "This model's maximum context length is 40 tokens" in error["message"]
    engine.fault = Fault(error=Overloaded("full", retry_after_s=7))
    status, _, headers = ask(api, COMPLETIONS, completion())
    assert (status, headers["retry-after"]) == (429, "7")


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": PROMPT}),
    (COMPLETIONS, {"prompt": [PROMPT, PROMPT], "n": 2, "echo": True}),
    (CHAT, {"messages": HELLO}),
    (RESPONSES, {"input": "Hi"}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 9}),
]


def post(api: RunningApi, path: str, body: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection(api.host, api.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
    connection.request("POST", path, data, JSON)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("pings", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked"), ASKED)
def test_no_token_before_the_time_limit_is_no_answer(
    path: str,
    asked: dict[str, Any],
    stream: bool,
    pings: bool,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over every API: 504, or an error event where pings have begun the stream."""
    if pings:
        monkeypatch.setattr(generating, "_PING_S", 0.01)
    engine = saying(SAYS, step_seconds=60)
    begun = stream and pings and path in (RESPONSES, MESSAGES)

    def attempt(timeout_s: float) -> tuple[int, str] | None:
        defaults = Defaults(timeout_s=timeout_s)
        api, _ = connect(engine, backend=ScriptedBackend(engine, defaults=defaults))
        status, text = post(api, path, {**asked, "stream": stream})
        if begun and status == 504:
            return None  # no ping came in time
        return status, text

    status, text = with_room(attempt, 0.3, 3.0, 20.0)
    assert status == (200 if begun else 504)
    assert "the engine gave no token before the time limit" in text
    assert ("event: error" in text or "response.failed" in text) == begun
    kinds = {MESSAGES: '"timeout_error"', RESPONSES: '"server_error"'}
    assert (kinds.get(path, "") if begun or path == MESSAGES else '"code":"timeout"') in text
    assert '"length"' not in text and "max_tokens" not in text


DEEP = {"a": 1}
for _ in range(99):
    DEEP = {"a": DEEP}  # type: ignore[dict-item]
USES = [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, "/tokenize"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a":' * 101 + b"1" + b"}" * 101, "more than 100 lists and objects within each other"),
        (b"[" * 300_000, "more than 100 lists and objects within each other"),
        (b'{"a":"\\""' + b',"b":[' * 101, "more than 100 lists and objects within each other"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        (b'{"a":"\xed\xa0\x80"}', "not UTF-8 at byte 6"),
        (b'{"a":[' + b"[]," * 100_001 + b"1]}", "more than 100000 lists and objects"),
    ],
)
def test_json_is_judged_before_it_is_read(
    path: str, body: bytes, told: str, connect: Connect
) -> None:
    """Of every API alike: no parser and no walk meets what it would take for ever, or fails at."""
    api, _ = connect()
    status, text = post(api, path, body)
    assert (status, told in text) == (400, True), text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "metadata": DEEP["a"]}),
        (CHAT, {"messages": HELLO, "user": '[{"\\' * 200_000}),  # brackets in a text
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}),
        (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}),
        (MESSAGES, {"messages": [*HELLO, *USES, *HELLO], "max_tokens": 9}),
    ],
)
def test_what_is_no_deeper_is_taken(path: str, body: dict[str, Any], connect: Connect) -> None:
    """Arguments that a client repeats are a text within the body: without a depth of their own."""
    api, _ = connect()
    if path == RESPONSES:
        field = "input" if "custom" in body["input"][0]["type"] else "arguments"
        body["input"][0][field] = "[" * 100_000
    assert post(api, path, body)[0] == 200


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"input": [1]}', {"input": [1]}),
        ("[" * 100_000, None),
        ('{"input": ' * 101 + "1" + "}" * 101, None),
        ('{"input": 1', None),
        ('{"input": "\\ud800"}', None),
        ('{"input": "\\ud83d\\ude00"}', {"input": "\U0001f600"}),
        ('{"input": NaN}', None),
        ('{"input": -Infinity}', None),
        ('{"input": 1e999}', None),
        ('{"input": 1e-999}', {"input": 0.0}),
        ('{"input": ' + "9" * 5000 + "}", None),
    ],
)
def test_arguments_of_any_depth_are_a_text(text: str, value: Any) -> None:
    """Those that a client repeats, and those that a model wrote."""
    assert json_value(text) == value


@pytest.mark.parametrize(
    "target", ["*", "/nothing", "/v1/models/*", "http://[/x", "/" + "a" * 8000]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "PROPFIND"])
@pytest.mark.parametrize("host", ["localhost", "["])
def test_no_url_is_a_defect(method: str, target: str, host: str, connect: Connect) -> None:
    """Also where the header that names the host makes no URL."""
    api, _ = connect()
    defects.clear()
    with socket.create_connection((api.host, api.port), timeout=60) as raw:
        raw.sendall(f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert 400 <= int(raw.recv(65536).split()[1]) < 500
    assert not defects


def test_a_defect_is_counted(connect: Connect) -> None:
    """For Prometheus, and told by its kind alone."""
    engine = saying(SAYS)
    engine.fault = Fault(error=RuntimeError("secret"))
    api, client = connect(engine)
    with pytest.raises(openai.InternalServerError, match="unexpected RuntimeError"):
        client.completions.create(model=MODEL, prompt=PROMPT)

    def count() -> bool:
        with urllib.request.urlopen(f"{api.url}/metrics", timeout=60) as answer:
            return 'internal_errors_total{model="scripted"} 1' in answer.read().decode()

    until(count)


def test_a_stream_that_fails_ends_with_the_error(connect: Connect) -> None:
    """After the text that had come; the client raises it."""
    engine = saying(SAYS, step_seconds=0.001)
    engine.fault = Fault(error=EngineError("broken"), after_tokens=3)
    _, client = connect(engine)
    text = ""
    with pytest.raises(openai.APIError, match="broken"):
        for chunk in client.completions.create(model=MODEL, prompt=PROMPT, stream=True):
            assert chunk.choices[0].finish_reason is None
            text += chunk.choices[0].text
    assert text and SAYS.startswith(text)


def test_a_full_server_says_when_to_come_again(connect: Connect) -> None:
    """429, with the time that its admission expects."""
    engine = saying(SAYS)
    engine.fault = Fault(after_tokens=1)  # no stream has an end
    backend = ScriptedBackend(engine, admission=Admission(1, 0, None))
    api, client = connect(engine, backend=backend)
    with client.completions.create(model=MODEL, prompt=PROMPT, stream=True) as stream:
        next(iter(stream))
        status, error, headers = ask(api, COMPLETIONS, completion())
        assert (status, error["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
        assert ask(api, "/health", method="GET")[0] == 200  # full, but alive


def test_one_key_leaves_places_for_others(connect: Connect) -> None:
    """It may run as many requests as fit while nobody else asks; then half of them."""
    engine = saying(SAYS)
    engine.fault = Fault(after_tokens=1)  # no stream has an end
    backend = ScriptedBackend(engine, admission=Admission(4, 0, None))
    keys = tuple(sha256(key).digest() for key in (b"first", b"second"))
    _, client = connect(engine, backend=backend, keys=keys, key="first")
    others = {"Authorization": "Bearer second"}
    options: Any = {"model": MODEL, "prompt": PROMPT, "stream": True}
    with ExitStack() as stack:
        own = [stack.enter_context(client.completions.create(**options)) for _ in range(4)]
        for stream in own:
            next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="as many as may"):
            client.completions.create(**options, extra_headers=others)
        own.pop().close()
        until(lambda: engine.live == 3)
        with pytest.raises(openai.RateLimitError, match="as many of this client as may"):
            client.completions.create(**options)
        stack.enter_context(client.completions.create(**options, extra_headers=others))
        for stream in own:
            stream.close()
        until(lambda: engine.live == 1)
        stack.enter_context(client.completions.create(**options))


def test_unknown_models_paths_and_methods(connect: Connect) -> None:
    """Each has its status, and the shape of every other error."""
    api, client = connect()
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="another", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert ask(api, "/v1/moderations", {})[0] == 404
    assert ask(api, "/v1/models/", method="GET")[0] == 404
    status, _, headers = ask(api, CHAT, method="GET")
    assert (status, headers["allow"]) == (405, "POST")
    assert ask(api, CHAT, b"{}", {"Content-Type": "text/plain"})[0] == 415


def test_what_is_no_text_and_no_token_is_refused(connect: Connect) -> None:
    """With the field; and without a key nobody tokenises."""
    api, _ = connect()
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": [{"role": "king"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ):
        status, error, _ = ask(api, path, body)
        assert (status, error["param"]) == (400, param)
        assert ask(api, path, {**body, "model": "another", "prompt": "x", "tokens": []})[0] == 404
    guarded, _ = connect(keys=(b"x" * 32,))
    assert ask(guarded, "/tokenize", {"prompt": "x"})[0] == 401
    assert ask(guarded, "/detokenize", {"tokens": [1]})[0] == 401
    assert ask(guarded, "/version", method="GET")[0] == 200


def test_bodies_have_a_limit_also_in_pieces(connect: Connect) -> None:
    """Whether the length was told before or not."""
    api, client = connect(max_body_bytes=1000)
    assert ask(api, COMPLETIONS, completion(prompt="x" * 2000))[0] == 413
    with socket.create_connection((api.host, api.port), timeout=60) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b"content-type: application/json\r\n\r\n"
        )
        raw.sendall((b"3e8\r\n" + b"x" * 1000 + b"\r\n") * 2)
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    assert client.completions.create(model=MODEL, prompt=PROMPT).choices


def test_headers_have_a_limit(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that never ends is cut off, also that of a connection's second request."""
    monkeypatch.setattr(guard, "DISCARD_S", 0.2)
    api, client = connect()
    with socket.create_connection((api.host, api.port), timeout=60) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        raw.sendall(b"GET /health HTTP/1.1\r\nx-long: ")
        with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
            while True:
                raw.sendall(b"x" * 65536)
    assert client.completions.create(model=MODEL, prompt=PROMPT).choices


def test_request_ids_come_back(connect: Connect) -> None:
    """The caller's, or one of ours; in errors too."""
    api, client = connect()
    mine = {**JSON, "x-request-id": "mine-1"}
    assert ask(api, COMPLETIONS, completion(), mine)[2]["x-request-id"] == "mine-1"
    assert ask(api, COMPLETIONS, {}, mine)[2]["x-request-id"] == "mine-1"
    strange = {**JSON, "x-request-id": "a b" * 100}
    assert len(ask(api, COMPLETIONS, completion(), strange)[2]["x-request-id"]) == 32
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, extra_body={"request_id": "named"}
    )
    assert answer.id == "cmpl-named"


def test_only_keys_open_the_api(connect: Connect, tmp_path: Path) -> None:
    """Health and metrics need none."""
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\nsecond\n")
    keys = read_keys(file)
    assert len(keys) == 2
    api, client = connect(key="second", keys=keys)
    assert client.completions.create(model=MODEL, prompt=PROMPT).choices
    for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
        status, error, answered = ask(api, COMPLETIONS, completion(), JSON | headers)
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert answered["www-authenticate"] == "Bearer"
    assert ask(api, "/v1/models", method="GET")[0] == 401
    assert ask(api, "/health", method="GET")[0] == 200
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="third").models.list()


def test_a_tenant_is_the_key_that_was_checked(connect: Connect) -> None:
    """Nothing that a request says changes it, but that it may have none."""
    engine = saying(SAYS)
    keys = tuple(sha256(key).digest() for key in (b"first", b"second"))
    said: tuple[dict[str, Any], ...] = ({}, {"tenant": keys[1].hex()}, {"user": "second"})
    for key, *bodies in (("first", *said, {"draft_memory": False}), ("second", {})):
        _, client = connect(engine, key=key, keys=keys)
        for body in bodies:
            client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                extra_body=body,
                extra_headers={"tenant": keys[1].hex()},
            )
    _, client = connect(engine, key="first")
    client.completions.create(model=MODEL, prompt=PROMPT)
    first, second = (key.hex() for key in keys)
    assert [each.tenant for each in engine.requests] == [first] * 3 + [None, second, None]


@pytest.mark.parametrize("shared", [False, True])
def test_keys_do_not_share_the_kv_cache_unless_they_may(connect: Connect, shared: bool) -> None:
    """Also where two clients send the same salt; the salt does not tell the key."""
    engine = saying(SAYS)
    keys = tuple(sha256(key).digest() for key in (b"first", b"second"))
    for key in ("first", "second"):
        _, client = connect(engine, key=key, keys=keys, share_kv_cache=shared)
        for body in ({}, {"cache_salt": "mine"}, {"draft_memory": False}):
            client.completions.create(model=MODEL, prompt=PROMPT, extra_body=body)
    typed = [request.cache_salt for request in engine.requests]
    salts = [salt and salt.text for salt in typed]
    assert salts[:3:2] == [salts[0]] * 2 and salts[3::2] == [salts[3]] * 2
    if shared:
        assert salts == [None, "mine", None] * 2
    else:
        assert len({*salts} - {None}) == 4
        assert not any(key.hex() in (salt or "") for key in keys for salt in salts)
    required = [salt is not None and salt.required for salt in typed]
    assert required == [False, True, False] * 2


def test_without_keys_the_salt_is_the_requests_own(connect: Connect) -> None:
    engine = saying(SAYS)
    _, client = connect(engine)
    for body in ({}, {"cache_salt": "mine"}):
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body=body)
    assert [request.cache_salt for request in engine.requests] == [None, CacheSalt("mine")]


def test_keys_come_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is missing or empty is a mistake of whoever starts the server."""
    monkeypatch.setenv(KEYS_VARIABLE, "one, two")
    assert len(read_keys(None)) == 2
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(SettingsError, match="holds no key"):
        read_keys(tmp_path / "empty")


def test_web_pages_may_ask_only_where_that_is_allowed(connect: Connect) -> None:
    """CORS is off unless an origin is named."""
    preflight = {
        "Origin": "https://page",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    api, _ = connect(allowed_origins=("https://page",), keys=(b"x" * 32,))
    for running, allowed in ((api, "https://page"), (connect()[0], None)):
        connection = http.client.HTTPConnection(running.host, running.port, timeout=60)
        connection.request("OPTIONS", CHAT, headers=preflight)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["access-control-allow-origin"] == allowed
        connection.close()


def test_prompt_tokens_of_a_refused_request_reach_no_engine(connect: Connect) -> None:
    """One bad prompt of a list: none is answered."""
    engine = saying(SAYS)
    api, _ = connect(engine)
    status, error, _ = ask(api, COMPLETIONS, completion(prompt=[list(prompt_ids()), []]))
    assert (status, error["param"]) == (400, "prompt")
