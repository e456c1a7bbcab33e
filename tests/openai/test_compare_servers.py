"""``benchmarks/compare_servers.py``, as a process: what it asks, counts and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.fake_grpc_server import (
    Fail,
    FakeGrpcServer,
    Say,
    Step,
    in_a_thread,
    inputs_of,
    text,
)
from tests.helpers.openai_server import MODEL, serving
from tests.helpers.scripted_text import tokenizer

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare_servers.py"


def answers(request: Any) -> list[Step]:
    """Refuses every fourth prompt of eight."""
    inputs = inputs_of(request)
    if json.loads(inputs["messages"][0][0])[0]["content"] == "prompt 3":
        return [Fail("INVALID_ARG: messages: is not liked")]
    (tokens,) = inputs["max_tokens"][0]
    counted = {"num_input_tokens": 2, "num_output_tokens": tokens}
    said = "" if tokens == 3 else "two"
    return [text(said), text("", finish_reason="length", **counted), Say(final=True)]


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeGrpcServer]:
    with in_a_thread(lambda: FakeGrpcServer(answers)) as server:
        yield server


def compared(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMPARE), *words]
    environment = {"COLUMNS": "200", "PYTHONPATH": str(COMPARE.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_two_servers_are_compared_in_one_interleaved_run(
    triton: FakeGrpcServer, tmp_path: Path
) -> None:
    """Another API each; every request is counted, refused ones apart; they take turns."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {n}\n" for n in range(4)))
    file = tmp_path / "out.json"
    engine = ScriptedEngine(hashed(600, first=10), Script(vocab_size=tokenizer().vocab_size))
    before = len(triton.asked)
    with serving(engine) as api:
        ended = compared(
            *(triton.url, f"{api.url}/v1", "--prompts", str(prompts)),
            *("--requests", "8", "--max-tokens", "6", "--ignore-eos", "--rounds", "2"),
            *("--json", str(file)),
        )
    assert ended.returncode == 1, ended.stderr  # requests failed
    assert "2 x messages: is not liked" in ended.stdout
    assert "4 x messages: is not liked" in ended.stdout
    found = json.loads(file.read_text())
    batch, latency = found["runs"]
    for run, requests in ((batch, 16), (latency, 8)):
        ours, other = run["servers"]
        assert (ours["requests"], ours["failed"]) == (requests, requests // 4)
        assert ours["tokens"] == 6 * requests * 3 // 4
        assert (other["requests"], other["failed"], other["tokens"]) == (requests, 0, 6 * requests)
        assert run["compared_with_the_first"][0]["pairs"] == requests * 3 // 4
        for server in run["servers"]:
            assert server["ttft_ms"]["p50"] <= server["ttft_ms"]["p90"]
            assert server["ttft_ms"]["p50"] <= server["whole_ms"]["p50"]
    assert other["name"] == f"{MODEL} at {api.url}/v1"
    sent = sorted((o["sent"], o["target"]) for s in latency["servers"] for o in s["outcomes"])
    turns = [target for _, target in sent]
    assert turns == [0, 1, 1, 0] * 4
    assert len(triton.asked) - before == 16 + 8 + 2  # and two to warm up
    assert inputs_of(triton.asked[-1])["end_id"] == [[-1]]


def test_one_server_has_a_table_and_ends_well(triton: FakeGrpcServer) -> None:
    """One server, one mode; the exit code says that all went well."""
    ended = compared(triton.url, "--mode", "latency", "--requests", "3", "--max-tokens", "2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "latency; times in ms" in ended.stdout and "first token p50" in ended.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--max-tokens", "3"), "2 x no text came"),
        (("--field", "max_tokens=9"), "2 x 9 tokens, more than the 8 asked for"),
        (("--field", "max_tokens=7", "--ignore-eos"), "2 x 7 tokens where 8 were asked for"),
        (("--timeout", "1e-9"), "2 x no complete answer within 1e-09 s"),
    ],
)
def test_every_end_is_checked(triton: FakeGrpcServer, words: tuple[str, ...], problem: str) -> None:
    """An answer that came is not always the answer that was asked for."""
    ended = compared(triton.url, "--max-tokens", "8", "--mode", "batch", "--requests", "2", *words)
    assert ended.returncode == 1 and problem in ended.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("http://host:99999/v1",), "error: --url http://host:99999/v1: write http://"),
        (("127.0.0.1:1", "--prompts", "/nowhere.txt"), "error: [Errno 2] No such file"),
        (("http://127.0.0.1:1/v1",), "error: http://127.0.0.1:1/v1: "),
        (("127.0.0.1:1",), "error: 127.0.0.1:1: "),
    ],
)
def test_what_cannot_work_is_said_in_one_line(words: tuple[str, ...], told: str) -> None:
    """Before anything is measured."""
    ended = compared(*words)
    assert ended.returncode == 1
    assert told in ended.stderr and "Traceback" not in ended.stderr
