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
from tests.helpers.watched import watched
from tests.live.conftest import echo_settings
from tests.live.test_pipelines import Stream
from trtllm_bls.configure.new import config_of
from trtllm_bls.openai.openai_command import read_parameters
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.settings.model_config import served_pipelines
from trtllm_bls.wire.call_context import RUN_SECRET

COUNT = 50
PIPELINE = """
import asyncio
import builtins
import concurrent.futures
import inspect
import json
import queue
import socket
import ssl
import subprocess

from trtllm_bls import errors
from trtllm_bls.pipeline import StreamingModel, Tensor

class PanicException(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

class Odd(BaseException):
    def __init__(self):
        super().__init__(b"\\xff", object())

def group_of(error):
    group = PanicException("several")
    group.exceptions = (error, PanicException("another"))
    return group

def made(kind):
    for arguments in ((), ("text",), ("utf-8", b"x", 0, 1, "r"), ("utf-8", "x", 0, 1, "r")):
        try:
            return kind(*arguments)
        except TypeError:
            continue

# Every end that Python itself has, and those of libraries.
OWN = [kind for _, kind in sorted(vars(builtins).items()) if inspect.isclass(kind)]
OWN = [kind for kind in OWN if issubclass(kind, BaseException) and not issubclass(kind, Warning)]
ENDS = [end for end in (made(kind) for kind in dict.fromkeys(OWN)) if end is not None]
FIRST = [
    PanicException("of a library in Rust"), Mute(), Odd(), group_of(ValueError("one")),
    group_of(PanicException("one")), group_of(SystemExit(1)), asyncio.CancelledError(),
    asyncio.InvalidStateError(), asyncio.QueueEmpty(), concurrent.futures.CancelledError(),
    queue.Full(), socket.gaierror(1, "no"), ssl.SSLError(1, "no"),
    subprocess.CalledProcessError(1, "x"), json.JSONDecodeError("no", "x", 0),
    errors.TrtllmBlsError("no"), errors.EngineError("no"), errors.EngineUnavailable("no"),
    errors.InvalidRequest("x", "no"), errors.Overloaded("no"), errors.Stopped("no"),
    errors.DeadlineExceeded("no"), errors.EngineRefusal("no"),
]
# All that are no ``Exception`` first: they are the ones that slip through.
ENDS = sorted([*FIRST, *ENDS], key=lambda end: isinstance(end, Exception))

class TritonPythonModel(StreamingModel):
    inputs = (Tensor("number", "INT32"),)
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request, response):
        await response.send({"said": "half"})
        await self.raise_end(int(request["number"][0]))

    async def chat(self, request):
        yield "half"
        await self.raise_end(int(request.messages[-1]["content"]))

    async def raise_end(self, number):
        error = ENDS[number]
        if number % 2:
            await asyncio.create_task(raised(error))
        raise error

async def raised(error):
    raise error
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    settings = echo_settings(tmp_path_factory.mktemp("ends"))
    assert settings.model_repository is not None
    directory = settings.model_repository / "ends"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(PIPELINE)
    (directory / "config.pbtxt").write_text(config_of(directory / "1" / "model.py", {}))
    with watched(settings, "server") as running:
        yield running


@pytest.fixture(scope="module")
def api(server: TritonServer) -> Iterator[RunningApi]:
    repository = server.settings.model_repository
    assert repository is not None
    given = {"engine_url": server.grpc_url, "tokenizer_dir": str(DEMO / "target")}
    backend = Deployment(read_parameters(repository, given), model_name="demo")
    own: Any = {"model_names": ("demo",), "pipelines": served_pipelines(repository)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_SECRET, server.environment[RUN_SECRET])
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
    server: TritonServer, api: RunningApi, way: str
) -> None:
    numbers = range(COUNT) if way == "gRPC" else sample(range(COUNT))
    for number in numbers:
        assert WAYS[way](server, api, number), number
    assert over_grpc(server, api, COUNT - 1)  # and the server answers
