"""The published ``/openapi.json`` is what the API does: schemathesis compares the two."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.openai_server import serving
from tests.helpers.scripted_text import tokenizer

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
