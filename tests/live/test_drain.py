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
from tests.helpers.waiting import join, run_async, with_room
from tests.helpers.watched import end_of
from trtllm_bls.cli import main
from trtllm_bls.client import Client
from trtllm_bls.errors import Overloaded, TrtllmBlsError
from trtllm_bls.operate.logs import LogLine
from trtllm_bls.operate.tritonserver import Listener, TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings
from trtllm_bls.settings.parameters import STATUS_DIR

PROMPT = {"text_input": "a b c d e", "max_tokens": 160, "end_id": -1}


def scripted_pair(scratch: Path, exit_timeout: float) -> ServeSettings:
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
        exit_timeout=exit_timeout,
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


@contextmanager
def pair(scratch: Path, log: Log, exit_timeout: float = 20) -> Iterator[TritonServer]:
    """A server that keeps its status where the operator says, as in a pod."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATUS_DIR, str(scratch / "status"))
        with TritonServer(scripted_pair(scratch, exit_timeout), log) as running:
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
        if event.wait(60):
            server.request_stop()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        event.set()
        join(thread)


@pytest.mark.timeout(600)
def test_a_speculating_stream_is_whole_when_the_server_stops(tmp_path: Path) -> None:
    """It goes over to a plain request in time; a stopping server would refuse the next round."""

    async def ask(
        server: TritonServer, log: Log, num_tokens: int
    ) -> tuple[str, list[str], list[bool]]:
        speaking = threading.Event()
        most = {"max_tokens": num_tokens}
        async with Client(server.grpc_url) as client:
            expected = await text_of(client, **most)
            with stopped_when(speaking, server):
                asked = [
                    asyncio.create_task(text_of(client, speaking, num_draft_tokens=4, **most))
                    for _ in range(4)
                ]
                assert await asyncio.to_thread(log.stopping.wait, 60), "Triton was not told to stop"
                over = [task.done() for task in asked]
                return expected, list(await asyncio.gather(*asked)), over

    def attempt(num_tokens: int) -> bool | None:
        """Return nothing where a stream was over before Triton was told to stop."""
        scratch = tmp_path / str(num_tokens)
        scratch.mkdir()
        log = Log()
        with pair(scratch, log, exit_timeout=120) as server:
            expected, answers, over = run_async(ask(server, log, num_tokens))
            assert answers == [expected] * 4
            assert end_of(server) is False
        return None if any(over) else True

    with_room(attempt, 160, 640, 2560)


def test_a_drain_can_be_asked_for_from_outside(tmp_path: Path) -> None:
    """As a preStop hook does: what is new is refused, what runs has gone over, and ends in words
    where it takes too long."""
    speaking = threading.Event()

    async def drain(deadline: str) -> str:
        words = ["drain", "--deadline", deadline, "--timeout", "60"]
        # The directory is in the environment.
        drained = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert drained.exit_code == 0, drained.output
        return drained.output

    async def ask(server: TritonServer) -> str:
        async with Client(server.grpc_url) as client:
            # More than is said while a test waits.
            asked = text_of(client, speaking, num_draft_tokens=4, max_tokens=9000)
            running = asyncio.create_task(asked)
            assert await asyncio.to_thread(speaking.wait, 60), "no text has come"
            output = await drain("60")
            with pytest.raises(Overloaded, match="the server is shutting down; ask another one"):
                await text_of(client)
            await drain("0")
            with pytest.raises(TrtllmBlsError, match=r"^the server is shutting down$"):
                await running
            return output

    with pair(tmp_path, Log()) as server:
        assert "handed over, requests running: 1" in run_async(ask(server))
