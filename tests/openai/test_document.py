"""The published ``/openapi.json`` is what the API does: schemathesis compares the two."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest
from starlette.routing import Route

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.openai_server import ScriptedBackend, serving
from tests.helpers.scripted_text import tokenizer
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    "response_schema_conformance",
)
EXAMPLES = os.environ.get("TRTLLM_BLS_API_EXAMPLES", "8")  # of each operation
SECONDS = 280 + 5 * int(EXAMPLES)


@pytest.mark.timeout(SECONDS + 20)
def test_no_request_gets_an_answer_that_is_not_declared() -> None:
    """Neither a 500 nor another status, type or shape, whatever is sent."""
    size = tokenizer().vocab_size
    script = Script(vocab_size=size, max_sequence_tokens=300)
    with serving(ScriptedEngine(hashed(size, first=10), script)) as api:
        command = [sys.executable, "-W", "ignore", "-m", "schemathesis.cli", "run"]
        command += [f"{api.url}/openapi.json", "--max-examples", EXAMPLES, "--no-color"]
        command += ["--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_document_has_every_route_with_a_sentence() -> None:
    """Beside WebSockets, which OpenAPI cannot tell."""
    size = tokenizer().vocab_size
    engine = ScriptedEngine(hashed(size, first=10), Script(vocab_size=size))
    with serving(engine) as api:
        paths = httpx.get(f"{api.url}/openapi.json").json()["paths"]
        routes = httpx.get(f"{api.url}/v1").json()["data"]
    declared = set()
    for path, operations in paths.items():
        for method, operation in operations.items():
            declared.add(f"{method.upper()} {path}")
            assert operation["summary"].endswith(".")
    served = set()
    for route in create_app(ScriptedBackend(engine), ApiSettings(model_names=("m",))).routes:
        if isinstance(route, Route):
            path = route.path.replace("{name:path}", "{name}")
            served |= {f"{method} {path}" for method in (route.methods or ()) - {"HEAD"}}
    assert declared == served
    assert set(routes) == {operation for operation in served if " /v1/" in operation}


def test_the_pages_need_no_network_and_no_script() -> None:
    """`/docs` has each operation and field; `/` comes packed where the browser takes that."""
    size = tokenizer().vocab_size
    with serving(ScriptedEngine(hashed(size, first=10), Script(vocab_size=size))) as api:
        docs = httpx.get(f"{api.url}/docs").text
        page = httpx.get(f"{api.url}/", headers={"accept-encoding": "gzip"})
        plain = httpx.get(f"{api.url}/", headers={"accept-encoding": "identity"})
    assert "POST /v1/chat/completions" in docs and "<code>temperature</code>" in docs
    assert "<script" not in docs and "http" not in docs
    assert page.headers["content-encoding"] == "gzip"
    assert page.text == plain.text and "content-encoding" not in plain.headers
    assert int(page.headers["content-length"]) < int(plain.headers["content-length"]) / 3
