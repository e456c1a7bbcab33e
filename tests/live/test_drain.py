"""A server that is told to stop while requests run in rounds of speculation."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.helpers.server_settings import DEMO, ROOT, free_ports
from tests.helpers.waiting import join, run_async
from trtllm_bls.cli import main
from trtllm_bls.client import Client
from trtllm_bls.errors import Overloaded, TrtllmBlsError
from trtllm_bls.operate.logs import LogLine
from trtllm_bls.operate.tritonserver import Listener, TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings
from trtllm_bls.settings.parameters import STATUS_DIR

PROMPT = {"text_input": "a b c d e", "max_tokens": 160, "end_id": -1}


def scripted_pair(scratch: Path) -> ServeSettings:
    """Two engines that are scripts: the draft is right in four of five contexts."""
    repository = scratch / "models"
    shutil.copytree(ROOT / "models" / "tensorrt_llm_bls", repository / "tensorrt_llm_bls")
    for model in ("tensorrt_llm", "tensorrt_llm_draft"):
        shutil.copytree(ROOT / "models" / "tensorrt_llm", repository / model)
        scripted = ROOT / "benchmarks/scripted/1"
        shutil.copytree(scripted, repository / model / "1", dirs_exist_ok=True)
    return free_ports(
        model=DEMO / "target",
        model_repository=repository,
        exit_timeout=20,
        overrides=(
            Override("tensorrt_llm", "step_ms", "20"),
            Override("tensorrt_llm_draft", "step_ms", "1"),
            Override("tensorrt_llm_draft", "agrees", "0.8"),
            Override("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "tensorrt_llm_draft"),
        ),
    )


class Log(Listener):
    """Notices when Triton itself begins to stop."""

    def __init__(self) -> None:
        self.stopping = threading.Event()

    def log(self, line: LogLine) -> None:
        if "Waiting for in-flight requests" in line.text:
            self.stopping.set()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def server(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonServer]:
    """It keeps its status where the operator says, as in a pod."""
    monkeypatch.setenv(STATUS_DIR, str(tmp_path / "status"))
    with TritonServer(scripted_pair(tmp_path), log) as running:
        yield running


async def text_of(client: Client, stop: threading.Event | None = None, **more: int) -> str:
    """The answer; ``stop`` is set once a few of its tokens have come."""
    text = ""
    async with client.stream(**PROMPT | more) as stream:
        async for event in stream:
            text += event.text
            if stop is not None and len(text) > 20:
                stop.set()
    return text


@contextmanager
def stopped_when(event: threading.Event, server: TritonServer) -> Iterator[None]:
    """Another thread asks the server to stop, as a signal does, once ``event`` is set."""

    def stop() -> None:
        event.wait()
        server.request_stop()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    yield
    event.set()
    join(thread)


def test_a_speculating_stream_is_whole_when_the_server_stops(
    server: TritonServer, log: Log
) -> None:
    """It goes over to a plain request in time; a stopping server would refuse the next round."""
    speaking = threading.Event()

    async def ask() -> tuple[str, list[str], list[bool]]:
        async with Client(server.grpc_url) as client:
            expected = await text_of(client)
            with stopped_when(speaking, server):
                asked = [
                    asyncio.create_task(text_of(client, speaking, num_draft_tokens=4))
                    for _ in range(4)
                ]
                await asyncio.to_thread(log.stopping.wait, 30)
                over = [task.done() for task in asked]
                return expected, list(await asyncio.gather(*asked)), over

    expected, answers, over = run_async(ask())
    assert answers == [expected] * 4
    assert over == [False] * 4  # when Triton was told to stop
    assert server.wait() is False


def test_a_drain_can_be_asked_for_from_outside(server: TritonServer) -> None:
    """As a preStop hook does: what is new is refused, what runs has gone over, and ends in words
    where it takes too long."""
    speaking = threading.Event()

    async def ask() -> str:
        async with Client(server.grpc_url) as client:
            asked = text_of(client, speaking, num_draft_tokens=4, max_tokens=900)
            running = asyncio.create_task(asked)
            await asyncio.to_thread(speaking.wait)
            words = ["drain", "--deadline", "1.5"]  # the directory is in the environment
            drained = await asyncio.to_thread(CliRunner().invoke, main, words)
            assert drained.exit_code == 0, drained.output
            with pytest.raises(Overloaded, match="the server is shutting down; ask another one"):
                await text_of(client)
            with pytest.raises(TrtllmBlsError, match=r"^the server is shutting down$"):
                await running
            return drained.output

    assert "handed over, requests running: 1" in run_async(ask())
