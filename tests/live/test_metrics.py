"""What an operator sees of requests: ``/metrics`` and the log of a real server."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2_grpc

from tests.helpers.ports import unused_ports
from tests.helpers.served import Served
from tests.helpers.server_requests import ask_all, generate, generate_stream
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import run_async, until
from tests.helpers.watched import RecentLines, watched
from tests.live.conftest import echo_settings
from trtllm_bls.client import Client
from trtllm_bls.client.client import infer_request
from trtllm_bls.operate.logs import LogLine
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.reports import METRICS
from trtllm_bls.wire.contract import BLS

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Lines(RecentLines):
    """All lines of the server's log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def log(self, line: LogLine) -> None:
        """Keep the text, too."""
        super().log(line)
        self.texts.append(line.text)


@pytest.fixture(scope="module")
def lines() -> Lines:
    return Lines()


@pytest.fixture(scope="module")
def server(lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two processes of ``tensorrt_llm_bls``, whose figures must add up."""
    settings = echo_settings(tmp_path_factory.mktemp("metrics"), bls_instances=2)
    with watched(settings, "server", recent=lines) as running:
        yield running
    untaken = re.compile("could not be published|metrics are late")
    assert not [text for text in lines.texts if untaken.search(text)]


def scrape(server: TritonServer) -> dict[tuple[str, ...], float]:
    """Every sample of ours by name and label values, without the model's."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model")): (
            sample.value
        )
        for family in families
        for sample in family.samples
        if sample.name.startswith(("trtllm_bls_", "gen_ai_"))
    }


def requests_of(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {
        key[1:]: value
        for key, value in found.items()
        if key[0] == "trtllm_bls_requests_total" and value
    }


def test_a_scripted_load_is_counted_exactly(server: TritonServer) -> None:
    """Over both processes, whatever the ends of the requests."""
    before = scrape(server)

    def counted() -> dict[tuple[str, ...], float]:
        return {key: value - before.get(key, 0) for key, value in scrape(server).items()}

    names = {key[0].removesuffix("_total") for key in before}
    for metric in (each for each in METRICS if each.initial_labels):
        assert {metric.name.removesuffix("_total"), f"{metric.name}_count"} & names, metric.name
    good = {"text_input": "one two three", "max_tokens": 4, "stream": True}
    late = {"text_input": "one two three " * 100, "max_tokens": 400, "timeout_ms": 50}
    late |= {"stream": True, "return_num_output_tokens": True}
    refused = {"text_input": "one", "max_tokens": 4, "beam_width": 3}
    unread = {"text_input": "one", "max_tokens": 4, "top_p": 7.0}
    results = ask_all(server.grpc_url, [good] * 20 + [late] * 2 + [refused] * 3 + [unread])
    assert sum(isinstance(result, Exception) for result in results) == 4
    expected = {
        ("success", "length"): 20,
        ("cancelled", "deadline"): 2,
        ("refused", "beam_width"): 3,
        ("refused", "top_p"): 1,
    }
    generated = [result.events[-1].num_output_tokens for result in results[20:22]]
    firsts = 20 + sum(map(bool, generated))
    wanted = {
        ("gen_ai_server_request_duration_seconds_count", "success"): 20,
        ("gen_ai_server_request_duration_seconds_bucket", "+Inf", "success"): 20,
        ("gen_ai_server_time_to_first_token_seconds_count",): firsts,
        ("trtllm_bls_generation_tokens_total",): 80 + sum(generated),
        ("trtllm_bls_responses_total",): sum(len(result.events) for result in results[:22]),
    }

    def figures() -> tuple[dict[tuple[str, ...], float], dict[tuple[str, ...], float]]:
        """Return the requests and the other figures; a process tells them one by one."""
        found = counted()
        return requests_of(found), {key: found[key] for key in wanted}

    until(lambda: figures() == (expected, wanted), tells=figures)
    until(lambda: scrape(server)["trtllm_bls_num_requests_running",] == 0)
    until(lambda: scrape(server)["trtllm_bls_event_loop_lag_seconds_count",] > 2)


async def test_running_requests_are_seen_while_they_run(server: TritonServer) -> None:
    """And a caller that leaves is a cancel with its cause."""
    async with grpc.aio.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # It runs for longer than the test waits.
        fields = {"text_input": "one two three", "max_tokens": 40_000, "end_id": -1, "stream": True}
        call = stub.ModelStreamInfer(iter([infer_request(BLS, fields, "9")]))
        await call.read()
        await asyncio.to_thread(
            until, lambda: scrape(server)["trtllm_bls_num_requests_running",] == 1
        )
        call.cancel()
    until(lambda: requests_of(scrape(server)).get(("cancelled", "caller_left")) == 1)
    until(lambda: scrape(server)["trtllm_bls_num_requests_running",] == 0)


async def test_the_trace_of_a_caller_is_in_the_log(server: TritonServer, lines: Lines) -> None:
    """Sent as gRPC metadata or as a parameter in JSON."""
    async with grpc.aio.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        fields = {"text_input": "one", "max_tokens": 2, "stream": True}
        message = infer_request(BLS, fields, "by-header")
        metadata = (("traceparent", TRACEPARENT),)
        async for _ in stub.ModelStreamInfer(iter([message]), metadata=metadata):
            pass
    generate(
        server.http_url,
        text_input="one",
        max_tokens=2,
        id="by-parameter",
        traceparent=TRACEPARENT,
    )
    generate_stream(server.http_url, text_input="one", max_tokens=2, id="by-none")

    def logged(pattern: str) -> bool:
        return any(re.search(pattern, text) for text in lines.texts)

    for id in ("by-header", "by-parameter"):
        pattern = rf"request id={id}-\d+ outcome=success .* trace_id={TRACE}"
        until(lambda pattern=pattern: logged(pattern))
    until(lambda: logged("request id=by-none.* ttft_ms="))
    assert not logged("by-none.*trace_id")
    assert not logged("refused or failed")  # said once, in the request's own line


def load_of(served: Served) -> dict[str, float]:
    """The requests of the server and of its engine, by the health port."""
    url = served.urls["health"].replace("/health/ready", "/metrics")
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.name.removeprefix("trtllm_bls_"): sample.value
        for family in families
        for sample in family.samples
        if "num_requests" in sample.name
    }


LONG = {"max_tokens": 400, "min_tokens": 400}


async def through_triton(served: Served, stream: bool) -> None:
    async with Client(served.urls["gRPC"]) as client:
        await client.generate(BLS, text_input="Once upon", stream=stream, **LONG)


async def through_openai(served: Served, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=served.urls["OpenAI"], api_key="any") as client:
        create: Any = client.completions.create
        answer = await create(model="target", prompt="Once upon", stream=stream, extra_body=LONG)
        if stream:
            async for _ in answer:
                pass


async def forty(served: Served, ask: Callable[[Served, bool], Coroutine[Any, Any, None]]) -> None:
    """Ask so often at once, every second time for a stream, until more than 30 wait."""
    tasks = [asyncio.create_task(ask(served, number % 2 == 0)) for number in range(40)]
    try:
        while (now := await asyncio.to_thread(load_of, served))["server_num_requests_waiting"] < 31:
            ended = [task for task in tasks if task.done()]
            for task in ended:
                task.result()  # raises where it failed
            assert len(tasks) - len(ended) > 31, now  # otherwise there was no such moment
            await asyncio.sleep(0.1)
        assert now["engine_num_requests_waiting"] > 30
        assert now["server_num_requests_running"] == now["engine_num_requests_running"] <= 2
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.slow
def test_requests_in_the_engines_queue_are_waiting_on_one_port() -> None:
    """Of 40 on an engine with two slots more than 30, through either API, streams or not."""
    port = str(*unused_ports(1))
    more = ("--model", str(DEMO / "target"), "--openai-port", port)
    served = Served(None, *more, "--set", "tensorrt_llm.max_batch=2")
    try:
        for ask in (through_triton, through_openai):
            run_async(forty(served, ask))
            until(lambda: not any(load_of(served).values()))
    finally:
        served.process.terminate()
        assert served.end()[0] == 0
