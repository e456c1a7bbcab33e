"""A repository of upstream's llmapi model, converted and served: its clients find it again."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conformance.engines import LLM_API
from tests.helpers.server_settings import DEMO, free_ports
from tests.helpers.waiting import in_pieces
from tests.helpers.watched import watched
from tests.models.test_configure_llm_api import upstreams
from trtllm_bls.cli import main
from trtllm_bls.operate.tritonserver import TritonServer

PROMPT = "The answer of the engine is"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    place = tmp_path_factory.mktemp("converted")
    old = upstreams(place / "old", DEMO / "target")
    words = ["configure", "--from", str(old), "--out", str(place / "new")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    code = place / "new" / "tensorrt_llm_engine" / "1" / "model.py"
    code.write_text(f"import sys\n\nsys.path.insert(0, {str(LLM_API)!r})\n{code.read_text()}")
    with watched(free_ports(model_repository=place / "new"), "converted") as running:
        yield running


def post(server: TritonServer, path: str, body: Any) -> str:
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: str = response.read().decode()
    return answer


def test_a_converted_repository_answers_as_the_embedded_engine(
    converted: TritonServer, server: TritonServer
) -> None:
    """By upstream's tensors and by ours, streamed and whole."""
    ours = {"text_input": PROMPT, "max_tokens": 12}
    expected = json.loads(post(server, "tensorrt_llm_bls/generate", ours))["text_output"]
    assert expected
    same = json.loads(post(converted, "tensorrt_llm_bls/generate", ours))["text_output"]
    theirs = {"text_input": PROMPT, "sampling_param_max_tokens": 12, "return_finish_reason": True}
    whole = json.loads(post(converted, "tensorrt_llm/generate", theirs))
    assert same == expected
    assert whole["text_output"] == PROMPT + expected

    def growing() -> list[Any]:
        lines = post(converted, "tensorrt_llm/generate_stream", theirs | {"streaming": True})
        told = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: ")]
        assert told[-1]["text_output"] == expected
        assert all(expected.startswith(each["text_output"]) for each in told)
        assert told[-1]["finish_reason"] == whole["finish_reason"] == "length"
        return told

    in_pieces(growing, 2)
