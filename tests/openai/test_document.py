"""The published ``/openapi.json`` is what the API does: schemathesis compares the two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.openai_server import ScriptedBackend, serving
from tests.helpers.published import npm_install
from tests.helpers.scripted_text import tokenizer
from tests.helpers.tiers import FULL, budget
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.openai.document import document
from trtllm_bls.openai.field_sentences import FIELD_SENTENCES

BY_PIPELINES = {"/v1/embeddings", "/v1/audio/speech", "/v1/rerank"}  # which a demo has none of
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    "response_schema_conformance",
)
EXAMPLES = os.environ.get("TRTLLM_BLS_API_EXAMPLES", str(budget(3, 8)))  # of each operation
# The values at the edges of each field are many. Each run of `test_wrong_values.py` sends wrong
# values of each field.
PHASES = "coverage,fuzzing" if FULL else "fuzzing"
SECONDS = 280 + 5 * int(EXAMPLES)


@pytest.mark.timeout(SECONDS + 20)
def test_no_request_gets_an_answer_that_is_not_declared() -> None:
    """Neither a 500 nor another status, type or shape, whatever is sent."""
    size = tokenizer().vocab_size
    script = Script(vocab_size=size, max_sequence_tokens=300)
    with serving(ScriptedEngine(hashed(size, first=10), script)) as api:
        command = [sys.executable, "-W", "ignore", "-m", "schemathesis.cli", "run"]
        command += [f"{api.url}/openapi.json", "--max-examples", EXAMPLES, "--no-color"]
        command += ["--phases", PHASES, "--checks", ",".join(CHECKS)]
        if not FULL:  # the same requests each time
            command += ["--generation-deterministic"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_document_has_every_route_with_a_sentence() -> None:
    """Beside WebSockets, which OpenAPI cannot tell."""
    size = tokenizer().vocab_size
    engine = ScriptedEngine(hashed(size, first=10), Script(vocab_size=size))
    with serving(engine) as api:
        paths = httpx.get(f"{api.url}/openapi.json", timeout=60).json()["paths"]
        routes = httpx.get(f"{api.url}/v1", timeout=60).json()["data"]
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


def test_each_field_has_a_sentence_and_no_sentence_is_left_over() -> None:
    """A new field of a request has to be explained."""
    used = set()
    for title, schema in document(("demo",))["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            assert described["description"].endswith(".")
            own = f"{title}.{field}"
            used.add(own if own in FIELD_SENTENCES else field)
    assert used == set(FIELD_SENTENCES)


def test_each_operation_with_a_body_has_an_example_that_works() -> None:
    size = tokenizer().vocab_size
    engine = ScriptedEngine(hashed(size, first=10), Script(vocab_size=size))
    with serving(engine) as api:
        paths = httpx.get(f"{api.url}/openapi.json", timeout=60).json()["paths"]
        for path, operations in paths.items():
            if "requestBody" in operations.get("post", {}) and path not in BY_PIPELINES:
                example = operations["post"]["requestBody"]["content"]["application/json"]
                answer = httpx.post(f"{api.url}{path}", json=example["example"], timeout=60)
                assert answer.status_code == 200, (path, answer.text)


def test_another_projects_linter_finds_no_error(tmp_path: Path) -> None:
    """Redocly's, with its recommended rules."""
    if "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ:
        pytest.skip("installs an npm package; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it")
    npm_install(tmp_path, "@redocly/cli@2")
    (tmp_path / "openapi.json").write_text(json.dumps(document(("demo",))))
    linter = [str(tmp_path / "node_modules/.bin/redocly"), "lint", "openapi.json"]
    done = subprocess.run(linter, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_pages_need_no_network_and_no_script() -> None:
    """`/docs` has each operation and field; `/` comes packed where the browser takes that."""
    size = tokenizer().vocab_size
    with serving(ScriptedEngine(hashed(size, first=10), Script(vocab_size=size))) as api:
        docs = httpx.get(f"{api.url}/docs", timeout=60).text
        page = httpx.get(f"{api.url}/", headers={"accept-encoding": "gzip"}, timeout=60)
        plain = httpx.get(f"{api.url}/", headers={"accept-encoding": "identity"}, timeout=60)
    assert "POST /v1/chat/completions" in docs and "<code>temperature</code>" in docs
    assert "<script" not in docs and "http" not in docs
    assert page.headers["content-encoding"] == "gzip"
    assert page.text == plain.text and "content-encoding" not in plain.headers
    assert int(page.headers["content-length"]) < int(plain.headers["content-length"]) / 3
