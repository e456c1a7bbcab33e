"""Fifty ends of a pipeline that are none, over every API of a real server: each is told an error.

Half an answer has been sent by then, which must not look like a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from tests.helpers.openai_server import RunningApi
from tests.helpers.openai_server import serving as openai_serving
from tests.helpers.server_settings import DEMO
from tests.helpers.tiers import sample
from tests.live.pipelines import TIME_LIMIT, Stream
from trtllm_bls.openai.openai_command import read_parameters
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.settings.model_config import served_pipelines
from trtllm_bls.wire.call_context import RUN_SECRET

pytestmark = TIME_LIMIT
COUNT = 50


@pytest.fixture(scope="module")
def api(pipelines: TritonServer) -> Iterator[RunningApi]:
    repository = pipelines.settings.model_repository
    assert repository is not None
    given = {"engine_url": pipelines.grpc_url, "tokenizer_dir": str(DEMO / "target")}
    backend = Deployment(read_parameters(repository, given), model_name="demo")
    own: Any = {"model_names": ("demo",), "pipelines": served_pipelines(repository)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_SECRET, pipelines.environment[RUN_SECRET])
        with openai_serving(backend.engine, backend, **own) as running:
            yield running


def over_grpc(server: TritonServer, api: RunningApi, number: int) -> str:
    try:
        list(Stream(server, "ends", number=number))
    except InferenceServerException as error:
        return str(error.message())
    return ""


def over_generate(server: TritonServer, api: RunningApi, number: int) -> str:
    url = f"{server.http_url}/v2/models/ends/generate_stream"
    answer = httpx.post(url, json={"number": number}, timeout=60)
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    return str(last.get("error", ""))


def _asked(path: str, stream: bool, **body: Any) -> Callable[[TritonServer, RunningApi, int], str]:
    def asked(server: TritonServer, api: RunningApi, number: int) -> str:
        messages = [{"role": "user", "content": str(number)}]
        field = {"input": messages} if path == "responses" else {"messages": messages}
        whole = {"model": "ends", "stream": stream, **field, **body}
        answer = httpx.post(f"{api.url}/v1/{path}", json=whole, timeout=60)
        if not stream:
            assert answer.status_code >= 400, answer.text
            return str(answer.json()["error"]["message"])
        ends = ('"finish_reason":"', "message_stop", "response.completed", "response.incomplete")
        assert not any(end in answer.text for end in ends), answer.text
        events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        assert '"error"' in events[-1] or "response.failed" in events[-1], events
        return events[-1]

    return asked


WAYS = {
    "gRPC": over_grpc,
    "generate": over_generate,
    "chat": _asked("chat/completions", False),
    "chat, streamed": _asked("chat/completions", True),
    "messages": _asked("messages", False, max_tokens=10),
    "messages, streamed": _asked("messages", True, max_tokens=10),
    "responses": _asked("responses", False),
    "responses, streamed": _asked("responses", True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_exception_is_told_as_an_error(
    pipelines: TritonServer, api: RunningApi, way: str
) -> None:
    numbers = range(COUNT) if way == "gRPC" else sample(range(COUNT))
    for number in numbers:
        assert WAYS[way](pipelines, api, number), number
    assert over_grpc(pipelines, api, COUNT - 1)  # and the server answers
