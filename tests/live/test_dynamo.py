"""``examples/dynamo/worker.py`` behind Dynamo's own front end, over scripted engines.

So does the deprecated command ``trtllm-bls dynamo``, with and without ``--tokens``.

Both come from PyPI (``ai-dynamo``). ``DYNAMO=/path/to/python`` names an interpreter that has them
and this package's requirements; ``TRTLLM_BLS_INSTALL_CLIENTS`` has the tests install them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.published import pip_install
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import until
from trtllm_bls.engines.base import Engine
from trtllm_bls.text.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not {"DYNAMO", "TRTLLM_BLS_INSTALL_CLIENTS"} & os.environ.keys(),
        reason="no ai-dynamo: DYNAMO=/its/python or TRTLLM_BLS_INSTALL_CLIENTS=1 runs it",
    ),
]
MODEL = DEMO / "target"
LOCAL = {
    **{"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"},
    **{"DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"},
    # How long a worker that was asked to end waits for front ends to forget it.
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
}
# ai-dynamo itself, and what its front end imports; a further requirement is not on PyPI.
PACKAGES = (
    *("aiohttp", "kubernetes<33", "msgspec", "prometheus-client<1", "pyzmq", "redis<9", "tqdm"),
    *("transformers<6", "zstandard<1", "pydantic<=2.13.5", "uvloop"),
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with Dynamo and what this package needs."""
    if "DYNAMO" in os.environ:
        return os.environ["DYNAMO"]
    directory = tmp_path_factory.mktemp("dynamo")
    pip_install(directory, "-e", f"{ROOT}[openai]", *PACKAGES)
    pinned = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
    return str(pip_install(directory, "--no-deps", *pinned) / "python")


class Cluster:
    """A front end, and workers over one scripted engine."""

    def __init__(
        self,
        python: str,
        scratch: Path,
        stack: ExitStack,
        *front: str,
        engine: Engine | None = None,
    ) -> None:
        self._python, self._scratch, self._stack = python, scratch, stack
        tokenizer = load_tokenizer(MODEL)
        script = Script(step_seconds=0.005, vocab_size=tokenizer.model_vocab_size)
        sizes = {"eos_id": tokenizer.eos_id or 0, "vocab_size": tokenizer.vocab_size}
        behaviour = Behaviour(**sizes, leaks=False)
        running = service_in_a_thread(engine or EchoEngine(script), behaviour)
        self.service, self._engine = stack.enter_context(running)
        (port,) = unused_ports(1)
        self.start(
            "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *front
        )
        self.url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=self.url, api_key="any", max_retries=0)
        self.client = stack.enter_context(client)

    def start(self, *words: str) -> Child:
        environment = {**os.environ, **LOCAL, "PYTHONPATH": str(ROOT)}
        environment["DYN_FILE_KV"] = str(self._scratch / "discovery")
        return self._stack.enter_context(Child([self._python, *words], env=environment))

    def worker(self, *words: str) -> Child:
        where = ["--engine", f"trtllm://{self._engine}", "--tokenizer-dir", str(MODEL)]
        return self.start(*words, *where)

    @property
    def instances(self) -> int:
        """Workers that Dynamo knows."""
        known = self._scratch / "discovery" / "v1" / "instances"
        return sum(path.is_file() for path in known.rglob("*"))

    @property
    def models(self) -> list[str]:
        try:
            answer = httpx.get(f"{self.url}/models", timeout=30).json()
        except httpx.TransportError:
            return []
        return [each["id"] for each in answer["data"]]


EXAMPLE = (str(ROOT / "examples" / "dynamo" / "worker.py"),)
COMMAND = ("-m", "trtllm_bls.cli", "dynamo")
WORKERS = {"example": EXAMPLE, "command": COMMAND, "tokens": (*COMMAND, "--tokens")}


@pytest.fixture(scope="module", params=WORKERS.values(), ids=WORKERS)
def cluster(
    request: pytest.FixtureRequest, python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Child]]:
    with ExitStack() as stack:
        found = Cluster(python, tmp_path_factory.mktemp("cluster"), stack)
        worker = found.worker(*request.param)
        until(lambda: found.models == ["target"], seconds=120)
        yield found, worker


Running = tuple[Cluster, Child]


def test_text_and_finish_reasons_come_through(cluster: Running) -> None:
    """Of both APIs, whole and streamed."""
    client = cluster[0].client
    asked: dict[str, Any] = {"model": "target", "prompt": "one two three, stop here and on"}
    whole = client.completions.create(**asked, max_tokens=60)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (asked["prompt"], "stop")
    assert whole.usage and whole.usage.completion_tokens > 5
    stream = client.completions.create(**asked, max_tokens=60, stream=True)
    choices = [choice for part in stream for choice in part.choices]
    assert "".join(choice.text for choice in choices) == asked["prompt"]
    assert choices[-1].finish_reason == "stop"
    cut = client.completions.create(**asked, max_tokens=2).choices[0]
    assert cut.finish_reason == "length" and asked["prompt"].startswith(cut.text)
    stopped = client.completions.create(**asked, max_tokens=60, stop=["stop"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("one two three, ", "stop")
    chat = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": "one two"}], max_tokens=60
    )
    assert (chat.choices[0].message.content or "").strip() == "one two"


def test_an_error_has_its_status_and_message(cluster: Running) -> None:
    """Of what the worker refuses, each mode in its words."""
    with pytest.raises(openai.BadRequestError, match=r"(best_of|n): .*"):
        cluster[0].client.completions.create(
            model="target", prompt="one", n=2, best_of=4, max_tokens=5
        )


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_engine(cluster: Running, stream: bool) -> None:
    """Through the front end and the worker."""
    found, _ = cluster
    body = {"model": "target", "prompt": "one two " * 500, "max_tokens": 20_000, "stream": stream}
    with httpx.Client(timeout=60) as client:
        if stream:
            with client.stream("POST", f"{found.url}/completions", json=body) as answer:
                next(answer.iter_bytes())
                until(lambda: found.service.live == 1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{found.url}/completions", json=body, timeout=1)
    until(lambda: found.service.live == 0)


def test_a_worker_listens_on_this_machine_alone_and_ends_gracefully(cluster: Running) -> None:
    """A stream that runs when it is asked to end ends well. Last: the worker is gone then."""
    found, worker = cluster
    sockets = psutil.Process(worker.pid).net_connections()
    listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    prompt = "one two three four " * 100
    stream = found.client.completions.create(
        model="target", prompt=prompt, max_tokens=2000, stream=True
    )
    text = next(iter(stream)).choices[0].text
    worker.process.terminate()
    text += "".join(choice.text for part in stream for choice in part.choices)
    assert text == prompt
    assert worker.end() == 0


def test_begun_streams_go_on_at_another_worker(
    python: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With ``--tokens`` and Dynamo's ``--migration-limit``: texts are those of whole answers."""
    words = load_tokenizer(MODEL).encode_word(" one two three four five six seven")
    engine = ScriptedEngine(
        lambda ids: words[len(ids) % len(words)],  # as a model, it goes on from whatever there is
        Script(step_seconds=0.02, vocab_size=load_tokenizer(MODEL).model_vocab_size),
    )
    with ExitStack() as stack:
        scratch = tmp_path_factory.mktemp("migrating")
        found = Cluster(python, scratch, stack, "--migration-limit", "3", engine=engine)
        lost, _ = (found.worker(*COMMAND, "--tokens") for _ in range(2))
        until(lambda: found.instances == 2 and found.models == ["target"], seconds=120)
        asked: dict[str, Any] = {"model": "target", "prompt": "one two", "max_tokens": 100}
        expected = found.client.completions.create(**asked).choices[0].text
        streams = [found.client.completions.create(**asked, stream=True) for _ in range(6)]
        texts = [next(iter(stream)).choices[0].text for stream in streams]
        lost.kill()
        for number, stream in enumerate(streams):
            texts[number] += "".join(choice.text for part in stream for choice in part.choices)
        assert texts == [expected] * len(streams)
        assert len(found.service.requests) > 1 + len(streams)  # some were asked for again
