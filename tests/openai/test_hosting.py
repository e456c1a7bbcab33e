"""``trtllm_bls.openai.asgi_app`` hosted by others: a test client, uvicorn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import until
from trtllm_bls.errors import SettingsError
from trtllm_bls.openai import asgi_app
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.text.tokenizer import load_tokenizer

MODEL = DEMO / "target"
NOWHERE = "127.0.0.1:1"
ASKED: dict[str, Any] = {"model": "target", "prompt": "one two three", "max_tokens": 60}


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """A service that says each prompt back; the text that names it."""
    tokenizer = load_tokenizer(MODEL)
    script = Script(step_seconds=0.001, vocab_size=tokenizer.model_vocab_size)
    behaviour = Behaviour(eos_id=tokenizer.eos_id or 0, vocab_size=tokenizer.vocab_size)
    with service_in_a_thread(EchoEngine(script), behaviour) as (_, url):
        yield f"trtllm://{url}"


def test_it_answers_counts_and_logs(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """As ``trtllm-bls openai`` does."""
    with TestClient(asgi_app(engine=engine, tokenizer_dir=MODEL, max_streams=8)) as client:
        mine = {"x-request-id": "mine"}
        answer = client.post("/v1/completions", json=ASKED, headers=mine)
        assert answer.json()["choices"][0]["text"] == "one two three"
        counted = 'trtllm_bls_requests_total{outcome="success",reason="end_id",model="target"} 1'
        until(lambda: counted in client.get("/metrics").text)
        assert client.get("/health").json() == {"status": "ok"}
        until(lambda: "outcome=success" in caplog.text)
        assert "request id=mine-" in caplog.text
    assert "at most 8 requests" in caplog.text


def test_each_of_several_engines_is_told_with_its_load(engine: str) -> None:
    """Also of one that cannot be reached."""
    engines = f"{engine},{NOWHERE}"
    app = asgi_app(engine=engines, tokenizer_dir=MODEL, engine_affinity=True)
    with TestClient(app) as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        told = client.get("/metrics").text
        for address, is_up in ((engine, 1), (f"trtllm://{NOWHERE}", 0)):
            series = f'trtllm_bls_engine_sequences{{engine="{address}",model="target"}} 0'
            assert series in told
            assert f'trtllm_bls_engine_up{{engine="{address}"}} {is_up}' in told


def test_it_drains_and_forgets_the_drain_of_an_earlier_process(engine: str, tmp_path: Path) -> None:
    """Over the directory of the parameter; new requests are refused while it is healthy no more."""
    files = StatusDirectory(tmp_path / "status")
    for _ in range(2):
        app = asgi_app(engine=engine, tokenizer_dir=MODEL, status_dir=files.path)
        with TestClient(app) as client:
            assert client.get("/health").status_code == 200
            files.give_notice()
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json=ASKED).status_code == 200
            files.ask_to_drain(float("inf"))
            until(lambda: files.handed_over)
            refused = client.post("/v1/completions", json=ASKED)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get("/health").status_code == 503


def test_names_and_keys_are_those_of_the_settings_and_of_the_file(
    engine: str, tmp_path: Path
) -> None:
    """Clients without a key are refused."""
    (tmp_path / "keys").write_text("mine\n")
    app = asgi_app(
        ApiSettings(model_names=("llama",)),
        api_keys_file=tmp_path / "keys",
        engine=engine,
        tokenizer_dir=MODEL,
    )
    with TestClient(app) as client:
        assert client.get("/v1/models").status_code == 401
        listed = client.get("/v1/models", headers={"Authorization": "Bearer mine"}).json()
        assert [card["id"] for card in listed["data"]] == ["llama"]


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ({"max_stream": 3}, "did you mean max_streams?"),
        ({"max_streams": 0}, "max_streams = '0'"),
        ({"engine_transport": "bls"}, "has no parameter engine_transport"),
    ],
)
def test_a_parameter_that_cannot_be_used_is_refused_by_name(
    parameter: dict[str, str | int], said: str
) -> None:
    """Before anything is loaded."""
    with pytest.raises(SettingsError, match=said.replace("?", r"\?")):
        asgi_app(tokenizer_dir=MODEL, **parameter)


def test_uvicorn_hosts_it(engine: str, tmp_path: Path) -> None:
    """A module with two lines, which another server's workers import; it ends with them."""
    lines = f"from trtllm_bls.openai import asgi_app\napp = asgi_app({engine=}, tokenizer_dir="
    (tmp_path / "served.py").write_text(f"{lines}{str(MODEL)!r})\n")
    command = [sys.executable, "-m", "uvicorn", "--app-dir", tmp_path, "--port", "0", "served:app"]
    with Child(command, name="uvicorn") as running:
        line = running.errors.wait_for("running on")
        url = line.partition("running on ")[2].split()[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        stream = client.completions.create(**ASKED, stream=True)
        assert "".join(part.choices[0].text for part in stream) == ASKED["prompt"]
        assert running.terminate() in (0, -signal.SIGTERM)  # newer releases raise it again
        assert "outcome=success" in running.errors.rest()
