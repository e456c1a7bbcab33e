"""Two of our OpenAI servers behind smg, started as docs/scale.md says: a router that we did not
write loses nothing that it can keep.

It needs the program smg: ``SMG=/path/to/smg`` names one, and with
``TRTLLM_BLS_INSTALL_CLIENTS`` the tests install it into an environment of their own.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers import children
from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.processes import Process
from tests.helpers.published import pip_install
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import eventually, until
from trtllm_bls.text.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not {"SMG", "TRTLLM_BLS_INSTALL_CLIENTS"} & os.environ.keys(),
        reason="no smg: SMG=/its/program or TRTLLM_BLS_INSTALL_CLIENTS=1 runs it",
    ),
]
MODEL = DEMO / "target"
WORKERS = 2
AT_ONCE = 16
WORKER = "x-smg-routed-worker-id"  # smg's header with the worker that it chose
# What the demo model's template makes of a message, as the scripted engine says it back.
CHAT = "\n{}\n"
WORDS = "one two three four five six seven eight nine ten eleven twelve and so on, number"
SMG = ("smg==1.13.0", "setproctitle", "pyyaml", "grpcio", "grpcio-health-checking")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """smg, which may have to be installed."""
    if "SMG" in os.environ:
        return os.environ["SMG"]
    return str(pip_install(tmp_path_factory.mktemp("smg"), *SMG) / "smg")


@dataclass
class Worker:
    """One ``trtllm-bls openai`` over a scripted service of its own, at a port that stays."""

    url: str
    service: Any
    process: Process

    def start_again(self) -> None:
        """Start it for this test and those behind it, like the rest of the fleet."""
        with children.kept():
            self.process.start()


@dataclass
class Fleet:
    """The router's address, and the workers behind it."""

    url: str
    workers: list[Worker]


def line_of_the_page(page: Path) -> list[str]:
    """The command that starts smg in docs/scale.md."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^smg launch .*--worker-urls.*$", text, re.M)
    return shlex.split(line)


@pytest.fixture(scope="module")
def fleet(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Started with the page's line, in which the addresses alone are others."""
    scratch = tmp_path_factory.mktemp("fleet")
    tokenizer = load_tokenizer(MODEL)
    script = Script(step_seconds=0.01, vocab_size=tokenizer.model_vocab_size)
    behaviour = Behaviour(
        eos_id=tokenizer.eos_id or 0, vocab_size=tokenizer.vocab_size, leaks=False
    )
    front, metrics, *ports = unused_ports(2 + WORKERS)
    with ExitStack() as stack:
        workers = []
        for number, port in enumerate(ports):
            service, url = stack.enter_context(service_in_a_thread(EchoEngine(script), behaviour))
            command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", str(port)]
            command += ["--tokenizer-dir", str(MODEL), "--engine", f"trtllm://{url}"]
            status = scratch / f"status{number}"
            command += ["--status-dir", str(status)]
            process = Process(command, status)
            workers.append(Worker(f"http://127.0.0.1:{port}", service, process))
            process.start()
            stack.callback(process.kill)
        for worker in workers:
            until(lambda worker=worker: answers(f"{worker.url}/health"))
        words = line_of_the_page(ROOT / "docs" / "scale.md")[1:]
        cut = words.index("--worker-urls") + 1
        rest = [word for word in words[cut:] if not word.startswith("http")]
        command = [program, *words[:cut], *(worker.url for worker in workers), *rest]
        command += ["--host", "127.0.0.1", "--port", str(front)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        stack.enter_context(Child(command, name="smg"))
        url = f"http://127.0.0.1:{front}"
        until(lambda: ready(url) == {worker.url for worker in workers})
        yield Fleet(url, workers)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def ready(url: str) -> set[str]:
    """The workers that the router sends requests to."""
    try:
        workers = httpx.get(f"{url}/workers", timeout=30).json()["workers"]
    except (httpx.TransportError, ValueError):
        return set()
    return {worker["url"] for worker in workers if worker["is_healthy"]}


def test_the_manifest_s_options_are_those_of_the_page(program: str) -> None:
    """And smg has each of them."""
    told = subprocess.run(
        [program, "launch", "--help"], capture_output=True, text=True, check=True, timeout=120
    )
    known = set(re.findall(r"--[a-z][a-z0-9-]+", told.stdout))
    manifest = (ROOT / "deploy" / "kubernetes" / "overlays" / "smg" / "router.yaml").read_text(
        encoding="utf-8"
    )
    options = set(re.findall(r"^ +- (--\S+)", manifest, re.M))
    assert {option.partition("=")[0] for option in options} <= known
    words = line_of_the_page(ROOT / "docs" / "scale.md")
    given = [f"{name}={value}" for name, value in pairwise(words) if name[:2] == "--"]
    assert {each for each in given if "--worker-urls" not in each} <= options


# --- load -------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What came of one request: its text as far as it came, and the error that ended it."""

    expected: str
    streamed: bool
    text: str = ""
    error: str = ""
    worker: str = ""  # which the router chose

    @property
    def half_streamed(self) -> bool:
        """Whether some of it has come, and as much is still to come."""
        return self.streamed and 0 < len(self.text) < len(self.expected) / 2


class Load:
    """Requests of both APIs, whole and streamed in turn, ``at_once`` at a time, each sent once.

    The engine says each prompt back: of a chat, what the template made of it.
    """

    def __init__(self, fleet: Fleet, numbers: Iterable[int], at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._numbers = iter(numbers)
        self._client = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0)
        self.answers: list[Answer] = []

    async def run(self) -> list[Answer]:
        async with self._client:
            await asyncio.gather(*(self._one_after_the_other() for _ in range(self._at_once)))
        return self.answers

    async def _one_after_the_other(self) -> None:
        for number in self._numbers:
            said = f"{WORDS} {number}"
            answer = Answer(CHAT.format(said) if number % 2 else said, number % 4 >= 2)
            self.answers.append(answer)
            try:
                await self._ask(answer, said, is_chat=number % 2 == 1)
            except (openai.APIError, httpx.TransportError) as error:
                answer.error = repr(error)

    async def _ask(self, answer: Answer, said: str, *, is_chat: bool) -> None:
        api: Any = self._client.completions
        asked: dict[str, Any] = {"prompt": said}
        if is_chat:
            api, asked = self._client.chat.completions, {"messages": [message("user", said)]}
        raw = await api.with_raw_response.create(
            model=MODEL.name, max_tokens=400, stream=answer.streamed, **asked
        )
        answer.worker = raw.headers[WORKER]
        found = raw.parse()
        if not answer.streamed:
            choice = found.choices[0]
            answer.text = choice.message.content if is_chat else choice.text
            return
        async for part in found:
            choice = part.choices[0]
            answer.text += (choice.delta.content if is_chat else choice.text) or ""


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def wrong(answers: list[Answer]) -> list[Answer]:
    return [each for each in answers if each.error or each.text != each.expected]


# --- what holds -------------------------------------------------------------------------------


async def test_answers_are_those_of_one_server(fleet: Fleet) -> None:
    """Over both APIs, whole and streamed; both workers take their share."""
    answers = await Load(fleet, range(400)).run()
    assert len(answers) == 400
    assert wrong(answers) == []
    assert all(len(worker.service.requests) > 100 for worker in fleet.workers)


async def test_a_conversation_stays_with_its_worker(fleet: Fleet) -> None:
    """Whose KV cache has its turns so far. Eight of them, whose turns alternate."""
    seen: dict[int, set[str]] = {number: set() for number in range(8)}
    turns: dict[int, list[dict[str, str]]] = {number: [] for number in seen}
    async with httpx.AsyncClient(timeout=60) as client:
        for turn in range(4):
            for place in seen:
                number = (place + turn) % len(seen)  # else round robin would keep each, too
                content = f"conversation {number * 7919}: {WORDS} {turn}"
                turns[number].append(message("user", content))
                body = {"model": MODEL.name, "messages": turns[number], "max_tokens": 20}
                answer = await client.post(f"{fleet.url}/v1/chat/completions", json=body)
                seen[number].add(answer.headers[WORKER])
                text = answer.json()["choices"][0]["message"]["content"]
                turns[number].append(message("assistant", text))
    assert [len(workers) for workers in seen.values()] == [1] * len(seen)


async def test_who_leaves_frees_the_engine(fleet: Fleet) -> None:
    """Through the router, of a stream and of a whole answer."""
    body = {"model": MODEL.name, "prompt": WORDS * 300, "max_tokens": 20_000}
    for stream in (True, False):
        async with httpx.AsyncClient(timeout=60) as client:
            asking = asyncio.create_task(
                client.post(f"{fleet.url}/v1/completions", json=body | {"stream": stream})
            )
            await eventually(lambda: sum(worker.service.live for worker in fleet.workers) == 1)
            asking.cancel()
            await asyncio.wait({asking})
        left = time.monotonic()
        await eventually(lambda: sum(worker.service.live for worker in fleet.workers) == 0)
        print(f"the engine was free after {time.monotonic() - left:.3f} s")


async def test_a_killed_worker_fails_begun_streams_alone(fleet: Fleet) -> None:
    """Each with an error; and once it runs again the router sends requests there again."""
    killed = fleet.workers[0]
    load = Load(fleet, range(300))
    loading = asyncio.create_task(load.run())
    await eventually(
        lambda: any(each.half_streamed and each.worker == killed.url for each in load.answers)
    )
    killed.process.kill()
    answers = await loading
    print(f"failed: {len(wrong(answers))} of {len(answers)}")
    for answer in wrong(answers):
        assert answer.streamed and answer.text and answer.error, answer
        assert answer.worker == killed.url
        assert answer.expected.startswith(answer.text)
    assert 0 < len(wrong(answers)) < AT_ONCE
    killed.start_again()
    await eventually(lambda: ready(fleet.url) == {worker.url for worker in fleet.workers})
    asked_before = len(killed.service.requests)
    assert wrong(await Load(fleet, range(64)).run()) == []
    await eventually(lambda: len(killed.service.requests) > asked_before)


async def test_a_rolling_restart_loses_nothing(fleet: Fleet) -> None:
    """Each worker is drained, ended and started again, while clients go on asking."""
    done = False
    load = Load(fleet, takewhile(lambda _: not done, count()), at_once=4)
    loading = asyncio.create_task(load.run())
    for worker in fleet.workers:
        await asyncio.to_thread(worker.process.end)
        worker.start_again()
        await eventually(lambda: ready(fleet.url) == {each.url for each in fleet.workers})
    done = True
    answers = await loading
    print(f"asked during the restarts: {len(answers)}")
    assert wrong(answers) == []
