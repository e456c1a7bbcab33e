"""The load runs, as a process: what they ask, what they count, and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

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
from trtllm_bls.client import Event
from trtllm_bls.commands.benchmark import (
    Measurement,
    compare,
    figures,
    main,
    problem_of,
    read_prompts,
)
from trtllm_bls.commands.reply import Reply
from trtllm_bls.commands.servers import Question
from trtllm_bls.errors import SettingsError

BENCHMARK = Path(__file__).parents[2] / "client" / "benchmark.py"


def answers(request: Any) -> list[Step]:
    """Refuses every fourth prompt of eight."""
    inputs = inputs_of(request)
    if inputs["text_input"] == [["prompt 3"]]:
        return [Fail("INVALID_ARG: text_input: is not liked")]
    (tokens,) = inputs["max_tokens"][0]
    counted = {"num_input_tokens": 2, "num_output_tokens": tokens}
    return [text("one "), text("two", finish_reason="length", **counted), Say(final=True)]


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeGrpcServer]:
    with in_a_thread(lambda: FakeGrpcServer(answers)) as server:
        yield server


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *words]
    environment = {"COLUMNS": "200", "PYTHONPATH": str(BENCHMARK.parents[1])}
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
        ended = benchmark(
            *("--url", triton.url, "--url", f"{api.url}/v1", "--prompts", str(prompts)),
            *("--requests", "8", "--max-tokens", "6", "--ignore-eos", "--rounds", "2"),
            *("--json", str(file)),
        )
    assert ended.returncode == 1, ended.stderr  # requests failed
    assert "2 x text_input: is not liked" in ended.stdout
    assert "4 x text_input: is not liked" in ended.stdout
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
    ended = benchmark("-u", triton.url, "--mode", "latency", "-n", "3", "-q", "--max-tokens", "2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "latency; times in ms" in ended.stdout and "first token p50" in ended.stdout


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--json", "/nowhere/x.json"), 2, "error: --json /nowhere/x.json: there is no such"),
        (("--json", "/"), 2, "Error: Invalid value for '--json': File '/' is a directory."),
        (("--url", "http://host:99999/v1"), 2, "error: --url http://host:99999/v1: write http://"),
        (("--url", "http://[::1/v1"), 2, "error: --url http://[::1/v1: write http://HOST:PORT/v1"),
        (("--prompts", "/nowhere.txt"), 2, "error: --prompts /nowhere.txt: cannot be read"),
        (("--field", "x"), 2, "--field: 'x' is not NAME=VALUE"),
        (("--url", "http://127.0.0.1:1/v1"), 3, "error: http://127.0.0.1:1/v1: "),
        (("--url", "127.0.0.1:1"), 3, "error: 127.0.0.1:1: "),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    words: tuple[str, ...], code: int, told: str
) -> None:
    """In one line."""
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == code
    assert told in ended.stderr and "Traceback" not in ended.stderr


# --- files of prompts -------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("one\n\ntwo three\n", ["one", "two three"]),
        ('["one", {"prompt": "two"}, {"text_input": "three"}]', ["one", "two", "three"]),
        ('{"easy": ["one"], "hard": ["two"]}', ["one", "two"]),
        ('{"prompt": "one"}\n{"text": "two"}\n', ["one", "two"]),
        (json.dumps({"messages": MESSAGES}), [MESSAGES]),
        (json.dumps([MESSAGES, "one"]), [MESSAGES, "one"]),
        ('"quoted" text\nof two lines', ['"quoted" text', "of two lines"]),
    ],
)
def test_prompts_are_read_from_lines_and_from_json(
    tmp_path: Path, content: str, prompts: list[Any]
) -> None:
    """Whatever holds them."""
    file = tmp_path / "prompts"
    file.write_text(content)
    assert read_prompts(file) == prompts


@pytest.mark.parametrize("content", ["", "[]", '[{"other": 1}]', '["", "x"]', "{}"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    """By its name."""
    file = tmp_path / "prompts"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"--prompts .*: .*prompt"):
        read_prompts(file)


# --- figures ----------------------------------------------------------------------------------


def outcome(whole_s: float, problem: str | None = None, **more: Any) -> Measurement:
    given = {"target": 0, "index": 0, "sent": 0.0, "ttft_s": whole_s / 2, "tokens": 10}
    return Measurement(
        **{**given, "finish_reason": "stop", **more}, whole_s=whole_s, problem=problem
    )


def test_figures_are_of_the_requests_that_succeeded() -> None:
    """Failed ones are counted by what was wrong."""
    found = figures([outcome(1.0), outcome(2.0), outcome(99.0, "broke")], seconds=4.0)
    assert (found["requests"], found["failed"], found["problems"]) == (3, 1, {"broke": 1})
    assert (found["tokens"], found["tokens_per_s"], found["requests_per_s"]) == (20, 5.0, 0.5)
    assert found["stream_tokens_per_s"] == 7.5
    assert (found["whole_ms"]["p50"], found["ttft_ms"]["p50"]) == (1500.0, 750.0)
    assert figures([outcome(1.0, tokens=None)], 1.0)["tokens_per_s"] is None  # nobody counted
    nothing = figures([outcome(1.0, "broke")], 1.0)
    assert nothing["whole_ms"] is None and nothing["tokens_per_s"] is None


def test_comparison_pairs_what_both_answered() -> None:
    """A ratio of single requests, not of sums."""
    found = compare([outcome(1.0), outcome(1.0, "x"), outcome(4.0)], [outcome(2.0)] * 3)
    assert found == {"pairs": 2, "whole_ratio": 1.25, "ttft_ratio": 1.25}


@pytest.mark.parametrize(
    ("finish_reason", "text", "tokens", "ignore_eos", "problem"),
    [
        ("stop", "x", 3, False, None),
        (None, "x", None, True, None),
        ("length", "x", 9, False, "9 tokens, more than the 5 asked for"),
        ("timeout", "x", 3, False, "ended by 'timeout'"),
        ("stop", "", 0, False, "no text came"),
        ("stop", "x", 3, True, "3 tokens where 5 were asked for with --ignore-eos"),
    ],
)
def test_every_end_is_checked(
    finish_reason: str | None, text: str, tokens: int | None, ignore_eos: bool, problem: str | None
) -> None:
    """An answer that came is not always the answer that was asked for."""
    reply = Reply(max_tokens=5)
    reply.add(
        Event(texts=(text,), received_at=0.0, finish_reason=finish_reason, num_output_tokens=tokens)
    )
    asked = Question(max_tokens=5, fields={"ignore_eos": ignore_eos or None})
    assert problem_of(reply, asked) == problem
