"""Text through the real server, over every path a user takes; the engine says the prompt back."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.helpers.server_requests import (
    ask,
    ask_all,
    break_off,
    generate,
    generate_stream,
    metric,
    post,
)
from tests.helpers.waiting import in_pieces, run_async, until
from trtllm_bls.client import Client, Event
from trtllm_bls.client.client import infer_request
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.wire.contract import BLS

WORLD = "Héllo 世界, नमस्ते दुनिया! 👩‍👩‍👧‍👦🇩🇪 العربية\n\tdef f(x):\n        return x  # ok"
ERROR_AFTER_3 = 666001
SILENT_AFTER_3 = 666002
ERROR_AT_ONCE = 666003


def prompts(count: int) -> list[str]:
    chance = random.Random(7)
    words = WORLD.split(" ")
    return [" ".join(chance.choices(words, k=chance.randint(3, 12))) for _ in range(count)]


def test_every_path_gives_the_same_text(echo: TritonServer) -> None:
    """gRPC and HTTP, streaming or not, BLS or ensemble: one text, one reason."""

    def events() -> tuple[Event, ...]:
        streamed = ask(echo.grpc_url, text_input=WORLD, max_tokens=500)
        assert (streamed.text, streamed.finish_reason) == (WORLD, "end_id")
        return streamed.events

    in_pieces(events, 10)
    whole = ask(echo.grpc_url, text_input=WORLD, max_tokens=500, stream=False)
    body = {"text_input": WORLD, "max_tokens": 500}
    once = generate(echo.http_url, **body)
    parts = generate_stream(echo.http_url, **body)
    assert whole.text == once["text_output"] == WORLD
    assert "".join(part["text_output"] for part in parts) == WORLD
    if "ensemble" in echo.models:
        assert generate(echo.http_url, "ensemble", **body)["text_output"] == WORLD
        assert ask(echo.grpc_url, "ensemble", stream=None, **body).text == WORLD
    reasons = {whole.finish_reason, once["finish_reason"], parts[-1]["finish_reason"]}
    assert reasons == {"end_id"}
    assert len(whole.events) == 1


def test_the_last_content_response_is_the_final_one(echo: TritonServer) -> None:
    """Exactly one response is final, it is the last, and it has the ending."""
    for stream in (True, False):
        events = ask(echo.grpc_url, text_input="a b c d", max_tokens=3, stream=stream).events
        assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].finish_reason == "length"
        assert events[-1].texts


def test_128_streams_are_each_exactly_their_own_text(echo: TritonServer) -> None:
    """One BLS process serves 128 streams at once, and mixes nothing up."""
    texts = prompts(128)
    requests = [{"text_input": text, "max_tokens": 400} for text in texts]
    assert [result.text for result in ask_all(echo.grpc_url, requests)] == texts


async def test_no_stream_waits_for_another(echo: TritonServer) -> None:
    """While one stream hangs in its engine, others begin and end."""
    async with Client(echo.grpc_url) as client:
        hanging = client.stream(text_input=WORLD, max_tokens=90, seed=SILENT_AFTER_3)
        async with hanging:
            await anext(aiter(hanging))
            results = await asyncio.gather(
                *(client.generate(text_input=text, max_tokens=400) for text in prompts(40))
            )
    assert [result.text for result in results] == prompts(40)


async def test_64_streams_run_side_by_side(echo: TritonServer) -> None:
    """None ends by itself: each has its first text only if it need not wait for another's end."""
    request = {"text_input": WORLD, "max_tokens": 90, "seed": SILENT_AFTER_3}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(echo.grpc_url))
        streams = [await stack.enter_async_context(client.stream(**request)) for _ in range(64)]
        # After 120 s (``engine_stall_seconds``) the first would be ended, and let another in.
        async with asyncio.timeout(60):
            firsts = await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
    assert all(WORLD.startswith(first.text) and first.text for first in firsts)


def test_integers_that_wrap_in_json_are_refused_where_that_can_be_seen(echo: TritonServer) -> None:
    """Triton cuts them to 32 bits: what becomes 0 or negative is refused by name, the rest is not.

    As docs/security.md says. Over gRPC no integer changes: one of another type is refused.
    """
    for body, says in (
        ({"max_tokens": 2**31}, "max_tokens: -2147483648 is not allowed"),
        ({"max_tokens": 2**32}, "max_tokens: 0 is not allowed"),
        ({"max_tokens": 9, "timeout_ms": 2**31 + 5}, "timeout_ms: -2147483643 is not allowed"),
    ):
        status, answer = post(echo.http_url, "tensorrt_llm_bls", "generate", text_input="a", **body)
        assert (status, says in answer) == (400, True), answer
    asked = {"text_input": WORLD, "stream": False}
    wrapped = generate(echo.http_url, max_tokens=2**32 + 5, **asked)
    five = ask(echo.grpc_url, max_tokens=5, **asked)
    assert (wrapped["text_output"], wrapped["finish_reason"]) == (five.text, five.finish_reason)
    assert five.finish_reason == "length"
    hasty = generate(echo.http_url, max_tokens=500, timeout_ms=2**32 + 1, **asked)
    assert hasty["finish_reason"] == "timeout"

    message = infer_request(BLS, {"text_input": "a", "max_tokens": 5}, "wide")
    message.inputs[1].datatype = "INT64"
    message.raw_input_contents[1] = (2**32 + 5).to_bytes(8, "little")
    with grpc.insecure_channel(echo.grpc_url) as channel:
        stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
        (reply,) = stream(iter([message]), timeout=60)
    assert "'max_tokens' data-type is 'INT64'" in reply.error_message


def test_a_caller_that_leaves_ends_the_engines_work(echo: TritonServer) -> None:
    """Leaving a stream, or breaking an HTTP connection, frees the engine.

    One request left running would alone compute as many tokens as all of these may.
    """
    asked = {"text_input": WORLD * 20, "max_tokens": 40_000, "end_id": -1}

    async def leave() -> None:
        async with Client(echo.grpc_url) as client:
            streams = [client.stream(**asked) for _ in range(8)]
            for stream in streams:
                await anext(aiter(stream))
            await asyncio.gather(*(stream.aclose() for stream in streams))

    until(lambda: metric(echo.metrics_url, "echo_live_requests") == 0)
    for leaves in (lambda: run_async(leave()), lambda: break_off(echo.http_url, **asked)):
        before = metric(echo.metrics_url, "echo_tokens")
        leaves()
        until(lambda: metric(echo.metrics_url, "echo_live_requests") == 0)
        assert metric(echo.metrics_url, "echo_tokens") - before < 40_000


def test_the_trace_of_a_caller_reaches_the_engine(echo: TritonServer) -> None:
    """As a parameter of the engine's request, or as metadata; a request without one has none."""
    traced = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    before = metric(echo.metrics_url, "echo_traced_requests")
    for more in ({}, traced, {}):
        generate(echo.http_url, text_input=WORLD, max_tokens=9, **more)
    assert metric(echo.metrics_url, "echo_traced_requests") - before == 1


def test_a_stop_string_ends_text_and_work(echo: TritonServer) -> None:
    """Nothing of the stop leaves, though it lies across token borders; the engine is cancelled."""
    before = metric(echo.metrics_url, "echo_tokens")
    text = "one two three, stop here" + " and on" * 300
    for stream in (True, False):
        result = ask(
            echo.grpc_url, text_input=text, max_tokens=900, stop_words=["ee, sto"], stream=stream
        )
        assert result.text == "one two thr"
        assert (result.finish_reason, result.events[-1].stop_reason) == ("stop", "ee, sto")
    kept = ask(
        echo.grpc_url, text_input=text, max_tokens=900, stop_words=["ee, sto"], include_stop=True
    )
    assert kept.text == "one two three, sto"
    until(lambda: metric(echo.metrics_url, "echo_live_requests") == 0)
    assert metric(echo.metrics_url, "echo_tokens") - before < 3 * 300


def ends_with_an_error(server: TritonServer, error: str) -> None:
    """A stream shows the text that came before the engine failed, and then this error."""
    events = generate_stream(server.http_url, text_input=WORLD, max_tokens=90, seed=ERROR_AFTER_3)
    assert all("text_output" in event for event in events[:-1])
    assert [event.get("finish_reason") for event in events[-3:]] == [None, "error", None]
    assert events[-1] == {"error": error}


def test_an_error_after_partial_text_is_an_error(echo: TritonServer, transport: str) -> None:
    """The text that came is shown, then an explicit error: never a clean end."""
    ends_with_an_error(echo, "INTERNAL: the script says so")
    # The LLM API tells both with one error: before the first token, the request is at fault.
    kind = InvalidRequest if transport.startswith("llm_api") else EngineError
    with pytest.raises(kind, match="the script says so"):
        ask(echo.grpc_url, text_input=WORLD, max_tokens=90, seed=ERROR_AT_ONCE)
    assert ask(echo.grpc_url, text_input=WORLD, max_tokens=500).text == WORLD


def test_a_request_whose_time_is_up_ends_with_what_there_is(echo: TritonServer) -> None:
    """An answer, not an error, on every path; it may end inside a character."""
    asked = {"text_input": WORLD, "max_tokens": 90, "seed": SILENT_AFTER_3, "timeout_ms": 700}
    with ThreadPoolExecutor() as pool:  # one wait for all paths
        over_http = pool.submit(generate, echo.http_url, **asked)
        as_events = pool.submit(generate_stream, echo.http_url, **asked)
        results = ask_all(echo.grpc_url, [asked | {"stream": stream} for stream in (True, False)])
    for result in results:
        assert result.finish_reason == "timeout"
        assert WORLD.startswith(result.text.rstrip("\ufffd"))
    body = over_http.result()
    assert body["finish_reason"] == "timeout"
    assert WORLD.startswith(body["text_output"].rstrip("\ufffd"))
    assert as_events.result()[-1]["finish_reason"] == "timeout"
    assert ask(echo.grpc_url, text_input=WORLD, max_tokens=500).text == WORLD


def test_rows_of_a_batch_are_each_answered(echo: TritonServer) -> None:
    """Rows end independently and are told by batch_index; only the last response is final."""
    texts = ["short", WORLD, "of middling length, this one"]
    result = ask(
        echo.grpc_url,
        text_input=[[text] for text in texts],
        max_tokens=[[400]] * 3,
        stream=[[True]] * 3,
    )
    assert [result.texts[row, 0] for row in range(3)] == texts
    assert [event.final for event in result.events].count(True) == 1
    assert sum(event.finish_reason is not None for event in result.events) == 3


def test_several_sequences_are_told_apart(echo: TritonServer) -> None:
    """num_return_sequences = 3 gives three endings under three indices."""
    result = ask(echo.grpc_url, text_input=WORLD, max_tokens=400, num_return_sequences=3)
    assert dict(result.texts) == {(0, index): WORLD for index in range(3)}


def test_the_prompt_is_echoed_when_asked_for(echo: TritonServer) -> None:
    """exclude_input_in_output=false puts the prompt in front; a stream never repeats it."""
    for stream in (True, False):
        result = ask(
            echo.grpc_url,
            text_input=WORLD,
            max_tokens=500,
            stream=stream,
            exclude_input_in_output=False,
        )
        assert result.text == (WORLD if stream else WORLD + WORLD)


def test_counts_are_told_when_asked_for(echo: TritonServer) -> None:
    """Token counts come with the last response, and only on request."""
    asked = ask(
        echo.grpc_url,
        text_input="abc def",
        max_tokens=2,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    ).events[-1]
    assert asked.num_output_tokens == 2
    assert (asked.num_input_tokens or 0) > 2
    assert ask(echo.grpc_url, text_input="abc", max_tokens=2).events[-1].num_output_tokens is None


BAD = [
    ({"text_input": "", "max_tokens": 5}, "text_input: is empty"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens: 0"),
    ({"text_input": "a", "max_tokens": -3}, "max_tokens: -3"),
    ({"text_input": "a", "max_tokens": 5, "top_p": 1.5}, "top_p: 1.5"),
    ({"text_input": "a", "max_tokens": 5, "temperature": -1.0}, "temperature: -1"),
    ({"text_input": "a", "max_tokens": 5, "repetition_penalty": 0.0}, "repetition_penalty: 0"),
    ({"text_input": "a", "max_tokens": 5, "beam_width": 4}, "beam_width: 4"),
    ({"text_input": "a", "max_tokens": 5, "seed": 1, "random_seed": 2}, "contradicts"),
    ({"text_input": "a", "max_tokens": 5, "messages": "[]"}, "text_input: send either"),
    ({"messages": "no json", "max_tokens": 5}, "messages: not JSON"),
    ({"text_input": "a", "max_tokens": 5, "draft_source": "oracle"}, "draft_source: 'oracle'"),
    ({"text_input": "a", "max_tokens": 5, "embedding_bias_words": ["x"]}, "embedding_bias_weights"),
]


@pytest.mark.parametrize(("body", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_bad_input_is_one_clear_line(
    echo: TritonServer, body: dict[str, Any], problem: str
) -> None:
    """The field, the value and what is allowed; no traceback; the next request works."""
    status, text = post(echo.http_url, "tensorrt_llm_bls", "generate", **body)
    assert status == 400
    assert problem in text
    assert "Traceback" not in text and ".py" not in text and "\\n" not in text
    with pytest.raises((InvalidRequest, EngineError), match=problem[:11]):
        ask(echo.grpc_url, **body)
    assert generate(echo.http_url, text_input="ok", max_tokens=9)["text_output"] == "ok"


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_missing_input_is_an_error_that_names_it(
    echo: TritonServer, model: str, endpoint: str
) -> None:
    """However many others there are: Triton itself only counts them."""
    if model not in echo.models:
        pytest.skip("no ensemble before a service: the other transports run it")
    for body, problem in (
        ({"text_input": "a"}, "max_tokens: is missing"),
        ({"text_input": "a", "temperature": 0.5, "top_k": 4}, "max_tokens: is missing"),
        ({"messages": "[]"}, "max_tokens: is missing"),
        ({"max_tokens": 5}, "text_input: send either"),
        ({"max_tokens": 5, "stop_words": ["b"]}, "text_input: send either"),
        ({"temperature": 0.5}, ""),
        ({}, ""),
    ):
        status, text = post(echo.http_url, model, endpoint, **body)
        assert status == 400 and "error" in text and problem in text
    assert generate(echo.http_url, model, text_input="ok", max_tokens=9)["text_output"] == "ok"


def test_wrong_type_and_shape_are_refused_by_triton(echo: TritonServer) -> None:
    """A wrong JSON type or an unknown shape never reaches the model; the server goes on."""
    for body in ({"text_input": 5, "max_tokens": 5}, {"text_input": "a", "max_tokens": "five"}):
        status, text = post(echo.http_url, "tensorrt_llm_bls", "generate", **body)
        assert status == 500 and "Unable to parse" in text
    body = {"text_input": ["a", "b"], "max_tokens": 5}
    status, text = post(echo.http_url, "tensorrt_llm_bls", "generate", **body)
    assert status == 400 and "'text_input' batch size does not match" in text
    assert generate(echo.http_url, text_input="ok", max_tokens=9)["text_output"] == "ok"
