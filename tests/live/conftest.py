"""Servers whose engine is a script: ``echo`` says the prompt back, once for each transport.

The transport ``trtllm`` is a server without an engine, before a TrtllmService that is played;
``llm_api-RELEASE`` has the script behind the LLM API of a release, which is played, too.

``server``, what a user gets, is in ``tests/conftest.py``, since other suites use it too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from doubles.guided import GuidedAnswers
from doubles.scripted import Fault, Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT, free_ports
from tests.helpers.threaded_server import serving_in_a_thread
from tests.helpers.ticking_models import TICKER, write_model
from tests.helpers.watched import watched
from trtllm_bls.errors import EngineError
from trtllm_bls.operate.preparation import SENDING_THREADS
from trtllm_bls.settings.command_options import Override, ServeSettings
from trtllm_bls.text.tokenizer import load_tokenizer

# As in ``scripted/1/model.py``.
FAULTS = {
    666001: Fault(error=EngineError("the script says so"), after_tokens=3),
    666002: Fault(error=None, after_tokens=3),
    666003: Fault(error=EngineError("the script says so")),
}


ENSEMBLE_MODELS = ("ensemble", "preprocessing", "postprocessing")


@pytest.fixture(
    scope="session",
    params=[
        "grpc",
        # Before a service runs ``conformance``, before the LLM API ``test_llm_api``, each time.
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in ("trtllm", "llm_api-1.0.0", "llm_api-1.2.1", "llm_api-1.4.0rc1")
        ),
    ],
)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def echo(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if transport == "trtllm":
        with before_a_service() as running:
            yield running
        return
    settings = echo_settings(tmp_path_factory.mktemp("echo"), transport, ensemble=True)
    with watched(settings, "echo") as running:
        yield running


def echo_repository(scratch: Path, *, ensemble: bool = False) -> Path:
    """Write the models with a scripted engine; without ``ensemble`` two processes start less."""
    repository = scratch / "models"
    shutil.copytree(ROOT / "models", repository)
    if not ensemble:
        for name in ENSEMBLE_MODELS:
            shutil.rmtree(repository / name)
    shutil.rmtree(repository / "tensorrt_llm" / "1")
    shutil.copytree(ROOT / "tests" / "live" / "scripted" / "1", repository / "tensorrt_llm" / "1")
    return repository


def echo_settings(
    scratch: Path, transport: str = "grpc", *, ensemble: bool = False, **more: Any
) -> ServeSettings:
    release = transport.partition("llm_api-")[2]
    return free_ports(
        model=DEMO / "target",
        model_repository=echo_repository(scratch, ensemble=ensemble),
        # As before an engine in C++, which the scripted one stands for.
        thread_pool_size=SENDING_THREADS,
        # Tests cancel calls; Triton 24.10 may keep one for ever that ends just then.
        **{"exit_timeout": 5, **more},
        overrides=(
            Override("tensorrt_llm", "step_ms", "5"),
            *([Override("tensorrt_llm", "llm_api", release)] if release else []),
        ),
    )


@dataclass(frozen=True)
class BeforeAService:
    """A server before a service; what is measured is the service."""

    grpc_url: str
    http_url: str
    metrics_url: str
    models: tuple[str, ...]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ticker") / "models"
    write_model(made, "ticker", TICKER)
    return made


@contextmanager
def before_a_service() -> Iterator[BeforeAService]:
    model = DEMO / "target"
    tokenizer = load_tokenizer(model)
    script = Script(step_seconds=0.005, vocab_size=tokenizer.model_vocab_size)
    guided = GuidedAnswers(model / "tokenizer.json", tokenizer.model_vocab_size)
    engine = EchoEngine(script, FAULTS, guided)
    behaviour = Behaviour(eos_id=tokenizer.eos_id or 0, vocab_size=tokenizer.vocab_size)
    with (
        service_in_a_thread(engine, behaviour) as (service, url),
        metrics_of(service) as metrics_url,
        watched(free_ports(model=model, engine=f"trtllm://{url}"), "echo") as server,
    ):
        yield BeforeAService(server.grpc_url, server.http_url, metrics_url, server.models)


@contextmanager
def metrics_of(service: Any) -> Iterator[str]:
    """Where the numbers are that ``scripted/1/model.py`` has on its server's ``/metrics``."""

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            traced = sum(trace is not None for trace in service.traces)
            text = f"echo_live_requests {service.live}\necho_tokens {service.tokens}\n"
            self.wfile.write(f"{text}echo_traced_requests {traced}\n".encode())

        def log_message(self, *args: Any) -> None:
            pass

    with serving_in_a_thread(HTTPServer(("127.0.0.1", 0), Metrics)) as http:
        yield f"http://127.0.0.1:{http.server_port}/metrics"
