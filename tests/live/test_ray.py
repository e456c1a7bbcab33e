"""``examples/serve_openai.py`` on Ray Serve, over a scripted engine.

``RAY=/path/to/python`` names an interpreter that has ``ray[serve]`` and this package's
requirements. Ray listens on all interfaces, and writes a token file into the home directory, which
is a scratch directory here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import until
from trtllm_bls.text.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("RAY" not in os.environ, reason="no ray: RAY=/path/to/its/python runs it"),
]
MODEL = DEMO / "target"
DRIVER = """
import sys, ray, serve_openai
from ray import serve
ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=4, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(serve_openai.application)
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """Where Ray Serve answers, and the engine's service."""
    tokenizer = load_tokenizer(MODEL)
    script = Script(step_seconds=0.005, vocab_size=tokenizer.model_vocab_size)
    sizes = {"eos_id": tokenizer.eos_id or 0, "vocab_size": tokenizer.vocab_size}
    (port,) = unused_ports(1)
    with ExitStack() as stack:
        played = service_in_a_thread(EchoEngine(script), Behaviour(**sizes, leaks=False))
        service, url = stack.enter_context(played)
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "HOME": str(tmp_path_factory.mktemp("home")),
            "ENGINE": f"trtllm://{url}",
            "TOKENIZER_DIR": str(MODEL),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = [os.environ["RAY"], "-c", DRIVER, str(port)]
        options = {"stdin": subprocess.PIPE, "env": environment}
        process = stack.enter_context(Child(words, name="Ray", **options))
        process.output.wait_for("ready")
        yield f"http://127.0.0.1:{port}", service
        assert process.process.stdin
        process.process.stdin.close()
        process.end()


def test_the_example_is_short() -> None:
    """A reader takes it in at a glance."""
    lines = Path(ROOT / "examples" / "serve_openai.py").read_text().splitlines()
    assert len(lines) <= 20


def test_it_answers_refuses_and_tells_its_health(running: tuple[str, Any]) -> None:
    """Over both APIs, whole and streamed."""
    url, _ = running
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    asked: dict[str, Any] = {"model": "target", "prompt": "one two three", "max_tokens": 60}
    assert client.completions.create(**asked).choices[0].text == "one two three"
    stream = client.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].text for part in stream) == "one two three"
    chat = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": "one two"}], max_tokens=60
    )
    assert (chat.choices[0].message.content or "").strip() == "one two"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(**asked | {"model": "other"})
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
    client.close()


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_engine(running: tuple[str, Any], stream: bool) -> None:
    """Through Ray's proxy."""
    url, service = running
    body = {"model": "target", "prompt": "one two " * 500, "max_tokens": 20_000, "stream": stream}
    with httpx.Client(timeout=60) as client:
        if stream:
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_bytes())
                assert service.live == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=body, timeout=1)
    until(lambda: service.live == 0)
