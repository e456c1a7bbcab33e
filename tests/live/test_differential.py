"""The same requests over every endpoint: one text, one reason, one count, one error.

What an ensemble cannot know (text stop words, endings) is not asked of it here; docs/contract.md
says what it cannot do.
"""

from __future__ import annotations

import json
import queue
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.helpers.server_requests import ask_all, generate, generate_stream
from tests.helpers.waiting import STREAM_S
from trtllm_bls.client import Result
from trtllm_bls.errors import TrtllmBlsError, to_wire

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

SNIPPETS = (
    "hello world",
    " नमस्ते दुनिया",
    "数到九：一、二、三",
    "👩‍👩‍👧‍👦🇩🇪",
    "\n    return x\n",
    "العربية",
    "a" * 9,
    "<|end|>",
    " 12 * 9 = 108.",
    "\t\x00\u200d",
)
BAD: tuple[dict[str, Any], ...] = (
    {"text_input": ""},
    {"max_tokens": 0},
    {"top_p": 1.5},
    {"temperature": -0.5},
    {"repetition_penalty": -1.0},
    {"min_length": 2, "min_tokens": 3},
    {"embedding_bias_words": ["x"]},
    {"end_id": -7},
    {"top_k": -1},
)
# How many are sent: each of ``BAD`` at least once.
COUNTS = pytest.mark.parametrize("count", [8 * len(BAD), pytest.param(200, marks=pytest.mark.slow)])


def requests(count: int) -> list[dict[str, Any]]:
    chance = random.Random(20261121)
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "text_input": "".join(chance.choices(SNIPPETS, k=chance.randint(1, 4))),
            "max_tokens": chance.randint(1, 24),
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
        body |= chance.choice(({}, {"temperature": 0.7, "seed": number}, {"top_k": 1}))
        body |= chance.choice(({}, {}, {"exclude_input_in_output": False}, {"min_tokens": 2}))
        if number % 8 == 0:
            body |= BAD[(number // 8) % len(BAD)]
        made.append(body)
    return made


def summary(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same everywhere; of an error its status and what is wrong."""
    if "error" in answer:
        error = answer["error"].removeprefix("in ensemble 'ensemble', ")  # Triton's own words
        status, _, what = error.partition(": ")
        # A field has another name at each endpoint; what is wrong with its value has not.
        return (status, what.partition(": ")[2].lower() if status == "INVALID_ARG" else what)
    names = ("text_output", "num_input_tokens", "num_output_tokens")
    return tuple(answer.get(name) for name in names)


def of_result(result: Result | TrtllmBlsError) -> dict[str, Any]:
    if isinstance(result, TrtllmBlsError):
        return {"error": to_wire(result)}
    last = result.events[-1]
    return {
        "text_output": result.text,
        "num_input_tokens": last.num_input_tokens,
        "num_output_tokens": last.num_output_tokens,
        "finish_reason": result.finish_reason,
    }


def of_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    if "error" in events[-1]:
        return events[-1]
    return events[-1] | {"text_output": "".join(event["text_output"] for event in events)}


def with_prompt(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """A stream's answer as it is unstreamed: only then is the prompt repeated, as plain text."""
    if "error" in answer or body.get("exclude_input_in_output", True):
        return answer
    return answer | {
        "text_output": body["text_input"].replace("<|end|>", "") + answer["text_output"]
    }


def at_once(
    ask: Callable[[dict[str, Any]], dict[str, Any]], bodies: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The answers to all requests over HTTP, some of them side by side."""
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(ask, bodies))


@COUNTS
def test_requests_are_answered_alike_at_every_endpoint(echo: TritonServer, count: int) -> None:
    """gRPC streaming and not, generate, generate_stream: all alike, reasons included."""
    bodies = requests(count)
    streamed = [of_result(result) for result in ask_all(echo.grpc_url, bodies)]
    streamed = list(map(with_prompt, bodies, streamed))
    unstreamed = [body | {"stream": False} for body in bodies]
    whole = [of_result(result) for result in ask_all(echo.grpc_url, unstreamed)]
    once = at_once(lambda body: generate(echo.http_url, **body), bodies)
    parts = at_once(
        lambda body: with_prompt(body, of_events(generate_stream(echo.http_url, **body))), bodies
    )
    wrong = [number for number, answer in enumerate(streamed) if "error" in answer]
    assert wrong == list(range(0, count, 8)), str({n: streamed[n]["error"] for n in wrong if n % 8})
    for body, *answers in zip(bodies, streamed, whole, once, parts, strict=True):
        assert len({summary(answer) for answer in answers}) == 1, (body, answers)
        assert len({answer.get("finish_reason") for answer in answers}) == 1, (body, answers)


@COUNTS
def test_requests_are_answered_alike_by_the_ensemble(echo: TritonServer, count: int) -> None:
    """The ensemble's steps use the orchestrator's own prompt maker and detokeniser."""
    if "ensemble" not in echo.models:
        pytest.skip("no ensemble before a service: the other transports run it")

    bodies = requests(count)
    for body in bodies:
        if body.get("exclude_input_in_output") is False:
            del body["return_num_output_tokens"]  # upstream's count there includes the prompt
    by_ensemble = at_once(lambda body: generate(echo.http_url, "ensemble", **body), bodies)
    by_bls = at_once(lambda body: generate(echo.http_url, **body), bodies)
    for body, one, other in zip(bodies, by_ensemble, by_bls, strict=True):
        assert summary(one) == summary(other), body


def test_a_client_that_knows_only_upstreams_tensors_works_unchanged(echo: TritonServer) -> None:
    """Every input with a batch dimension, a synchronous stream, text_output and nothing else."""
    inputs = []
    for name, dtype, value in (
        ("text_input", "BYTES", np.array([["सोमवार to 日曜日"]], dtype=np.object_)),
        ("max_tokens", "INT32", np.array([[64]], dtype=np.int32)),
        ("bad_words", "BYTES", np.array([[""]], dtype=np.object_)),
        ("stop_words", "BYTES", np.array([[""]], dtype=np.object_)),
        ("stream", "BOOL", np.array([[True]])),
        ("beam_width", "INT32", np.array([[1]], dtype=np.int32)),
        ("temperature", "FP32", np.array([[1.0]], dtype=np.float32)),
        ("min_length", "INT32", np.array([[1]], dtype=np.int32)),
        ("random_seed", "UINT64", np.array([[7]], dtype=np.uint64)),
        ("return_log_probs", "BOOL", np.array([[False]])),
    ):
        tensor = triton.InferInput(name, list(value.shape), dtype)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(echo.grpc_url) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), stream_timeout=STREAM_S
        )
        client.async_stream_infer("tensorrt_llm_bls", inputs, request_id="1")
        client.stop_stream()  # waits for the stream's end
    text = b""
    while not answers.empty():
        result, error = answers.get()
        assert error is None
        text += result.as_numpy("text_output").flatten()[0]
    assert text.decode() == "सोमवार to 日曜日"


def test_every_answer_of_generate_is_json(echo: TritonServer) -> None:
    """Whatever the text holds, the body is one JSON object of valid UTF-8."""
    for snippet in SNIPPETS:
        answer = generate(echo.http_url, text_input=snippet, max_tokens=40)
        assert json.loads(json.dumps(answer)) == answer
        assert "error" not in answer
