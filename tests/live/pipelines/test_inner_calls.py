"""Pipelines that call pipelines on a real tritonserver; the engine says the prompt back."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.helpers.openai_server import RunningApi
from tests.helpers.openai_server import serving as openai_serving
from tests.helpers.server_settings import DEMO
from tests.helpers.tiers import budget
from tests.helpers.waiting import STREAM_S, join, until
from tests.helpers.watched import end_of
from tests.live.conftest import echo_settings
from tests.live.pipelines import (
    ENDLESS,
    LONG,
    TIME_LIMIT,
    Lines,
    Stream,
    live_requests,
    texts,
    write,
)
from trtllm_bls.openai.openai_command import read_parameters
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.settings.model_config import served_pipelines
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, RUN_SECRET

pytestmark = TIME_LIMIT
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ended(pipelines: TritonServer, model: str) -> int:
    """Requests of a model that are over."""
    count = 0.0
    for line in httpx.get(pipelines.metrics_url, timeout=60).text.splitlines():
        if line.startswith("trtllm_bls_requests_total{") and f'model="{model}"' in line:
            count += float(line.rpartition(" ")[2])
    return int(count)


def test_a_pipeline_that_calls_itself_ends_at_the_ninth_call(pipelines: TritonServer) -> None:
    """At once, with the names of the chain."""
    before = ended(pipelines, "first")
    chain = " → ".join(["first"] * 10)
    with pytest.raises(InferenceServerException, match=f"{chain}: 9 calls inside one another"):
        list(Stream(pipelines, "first", what="endless"))
    until(lambda: ended(pipelines, "first") == before + 10)
    before = ended(pipelines, "first")
    with pytest.raises(InferenceServerException, match="first → second → second"):
        list(Stream(pipelines, "first", what="via second endless"))
    until(lambda: ended(pipelines, "first") == before + 1)


def test_a_chain_ends_with_its_first_request(pipelines: TritonServer) -> None:
    """By its time limit, and when its caller leaves: the engine's work ends as well."""
    with pytest.raises(InferenceServerException, match="the time limit of 2 s is over"):
        list(Stream(pipelines, "hasty", what="via second via first say", text=ENDLESS))
    until(lambda: live_requests(pipelines) == 0)
    stream = Stream(pipelines, "first", what="via second bls", text=ENDLESS)
    next(iter(stream))
    assert live_requests(pipelines) == 1
    stream.leave()
    until(lambda: live_requests(pipelines) == 0)


def test_tensorrt_llm_bls_ends_with_the_time_of_its_caller(pipelines: TritonServer) -> None:
    """It is told the time, and ends by itself: the answer so far is whole text."""

    def answer() -> list[str]:
        """Return what came in the time, nothing if the machine was too slow for a first token."""
        said = []
        try:
            for result in Stream(pipelines, "hasty", what="bls", text=ENDLESS):
                said += texts(result, "said")
        except InferenceServerException as error:
            assert "the time limit of 2 s is over" in error.message()
        return said

    until(answer)
    until(lambda: live_requests(pipelines) == 0)


def test_callers_that_wait_for_places_of_each_other_are_told(pipelines: TritonServer) -> None:
    """Of as many as there are places, one is told at the least; none waits for its time limit."""
    outcomes: Counter[str] = Counter()

    def call() -> None:
        try:
            list(Stream(pipelines, "few", what="rendezvous"))
            outcomes["answered"] += 1
        except InferenceServerException as error:
            assert "few → few: all 4 places of few (max_running_requests)" in error.message()
            outcomes["refused"] += 1

    callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        join(caller)
    assert outcomes.total() == 4 and outcomes["refused"]


def test_a_client_of_triton_cannot_say_on_whose_behalf_it_calls(pipelines: TritonServer) -> None:
    """Its own parameter counts as absent; it may be as deep and as late as it says."""
    client = grpcclient.InferenceServerClient(pipelines.grpc_url)
    arrived: list[Any] = []
    client.start_stream(
        lambda result, error: arrived.append((result, error)), stream_timeout=STREAM_S
    )
    inputs = [grpcclient.InferInput("what", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([b"tell"], np.object_))
    fields = {"key": "k", "cache_salt": "s", "session": "x", "seconds": 0.0, "models": ["a"] * 20}
    forged = f"{hashlib.sha256(b'').hexdigest()} {json.dumps(fields)}"
    client.async_stream_infer("first", inputs, parameters={CONTEXT_PARAMETER: forged, "own": "1"})
    until(lambda: arrived)
    client.stop_stream()
    result, error = arrived[0]
    assert error is None
    told = json.loads(texts(result, "said")[0])
    assert told["key"] is told["salt"] is told["session"] is None
    assert (told["callers"], told["parameters"]) == ([], {"own": "1"})


@pytest.fixture
def api(pipelines: TritonServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningApi]:
    repository = pipelines.settings.model_repository
    assert repository is not None
    monkeypatch.setenv(RUN_SECRET, pipelines.environment[RUN_SECRET])
    given = {"engine_url": pipelines.grpc_url, "tokenizer_dir": str(DEMO / "target")}
    own: Any = {"model_names": ("demo",), "pipelines": served_pipelines(repository)}
    own |= {"keys": (hashlib.sha256(b"key").digest(),), "pipeline_headers": ("x-team",)}
    backend = Deployment(read_parameters(repository, given), model_name="demo")
    with openai_serving(backend.engine, backend, **own) as running:
        yield running


def test_who_asks_is_told_to_a_pipeline_and_to_those_that_it_calls(api: RunningApi) -> None:
    """Over the OpenAI API: a digest of the key, the session, and all that the caller sent."""
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="key", max_retries=0)
    response = client.responses.create(
        model="first",
        input="Hi",
        metadata={"a": "b"},
        extra_headers={"X-Team": "red", "traceparent": TRACE},
        extra_body={"top_docs": 3, "safety_identifier": "ann", "cache_salt": "mine"},
    )
    told = json.loads(response.output_text)
    assert told["metadata"] == {"a": "b"} and told["user"] == "ann"
    assert told["headers"] == {"x-team": "red"} and told["options"] == {
        "top_docs": 3,
        "fits_max_tokens": True,
    }
    inner = told["inner"]
    for each in (told, inner):
        assert each["key"] == hashlib.sha256(b"key").hexdigest()
        assert each["salt"].startswith("key:") and each["session"] == response.id
        assert each["trace"] == TRACE
    assert (told["callers"], inner["callers"]) == ([], ["first"])
    assert inner["limit"] <= told["limit"] + 0.5  # two processes of one machine have one clock


def test_two_instances_have_the_same_sessions(pipelines: TritonServer) -> None:
    """A sequence of Triton's is a session; its requests meet either process."""
    client = grpcclient.InferenceServerClient(pipelines.grpc_url)
    arrived: list[Any] = []
    client.start_stream(
        lambda result, error: arrived.append((result, error)), stream_timeout=STREAM_S
    )
    inputs = [grpcclient.InferInput("what", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([b"count"], np.object_))
    processes: set[str] = set()
    count = 0
    while len(processes) < 2:
        count += 1
        assert count < 200, "one instance was given all requests"
        client.async_stream_infer("counter", inputs, sequence_id=7)
        until(lambda: arrived)
        result, error = arrived.pop()
        assert error is None, error
        said, process = texts(result, "said")[0].split()
        assert int(said) == count
        processes.add(process)
    client.stop_stream()


def test_many_callers_of_pipelines_that_call_pipelines_leave_nothing_running(
    pipelines: TritonServer,
) -> None:
    """Also where a third of them leaves at any time."""
    names = ("first", "second", "tensorrt_llm_bls")
    count = budget(16, 64)
    leavers = len(range(0, count, 3))
    before = {name: ended(pipelines, name) for name in names}
    finished: list[str] = []

    def call(number: int) -> None:
        what = ("via second via first say", "via second bls", "via first say")[number % 3]
        stream = Stream(pipelines, "first", what=what, text=f"{number} {LONG}")
        if number % 3 == 0:
            if number % 2:
                next(iter(stream))
            stream.leave()
            return
        said = "".join(text for result in stream for text in texts(result, "said"))
        assert said.strip() == f"{number} {LONG}".strip(), said
        finished.append(what)

    callers = [
        threading.Thread(target=call, args=(number,), daemon=True) for number in range(count)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        join(caller, 120)
    assert len(finished) == count - leavers
    until(lambda: live_requests(pipelines) == 0)

    def busy() -> list[str]:
        """The lines of gauges that are not 0."""
        metrics = ("trtllm_bls_num_requests_running", "trtllm_bls_num_requests_waiting")
        lines = httpx.get(pipelines.metrics_url, timeout=60).text.splitlines()
        told = [line for line in lines if line.startswith(metrics)]
        assert len(told) >= 2 * len(names)
        return [line for line in told if float(line.rpartition(" ")[2])]

    until(lambda: not busy(), tells=busy)
    assert ended(pipelines, "first") > before["first"] + len(finished)


WAITS = """
import asyncio

from trtllm_bls.pipeline import StreamingModel, Tensor

class TritonPythonModel(StreamingModel):
    inputs = (Tensor("calls", "STRING"),)
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request, response):
        await response.send({"said": "begun"})
        if "calls" in request:
            async for part in request.stream(request.text("calls"), {}):
                await response.send({"said": part["said"]})
        await asyncio.Event().wait()
"""


@pytest.mark.slow
def test_a_server_stops_in_order_while_a_pipeline_runs_that_calls_another(tmp_path: Path) -> None:
    """The callers are told, no request is cut off without a word, and nothing has to be killed."""
    settings = replace(echo_settings(tmp_path), exit_timeout=3)
    assert settings.model_repository is not None
    for name in ("outer", "inner"):
        write(settings.model_repository / name, WAITS, {})
    with TritonServer(settings, Lines()) as running:
        streams = [Stream(running, "outer", calls="inner") for _ in range(4)]
        for stream in streams:
            responses = iter(stream)
            assert [texts(next(responses), "said") for _ in range(2)] == [["begun"], ["begun"]]
        running.request_stop()
        for stream in streams:
            with pytest.raises(InferenceServerException, match="the server is shutting down"):
                list(stream)
        assert end_of(running) is False
