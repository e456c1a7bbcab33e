"""Clients that leave, stall or are cut off; what the server shows of itself."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import http.client
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.openai_server import MODEL, RunningApi, ScriptedBackend, serving
from tests.helpers.scripted_pairs import hashed_pair
from tests.helpers.scripted_text import PROMPT, saying, tokenizer
from tests.helpers.threaded_server import serving_in_a_thread
from tests.helpers.virtual_time import skipping_waits
from tests.helpers.waiting import join, until
from tests.openai.conftest import SAYS, Connect
from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.errors import EngineUnavailable
from trtllm_bls.http.limits import RESPONSE_WRITER, ResponseWriter
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.openai.exchange import Reply, run_all
from trtllm_bls.openai.exposition import SharedSamples, exposition, samples
from trtllm_bls.openai.health import Health
from trtllm_bls.orchestrator.orchestrator import Defaults, Orchestrator
from trtllm_bls.orchestrator.reports import DURATION, PROMPT_TOKENS, RUNNING, RequestMetrics
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.types import (
    Ending,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    TextChunk,
)


def endless(step_seconds: float = 0.002) -> ScriptedEngine:
    script = Script(vocab_size=tokenizer().vocab_size, step_seconds=step_seconds)
    return ScriptedEngine(hashed(600, first=10), script)


def send(api: RunningApi, **fields: Any) -> socket.socket:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True, **fields}
    data = json.dumps(body).encode()
    raw = socket.create_connection((api.host, api.port), timeout=60)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(data)
    head += b"content-type: application/json\r\n\r\n"
    raw.sendall(head + data)
    return raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "another", "third"]])
def test_a_client_that_leaves_frees_the_engine(connect: Connect, stream: bool, prompt: Any) -> None:
    """All its choices, also of an answer that would have come in one piece."""
    engine = endless()
    api, client = connect(engine)
    raw = send(api, stream=stream, prompt=prompt, n=2)
    runs = 3 if isinstance(prompt, list) else 1
    until(lambda: engine.live == runs)
    if stream:
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
    raw.close()
    until(lambda: engine.live == 0)
    assert len(engine.cancelled) == runs
    until(lambda: requests_over(api, outcome="cancelled", reason="caller_left") == runs)
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3).choices


def test_leaving_the_stream_of_the_published_client_frees_the_engine(connect: Connect) -> None:
    """As any user of it does."""
    engine = endless()
    _, client = connect(engine)
    with client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=100_000, stream=True
    ) as stream:
        next(iter(stream))
    until(lambda: engine.live == 0)


class FedByHand:
    """An engine of one stream, which the test fills."""

    name = "fed"

    def __init__(self) -> None:
        self.stream = QueuedChunks()

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity()

    def generate(self, request: EngineRequest) -> QueuedChunks:
        return self.stream

    def give(self, *ids: int, final: bool = False) -> None:
        self.stream.put([EngineChunk(token_ids=(token,)) for token in ids])
        if final:
            self.stream.put([EngineChunk(token_ids=(), final=True)])
            self.stream.end()

    async def close(self) -> None:
        pass


class SlowClient:
    """An ASGI client; each of its sends waits until ``reads`` is set."""

    def __init__(self, app: Any, **fields: Any) -> None:
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "stream": True, **fields}).encode()
        self.messages: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self._body = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
        }
        self.done = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._body:
            await asyncio.Event().wait()
        return self._body.pop()

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        await self.reads.wait()


async def test_a_reader_that_stalls_gets_what_waits_in_one_event() -> None:
    """Nothing is lost, and no event waits behind another."""
    engine = FedByHand()
    app = create_app(ScriptedBackend(engine), ApiSettings(model_names=(MODEL,)))
    client = SlowClient(app, max_tokens=500)
    first, *rest = tokenizer().encode_word(SAYS * 20)
    engine.give(first)
    while not client.messages:  # the headers, which are not taken
        await asyncio.sleep(0)
    for token in rest:
        engine.give(token)
        await asyncio.sleep(0)
    engine.give(final=True)
    client.reads.set()
    await client.done
    bodies = [m["body"] for m in client.messages if m["type"] == "http.response.body"]
    assert len(bodies) <= 4
    events = [e for e in b"".join(bodies).split(b"\n\n") if e.startswith(b"data: {")]
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events]
    assert "".join(texts) == SAYS * 20
    assert len(texts) <= 3


async def test_what_waits_when_the_engine_has_ended_is_exposition() -> None:
    """Of several choices, whose ends come at once."""
    engine = FedByHand()
    app = create_app(ScriptedBackend(engine), ApiSettings(model_names=(MODEL,)))
    client = SlowClient(app, n=3)
    (token,) = tokenizer().encode_word("x")
    last = [EngineChunk(token_ids=(token,), final=True, sequence_index=n) for n in range(3)]
    engine.stream.put(last)
    engine.stream.end()
    while not client.messages:
        await asyncio.sleep(0)
    for _ in range(20):  # the engine's end is noticed meanwhile
        await asyncio.sleep(0)
    assert not client.done.done()
    client.reads.set()
    await client.done
    body = b"".join(m["body"] for m in client.messages if m["type"] == "http.response.body")
    *events, done, _ = body.split(b"\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(n, "x") for n in range(3)]
    assert done == b"data: [DONE]"


async def test_what_waits_when_the_time_is_up_is_exposition() -> None:
    """The end of the answer is behind a write that the client has not taken."""
    engine = FedByHand()
    backend = ScriptedBackend(engine, defaults=Defaults(timeout_s=0.05))
    client = SlowClient(create_app(backend, ApiSettings(model_names=(MODEL,))))
    engine.give(*tokenizer().encode_word("x"))
    while not client.messages or backend.orchestrator.load()[:2] != (0, 0):
        await asyncio.sleep(0)
    for _ in range(20):  # the request's own tasks notice that
        await asyncio.sleep(0)
    assert not client.done.done()
    client.reads.set()
    await client.done
    body = b"".join(m["body"] for m in client.messages if m["type"] == "http.response.body")
    *events, done, _ = body.split(b"\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "x"
    assert (choices[-1]["finish_reason"], done) == ("length", b"data: [DONE]")


@pytest.mark.parametrize("reads", [True, False])
async def test_the_first_event_leaves_as_it_is_put(reads: bool) -> None:
    """With the head of the response, before any other stream has its turn; a client that does not
    read gets both from a task."""
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    flow: Any = SimpleNamespace(write_paused=not reads)
    scope = {
        "path": "",
        "http_version": "1.1",
        "headers": [],
        RESPONSE_WRITER: ResponseWriter(flow, SimpleNamespace()),  # type: ignore[arg-type]
    }
    reply = Reply(scope, send)
    reply.put(b"data: {}\n\n")
    head_and_event = ["http.response.start", "http.response.body"]
    assert sent == head_and_event * reads
    await reply.ready()
    assert sent == head_and_event


def test_the_first_event_passes_all_middleware_at_once(connect: Connect) -> None:
    """The middleware for origins and keys waits for nothing before it sends on."""
    origin = "https://chat.example"
    _, client = connect(allowed_origins=(origin,), keys=(hashlib.sha256(b"any").digest(),))
    stream = client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=99, stream=True, extra_headers={"origin": origin}
    )
    assert stream.headers["access-control-allow-origin"] == origin
    assert "".join(chunk.choices[0].text for chunk in stream.parse()) == SAYS


def reply_over(send: Callable[[bytes], Awaitable[None]]) -> Reply:
    """One whose events are given to ``send``; its headers are dropped."""

    async def send_message(message: Any) -> None:
        if message["type"] == "http.response.body":
            await send(message["body"])

    return Reply({"path": "", "http_version": "1.1", "headers": []}, send_message)


async def test_a_write_that_waits_ends_when_its_reply_is_closed() -> None:
    """What is put behind it does not leave, and nobody waits any more."""
    begun: list[bytes] = []
    ended = asyncio.Event()

    async def send(part: bytes) -> None:
        begun.append(part)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    reply = reply_over(send)
    reply.put(b"first")
    await asyncio.sleep(0)
    reply.put(b"second")
    waiting = asyncio.create_task(reply.ready())
    await asyncio.sleep(0)
    assert (reply._write_task is None, waiting.done(), ended.is_set()) == (False, False, False)
    await reply.close()
    await waiting
    assert (begun, reply._write_task is None, ended.is_set()) == ([b"first"], True, True)
    await reply.close()
    reply.put(b"third")
    await reply.close()  # before the write has begun
    assert (begun, reply._write_task is None) == ([b"first"], True)


def test_a_server_that_stops_lets_streams_end(connect: Connect) -> None:
    """SIGTERM's handler: no new connections, running answers whole."""
    engine = saying(SAYS, step_seconds=0.02)
    api, client = connect(engine)
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100, stream=True)
    chunks = iter(stream)
    text = next(chunks).choices[0].text
    api.call(signal.SIGTERM, None)
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == SAYS
    with pytest.raises(openai.APIConnectionError):
        client.completions.create(model=MODEL, prompt=PROMPT)


def test_what_has_not_ended_by_then_ends_with_an_error() -> None:
    """A stream that goes on past the time that stopping has."""
    engine = endless()
    with ExitStack() as stack:
        api = stack.enter_context(serving(engine, exit_timeout=1))
        raw = stack.enter_context(send(api, stream=True))
        until(lambda: engine.live == 1)
        api.call(signal.SIGTERM, None)
        read = b""
        while part := raw.recv(65536):
            read += part
        assert b"the server shuts down" in read.rpartition(b"data: {")[2]
        assert read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert engine.live == 0


def test_a_drain_hands_speculating_streams_over_and_refuses_what_is_new(tmp_path: Path) -> None:
    """Through the status directory, as the server's models: a stopping Triton takes no further
    round of a stream that speculates."""
    engines = hashed_pair(rate=0.8, vocab_size=tokenizer().vocab_size, step_seconds=0.005)
    engine = engines.speculative(num_draft_tokens=3)
    quick = engines.target.script
    files = StatusDirectory(tmp_path)
    question = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    with ExitStack() as stack:
        api = stack.enter_context(serving(engine, status_dir=str(tmp_path)))
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0)
        )
        extra = {"ignore_eos": True}
        expected = client.completions.create(**question, extra_body=extra).choices[0].text
        # Slow until all is handed over, so that the stream is not over before.
        engines.target.script = replace(quick, step_seconds=0.2)
        stream = client.completions.create(**question, stream=True, extra_body=extra)
        text = next(stream).choices[0].text
        assert [status.handed_over for status in files.read()] == [False]
        files.ask_to_drain(float("inf"))
        until(lambda: files.handed_over)
        (status,) = files.read()
        engines.target.script = quick
        asked = len(engines.target.requests)
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            client.completions.create(**question)
        assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
        assert get(api, "/health")[0] == 503
        text += "".join(part.choices[0].text for part in stream)
    assert text == expected
    assert status.running == 1 and status.responses > 1  # it ran on when all was handed over
    assert len(engines.target.requests) == asked


def test_a_drain_ends_what_lasts_too_long_with_an_error(tmp_path: Path) -> None:
    """At the drain's deadline, whole answers and streams alike."""
    engine = endless()
    with ExitStack() as stack:
        api = stack.enter_context(serving(engine, status_dir=str(tmp_path)))
        streamed = stack.enter_context(send(api, stream=True))
        whole = stack.enter_context(send(api))
        until(lambda: engine.live == 2)
        StatusDirectory(tmp_path).ask_to_drain(0.0)
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            part = streamed.recv(65536)
            assert part, read
            read += part
        assert b"the server shuts down" in read.rpartition(b"data: {")[2]
        assert whole.recv(65536).startswith(b"HTTP/1.1 503")
        until(lambda: engine.live == 0)


def get(api: RunningApi, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(api.host, api.port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.read().decode()
    connection.close()
    return answer.status, found


def test_health_is_the_engines(connect: Connect) -> None:
    """An engine that gives a token is healthy; one that cannot is not, and may be again."""
    engine = endless()
    engine.fault = Fault(error=EngineUnavailable("gone"))
    api, _ = connect(engine)
    status, body = get(api, "/health")
    assert status == 503 and "gone" in body
    engine.fault = None
    until(lambda: get(api, "/health")[0] == 200)
    asked = len(engine.requests)
    assert get(api, "/health")[0] == 200
    assert len(engine.requests) == asked  # proven a moment ago


def test_engines_that_are_out_are_named() -> None:
    """While one works, the API is degraded; when none does, it is not healthy."""
    problems = {"trtllm://a": "", "trtllm://b": ""}
    engine = saying(SAYS)
    with serving(engine, ScriptedBackend(engine, problems=problems)) as api:
        assert get(api, "/health") == (200, '{"status":"ok"}')
        problems["trtllm://b"] = "trtllm://b: it is dead"
        status, body = get(api, "/health")
        engines = {"trtllm://a": "ok", "trtllm://b": "trtllm://b: it is dead"}
        assert (status, json.loads(body)) == (200, {"status": "degraded", "engines": engines})
        metrics = get(api, "/metrics")[1].splitlines()
        up = 'trtllm_bls_engine_up{engine="trtllm://'
        assert [line for line in metrics if line.startswith(up)] == [f'{up}a"}} 1', f'{up}b"}} 0']
        problems["trtllm://a"] = "trtllm://a: it is dead, too"
        status, body = get(api, "/health")
        assert status == 503 and "it is dead, too" in body


def requests_over(api: RunningApi, **labels: str) -> float:
    """How many have these labels, as Prometheus reads them."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(get(api, "/metrics")[1])
        for sample in family.samples
        if sample.name == "trtllm_bls_requests_total" and labels.items() <= sample.labels.items()
    )


def test_metrics_have_tritons_own(connect: Connect) -> None:
    """Those of the server behind, while it can be reached; without those of its models."""
    told = (
        '# HELP nv_energy Joules\n# TYPE nv_energy counter\nnv_energy{gpu="0"} 7\n'
        "# TYPE trtllm_bls_requests_total counter\ntrtllm_bls_requests_total 9\n"
    )

    class Triton(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with serving_in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Triton)) as triton:
        url = f"http://127.0.0.1:{triton.server_port}/metrics"
        api, _ = connect(triton_metrics=url)
        text = get(api, "/metrics")[1]
    assert 'nv_energy{gpu="0"} 7' in text and "total 9" not in text
    assert {family.name for family in text_string_to_metric_families(text)} >= {"nv_energy"}
    status, text = get(api, "/metrics")
    assert status == 200 and "nv_energy" not in text


def test_metrics_count_what_was_answered(connect: Connect) -> None:
    """And what was refused, by the field."""
    api, client = connect(saying(SAYS))
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=9)
    until(lambda: requests_over(api, outcome="success") == 1)
    until(lambda: requests_over(api, reason="temperature") == 1)


def test_what_is_refused_unread_is_counted_and_logged(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """By its header or limit; no label is of the caller's choosing."""
    caplog.set_level(logging.INFO, "trtllm_bls")
    keys = (hashlib.sha256(b"mine").digest(),)
    api, client = connect(key="mine", keys=keys, max_body_bytes=200)
    ask = client.completions.create
    field = " api=text_completion"  # of a path that is an API's
    refusals: list[tuple[str, str, Any]] = [
        ("authorization", "", lambda: client.with_options(api_key="x").models.list()),
        ("max_body_bytes", field, lambda: ask(model=MODEL, prompt="x" * 200)),
        (
            "content-type",
            field,
            lambda: ask(model=MODEL, prompt="x", extra_headers={"content-type": "text/x"}),
        ),
    ]
    for reason, api_field, refused in refusals:
        with pytest.raises(openai.APIStatusError) as caught:
            refused()
        until(lambda reason=reason: requests_over(api, outcome="refused", reason=reason) == 1)
        named = f"id={caught.value.response.headers['x-request-id']}{api_field} outcome=refused"
        line = f"{named} reason={reason}"
        until(lambda line=line: line in caplog.text)  # it is written behind the metric
    assert requests_over(api, outcome="refused") == len(refusals)


def test_many_clients_at_once_get_their_own_text(connect: Connect) -> None:
    """Streams do not mix."""
    _, client = connect(endless(step_seconds=0.001))
    answers: dict[int, set[str]] = {}

    def run(number: int) -> None:
        prompt = "word " * (number % 5 + 1)
        parts = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=60, temperature=0, stream=True
        )
        text = "".join(part.choices[0].text for part in parts)
        answers.setdefault(number % 5, set()).add(text)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert [len(found) for found in answers.values()] == [1] * 5


def test_requests_leave_nothing_to_the_garbage_collector(connect: Connect) -> None:
    """Of several on one connection all are freed as they end."""
    _, client = connect(saying(SAYS))

    def ask() -> None:
        for stream in (False, True) * 10:
            answer = client.completions.create(model=MODEL, prompt=PROMPT, stream=stream)
            assert list(answer)

    def exchanges() -> int:
        return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())

    ask()
    gc.collect()
    gc.disable()
    try:
        before = exchanges()
        ask()
        until(lambda: exchanges() <= before + 1)
    finally:
        gc.enable()


FORK = multiprocessing.get_context("fork")
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads of tests


@FORKS
def test_workers_add_up_their_metrics() -> None:
    """What a worker counted stays when it has ended; what it had running does not."""
    metrics = RequestMetrics()
    metrics.record(PROMPT_TOKENS, (), 5)
    metrics.record(RUNNING, (), 2)
    metrics.record(DURATION, ("success",), 0.5)
    own = samples(metrics, 'a "model"')
    together = SharedSamples()
    assert together.put(own) == together.put(own) == own
    for workers in range(1, 4):
        worker = FORK.Process(target=together.put, args=(own,))
        worker.start()
        join(worker)
        text = exposition(together.put(own))
        families = {family.name: family for family in text_string_to_metric_families(text)}
        values = {sample.name: sample for family in families.values() for sample in family.samples}
        assert values[PROMPT_TOKENS.name].value == 5 + 5 * workers
        assert values[PROMPT_TOKENS.name].labels["model"] == 'a "model"'
        assert values[RUNNING.name].value == 2
        counts = families[DURATION.name].samples
        found = max(sample.value for sample in counts if sample.name.endswith("_count"))
        assert found == 1 + workers


@FORKS
def test_metrics_survive_a_worker_that_is_killed_while_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock ends with it, and what others have counted is whole."""
    metrics = RequestMetrics()
    metrics.record(PROMPT_TOKENS, (), 5)
    own = samples(metrics, "model")
    together = SharedSamples()
    together.put(own)
    write = os.pwrite

    def dies(file: int, text: bytes, at: int) -> int:
        write(file, text[: len(text) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    for _ in range(3):  # each finds the old version at another place
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", dies)
            worker = FORK.Process(target=together.put, args=(own,))
            worker.start()
            join(worker)
        assert worker.exitcode == -signal.SIGKILL
        assert together.put(own) == own


async def test_a_write_that_waits_ends_with_its_request() -> None:
    """A client that does not read leaves nothing behind when the server shuts down."""
    blocked, ended = asyncio.Event(), asyncio.Event()

    async def write(part: bytes) -> None:
        blocked.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    reply = reply_over(write)

    async def run(request: Any, sink: Any, on_prompt: Any) -> None:
        reply.put(b"some text")
        await asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, str]:
        await asyncio.get_running_loop().create_future()
        return {}

    orchestrator: Any = SimpleNamespace(run=run)
    request: Any = SimpleNamespace(num_return_sequences=1)
    answering = asyncio.create_task(
        run_all(orchestrator, [request], lambda *_: None, reply, receive)
    )
    async with asyncio.timeout(20):
        await blocked.wait()
        answering.cancel()
        await asyncio.wait({answering})
    assert ended.is_set()


@skipping_waits
async def test_a_failure_is_repeated_for_a_second_without_asking_again() -> None:
    """However many probes come, an engine that is in trouble is asked once a second."""
    asked = []

    async def run(request: Any, sink: Any) -> None:
        asked.append(request)
        raise EngineUnavailable("it is gone")

    health = Health(cast(Orchestrator, SimpleNamespace(run=run)), token_id=1)
    for _ in range(20):
        assert await health.problem() == "it is gone"
    assert len(asked) == 1
    await asyncio.sleep(1.1)
    assert await health.problem() == "it is gone"
    assert len(asked) == 2


async def test_an_engine_that_gives_no_token_in_time_is_not_well() -> None:
    """The orchestrator ends its request, which is an answer like any other, and without text."""

    async def run(request: Any, sink: Any) -> None:
        ending = Ending(finish_reason=reason, prompt_tokens=1, completion_tokens=0)
        sink.send(TextChunk("", 0, ending))

    health = Health(cast(Orchestrator, SimpleNamespace(run=run)), token_id=1)
    reason = FinishReason.TIMEOUT
    assert await health.problem() == "the engine gave no token within 10 s"
    health = Health(cast(Orchestrator, SimpleNamespace(run=run)), token_id=1)
    reason = FinishReason.LENGTH
    assert await health.problem() is None
