"""``serve`` before a TrtllmService that says it is not well: every way to ask tells so."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.ports import serve_ports, unused_ports
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_requests import generate, post
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import until
from trtllm_bls.text.tokenizer import load_tokenizer

WORDS = "one two three"
ASKED: dict[str, Any] = {"text_input": WORDS, "max_tokens": 40}
pytestmark = pytest.mark.live


def told(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and body of one GET, or of the POST of ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def looked(address: str) -> tuple[int, str]:
    """Exit code and output of ``trtllm-bls health``."""
    words = [sys.executable, "-m", "trtllm_bls.cli", "health", "--url", address, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


def refused(http: str, api: str) -> None:
    """Drafts, which the service cannot verify: its own settings are named, wherever one asks."""
    _, text = post(http, "tensorrt_llm_bls", "generate", **ASKED, num_draft_tokens=3)
    assert "num_draft_tokens: cannot be honoured" in text and "speculative_config" in text
    assert generate(http, **ASKED)["text_output"] == WORDS
    body = {"model": "target", "prompt": WORDS, "num_draft_tokens": 3, "max_tokens": 40}
    status, text = told(f"{api}/completions", body)
    assert status == 400 and "speculative_config" in text
    assert told(f"{api}/completions", body | {"num_draft_tokens": 0})[0] == 200


@pytest.mark.slow
def test_readiness_and_refusals_of_a_server_before_a_service() -> None:
    """Of ``serve``, of the OpenAI API and of the command; a service that is ill at first, too."""
    (port,) = unused_ports(1)
    tokenizer = load_tokenizer(DEMO / "target")
    ill = Behaviour(eos_id=tokenizer.eos_id or 0, health="RuntimeError: dead")
    well = Behaviour(eos_id=tokenizer.eos_id or 0)
    with service_in_a_thread(EchoEngine(Script(vocab_size=tokenizer.model_vocab_size)), ill) as (
        service,
        url,
    ):
        words = ["serve", "--engine", f"trtllm://{url}", "--model", str(DEMO / "target")]
        words += serve_ports()
        words = [sys.executable, "-m", "trtllm_bls.cli", *words, "--openai-port", str(port)]
        with Child(words, name="serve") as process:
            urls = dict(process.output.next().split() for _ in range(5))
            ready, api = urls["health"], urls["OpenAI"].replace("/v1", "/health")
            for behaviour in (ill, well, ill):
                service.behaviour = behaviour
                status = 200 if behaviour is well else 503
                until(lambda status=status: told(ready)[0] == status)
                until(lambda status=status: told(api)[0] == status)
                code, output = looked(urls["gRPC"])
                assert (code, json.loads(output)["ready"]) == (status != 200, status == 200)
                if behaviour is well:
                    refused(urls["HTTP"], urls["OpenAI"])
                else:
                    for text in (told(ready)[1], told(api)[1], output):
                        assert f"trtllm://{url}: it is not healthy: RuntimeError: dead" in text
            process.terminate()
