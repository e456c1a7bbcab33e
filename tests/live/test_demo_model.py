"""The shipped model on the embedded engine, behind the real server: what `make serve` gives."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.helpers.server_requests import (
    ask,
    ask_all,
    generate,
    generate_stream,
    metric,
    post,
)
from tests.helpers.waiting import in_pieces, run_async, until
from tests.live.conftest import DEMO
from tests.reliability.processes import named
from trtllm_bls.client import Client
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.triton.request_server import SENDERS

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

QUESTIONS = (
    "What is machine learning?",
    "Tell me a story about a fox",
    "How do I count to nine in Hindi?",
    "Write a Python function that adds two numbers.",
)
SOURCES: tuple[dict[str, Any], ...] = (
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5},
    {"draft_source": "model"},
    {"draft_source": "ngram"},
    {"draft_source": "mixed"},
)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "seed": 11}])
def test_one_prompt_one_text_on_every_path(server: TritonServer, sampling: dict[str, Any]) -> None:
    """Same prompt and seed: BLS streaming or not, ensemble, generate, generate_stream agree."""
    body = {"text_input": QUESTIONS[2], "max_tokens": 60, **sampling}
    text = ask(server.grpc_url, **body).text
    assert len(text) > 20
    assert ask(server.grpc_url, stream=False, **body).text == text
    assert generate(server.http_url, **body)["text_output"] == text
    assert generate(server.http_url, "ensemble", **body)["text_output"] == text
    events = generate_stream(server.http_url, **body)
    assert "".join(event["text_output"] for event in events) == text


def test_few_threads_send_and_engines_are_called_over_grpc(server: TritonServer) -> None:
    """Calls inside Triton would each hold one of the threads until their first response."""
    assert server.process is not None
    assert f"--backend-config=python,thread-pool-size={SENDERS}" in server.process.cmdline()
    (orchestrator,) = [pid for pid, name in named(server).items() if name == "tensorrt_llm_bls"]
    assert psutil.Process(orchestrator).environ()["TRTLLM_BLS_ENGINE_TRANSPORT"] == "grpc"


def test_a_fresh_seed_is_told_and_repeats_the_text(server: TritonServer) -> None:
    """Sampling without a seed gets one, which gives the same text again."""
    body = {"text_input": QUESTIONS[1], "max_tokens": 40, "temperature": 1.0, "top_k": 50}
    first = generate(server.http_url, **body)
    again = generate(server.http_url, seed=first["seed"], **body)
    assert again["text_output"] == first["text_output"]
    seeds = {generate(server.http_url, **body)["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_prompt_longer_than_the_model_names_the_field(server: TritonServer) -> None:
    """One clear line, and the server goes on."""
    status, text = post(
        server.http_url, "tensorrt_llm_bls", "generate", text_input="word " * 9000, max_tokens=5
    )
    assert status == 400
    error = json.loads(text)["error"]
    assert error.startswith("INVALID_ARG: text_input: ")
    assert "tokens" in error
    answer = generate(server.http_url, text_input="What is 3 * 4?", max_tokens=40)
    assert "12" in answer["text_output"]


def test_chat_is_rendered_by_the_models_own_template(server: TritonServer) -> None:
    """Messages instead of text; a conversation that is none names the field."""
    messages = json.dumps([{"role": "user", "content": "What is 12 * 9?"}])
    answer = generate(server.http_url, messages=messages, max_tokens=60)
    assert "108" in answer["text_output"]
    for bad in ("{}", "[1]", '[{"role": "user"}]'):
        assert "messages: " in generate(server.http_url, messages=bad, max_tokens=5)["error"]


PLAIN_REQUESTS: tuple[dict[str, Any], ...] = (
    {"text_input": QUESTIONS[1], "max_tokens": 40},
    {"text_input": QUESTIONS[1], "max_tokens": 40, "stop_words": ["a ", "fox named"]},
    {"text_input": QUESTIONS[2], "max_tokens": 60},
    {"text_input": QUESTIONS[3], "max_tokens": 7},
)


@pytest.fixture(scope="module")
def plain_answers(server: TritonServer) -> list[dict[str, Any]]:
    return [
        generate(server.http_url, return_num_output_tokens=True, **body) for body in PLAIN_REQUESTS
    ]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_speculation_changes_nothing_but_speed(
    server: TritonServer, plain_answers: list[dict[str, Any]], source: dict[str, Any]
) -> None:
    """Greedy text with drafts is the text without, streamed or whole, with its stop strings."""
    told = ("text_output", "finish_reason", "stop_reason", "num_output_tokens")
    for body, plain in zip(PLAIN_REQUESTS, plain_answers, strict=True):
        drafted = generate(server.http_url, return_num_output_tokens=True, **body, **source)
        assert [drafted.get(key) for key in told] == [plain.get(key) for key in told]
        assert drafted["total_accepted_draft_tokens"] <= drafted["total_draft_tokens"]
    assert ask(server.grpc_url, **body, **source).text == plain["text_output"]


def test_drafts_of_the_shipped_pair_are_accepted(server: TritonServer) -> None:
    """On easy text most drafted tokens are accepted, and the counters on /metrics say so."""
    counter = "trtllm_bls_speculation_accepted_total"
    seen: list[float] = []

    def steady() -> bool:
        """Other tests' requests are counted: nothing has moved for twice as long as that takes."""
        seen.append(metric(server.metrics_url, counter))
        return len(seen) > 60 and len(set(seen[-60:])) == 1

    def drafted() -> dict[str, Any]:
        """On a busy machine drafts may come too late to be verified."""
        until(steady)
        body = {"text_input": QUESTIONS[1], "max_tokens": 80, "num_draft_tokens": 4}
        found = generate(server.http_url, **body)
        return found if found["total_draft_tokens"] else {}

    answer = until(drafted)
    before = seen[-1]
    assert answer["acceptance_rate"] > 0.5
    assert answer["num_draft_rounds"] < 60
    expected = before + answer["total_accepted_draft_tokens"]
    # Counted when the request has ended, which is just after its last response.
    until(lambda: metric(server.metrics_url, counter) >= expected)
    assert metric(server.metrics_url, counter) == expected


def test_what_speculation_cannot_keep_is_refused_by_name(server: TritonServer) -> None:
    """A field whose meaning would change at a round's border is never silently bent."""
    body = {"text_input": "a", "max_tokens": 5, "num_draft_tokens": 3}
    decaying = generate(server.http_url, runtime_top_p_decay=0.9, **body)
    assert "runtime_top_p_decay" in decaying["error"]


def test_32_speculative_streams_with_cancels_finish_right(server: TritonServer) -> None:
    """Callers that leave at any point of a round disturb nobody, and nothing keeps running."""
    chance = random.Random(3)
    plain = [ask(server.grpc_url, text_input=q, max_tokens=30).text for q in QUESTIONS]

    async def one(client: Client, number: int) -> tuple[int, str] | None:
        stream = client.stream(
            text_input=QUESTIONS[number % 4], max_tokens=30, num_draft_tokens=1 + number % 5
        )
        leaves_after = chance.randint(0, 6) if number % 3 == 0 else None
        text = ""
        async with stream:
            if leaves_after == 0:
                return None
            async for count, event in _numbered(stream):
                text += event.text
                if count == leaves_after:
                    return None
        return number % 4, text

    async def run() -> list[tuple[int, str] | None]:
        async with Client(server.grpc_url) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    results = [result for result in run_async(run()) if result is not None]
    assert len(results) >= 21
    assert all(text == plain[question] for question, text in results)


async def _numbered(stream: Any) -> Any:
    count = 0
    async for event in stream:
        count += 1
        yield count, event


def test_scores_come_aligned_and_only_when_asked_for(server: TritonServer) -> None:
    """One log-prob per token whose text has left; the cumulative one is their sum."""
    body = {"text_input": QUESTIONS[0], "max_tokens": 20}
    events = ask(server.grpc_url, return_log_probs=True, **body).events
    log_probs = events[-1].outputs["output_log_probs"].reshape(-1)
    assert len(log_probs) == 20
    assert abs(float(events[-1].outputs["cum_log_probs"].reshape(-1)[0]) - log_probs.sum()) < 1e-3
    drafted = ask(server.grpc_url, return_log_probs=True, num_draft_tokens=4, **body).events[-1]
    assert abs(drafted.outputs["output_log_probs"].reshape(-1) - log_probs).max() < 1e-3
    silent = ask(server.grpc_url, **body).events
    assert not any("log_probs" in name for event in silent for name in event.outputs)


def test_figures_asked_for_are_on_every_response_of_a_stream(server: TritonServer) -> None:
    """Clients of TensorRT-LLM's models read them from each response that they get."""
    asked: dict[str, Any] = {"return_perf_metrics": True, "return_context_logits": True}
    asked |= {"text_input": QUESTIONS[0], "max_tokens": 20, "stream": True}
    for event in in_pieces(lambda: ask(server.grpc_url, **asked).events, 3):
        figures = {"context_logits", "first_token_time_ns", "kv_cache_alloc_total_blocks"}
        assert figures <= event.outputs.keys()


def test_unsupported_options_are_refused_not_ignored(server: TritonServer) -> None:
    """LoRA, beams and unknown guides are not to be had here, and say so by name."""
    body = {"text_input": "a", "max_tokens": 5}
    for field, value in (
        ("guided_decoding_guide_type", "xml"),
        ("lora_task_id", 3),
        ("beam_width", 2),
    ):
        assert field in generate(server.http_url, **body, **{field: value})["error"]
    with pytest.raises(TrtllmBlsError, match="end_id"):
        ask(server.grpc_url, end_id=10**6, **body)


def test_a_guide_is_enforced_and_a_prediction_is_used(server: TritonServer) -> None:
    """Both reach the engine's process as inputs of `tensorrt_llm_bls`."""
    schema = {"enum": ["Oslo", "Rome"]}
    guide = {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps(schema),
    }
    body = {"text_input": QUESTIONS[0], "max_tokens": 40}
    assert json.loads(ask(server.grpc_url, **body, **guide).text) in schema["enum"]
    plain = ask(server.grpc_url, **body)

    def accepted() -> int:
        # So many tokens a round: where the length is left open, times decide whether to draft.
        more = {"prediction": plain.text, "num_draft_tokens": 5, "draft_source": "ngram"}
        predicted = ask(server.grpc_url, **body, **more)
        assert predicted.text == plain.text
        return int(predicted.events[-1].outputs["total_accepted_draft_tokens"].item())

    # A busy machine may read many plain tokens at once, and then few are left to draft.
    until(lambda: accepted() > 10)


def test_demo_prompts_are_answered(server: TritonServer) -> None:
    """The prompts that `make demo` shows end by themselves, with text in every one."""
    prompts = json.loads((DEMO / "prompts.json").read_text())["demo"]
    requests = [{"text_input": prompt, "max_tokens": 400} for prompt in prompts]
    for result in ask_all(server.grpc_url, requests):
        assert result.finish_reason == "end_id"
        assert len(result.text.strip()) > 10
    until(lambda: metric(server.metrics_url, "nv_inference_pending_request_count") == 0)
