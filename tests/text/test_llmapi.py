"""Upstream's llmapi tensors, served by the orchestrator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import PROMPT, saying, tokenizer
from tests.helpers.services_on_fake_backend import Bench, engine_service, text_service
from tests.helpers.waiting import until
from tests.helpers.wire_tensors import LAST_FORM
from trtllm_bls.engines.triton_model import ResponseReader
from trtllm_bls.errors import EngineError
from trtllm_bls.orchestrator.orchestrator import stats_of
from trtllm_bls.orchestrator.reports import SPECULATION, RequestMetrics
from trtllm_bls.triton.tensors import ChunkWriter, as_llmapi_outputs, text_arrays
from trtllm_bls.types import (
    Adapter,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    SpeculationStats,
    TextChunk,
    TextRequest,
    Wants,
)
from trtllm_bls.wire.contract import LLMAPI

OUTPUTS = tuple(LLMAPI.output_named)


def asking(bench: Bench, id: str = "", **inputs: Any) -> Any:
    """A request with every output asked for; a scalar becomes an array without a batch."""
    types = {tensor.name: tensor.numpy_type for tensor in LLMAPI.inputs}
    given = {"text_input": PROMPT.encode(), "sampling_param_max_tokens": 100} | inputs
    given = {name: value for name, value in given.items() if value is not None}
    arrays = {
        name: np.array(value if isinstance(value, list) else [value], types[name])
        for name, value in given.items()
    }
    return bench.triton.ask(arrays, *OUTPUTS, id=id)


def test_outputs_have_the_declared_types_and_are_those_asked_for() -> None:
    """Upstream's model sends texts in their place. What the engine does not tell is absent."""
    with text_service(saying("one two! three"), llmapi=True) as bench:
        plain = bench.accept(asking(bench)).wait()
        flags = ("finish_reason", "stop_reason", "cumulative_logprob")
        more = {f"return_{name}": True for name in flags}
        more |= {"sampling_param_return_perf_metrics": True, "sampling_param_stop": [b"!"]}
        told = bench.accept(asking(bench, **more)).wait()
    assert [set(response) for response in plain.responses] == [{"text_output"}]
    (response,) = told.responses
    assert response["text_output"].tolist() == [f"{PROMPT}one two".encode()]
    assert response["finish_reason"].tolist() == [b"stop"]
    assert response["stop_reason"].tolist() == [b"!"]
    for name, array in response.items():
        assert (array.dtype, array.shape) == (LLMAPI.output_named[name].numpy_type, (1,))
    assert "cumulative_logprob" in response
    assert not {name for name in response if name.startswith("kv_cache_reused")}


# --- a table of upstream's answers --------------------------------------------------------------

# What upstream's model sends, from its public sources: requests as its client programs make them,
# the outputs of the first response and of the last. A stream's responses each hold the text so
# far, whole answers the prompt, and what was asked for is in every response, "None" while unknown.
# Differences on purpose are docs/migrate.md's.
FIRST = tokenizer().decode(tokenizer().encode_word(" one two!")[:1])
ASKED = {"return_finish_reason": True, "return_stop_reason": True}
TABLE: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {"text_output": f"{PROMPT} one two!"}, {}),
    (
        "of the prompt alone",
        {"sampling_param_max_tokens": None},
        {"text_output": f"{PROMPT} one two!"},
        {},
    ),
    (
        "without the prompt",
        {"sampling_param_exclude_input_from_output": True},
        {"text_output": " one two!"},
        {},
    ),
    (
        "reasons",
        ASKED,
        {"text_output": f"{PROMPT} one two!", "finish_reason": "stop", "stop_reason": "None"},
        {},
    ),
    (
        "length",
        {**ASKED, "sampling_param_max_tokens": 1},
        {"text_output": f"{PROMPT}{FIRST}", "finish_reason": "length", "stop_reason": "None"},
        {},
    ),
    (
        "a stop string",
        {**ASKED, "sampling_param_stop": [b"!", b"none"]},
        {"text_output": f"{PROMPT} one two", "finish_reason": "stop", "stop_reason": "!"},
        {},
    ),
    (
        "a stream",
        {**ASKED, "streaming": True},
        {"text_output": FIRST, "finish_reason": "None", "stop_reason": "None"},
        {"text_output": " one two!", "finish_reason": "stop", "stop_reason": "None"},
    ),
    (
        "a stream with one reason",
        {"return_stop_reason": True, "streaming": True, "sampling_param_stop": [b"!"]},
        {"text_output": FIRST, "stop_reason": "None"},
        {"text_output": " one two", "stop_reason": "!"},
    ),
    ("flags that are off", dict.fromkeys(ASKED, False), {"text_output": f"{PROMPT} one two!"}, {}),
]


@pytest.mark.parametrize(("name", "sent", "first", "last"), TABLE, ids=[row[0] for row in TABLE])
def test_answers_are_upstreams(
    name: str, sent: dict[str, Any], first: dict[str, Any], last: dict[str, Any]
) -> None:
    """Tensor by tensor."""
    with text_service(saying(" one two!", step_seconds=0.02), llmapi=True) as bench:
        ask = bench.accept(asking(bench, **sent)).wait()
    found = [
        {tensor: array[0].decode() for tensor, array in response.items()}
        for response in ask.responses
    ]
    assert found[0] == first and found[-1] == (last or first)
    assert (len(found) > 1) == bool(last)


def test_blocks_of_the_kv_cache_are_the_engines_or_absent() -> None:
    """0 would be taken for a cold cache."""
    request = TextRequest(request_id="r", text=PROMPT, max_tokens=1, wants=Wants(perf_metrics=True))
    for told, reused in ((EngineMetrics(kv_cache_reused_blocks=4), [4]), (None, None)):
        arrays = text_arrays(TextChunk("one", metrics=told), request, None, fill=False)
        outputs = as_llmapi_outputs(arrays, {})
        array = outputs.get("kv_cache_reused_block")
        assert (None if array is None else array.tolist()) == reused
        assert not {"kv_cache_hit_rate", "kv_cache_alloc_new_blocks"} & outputs.keys()


def test_what_samples_there_samples_here() -> None:
    """A temperature alone; without any option the likeliest token is taken, 32 times at most."""
    engine = saying("one")
    with text_service(engine, llmapi=True) as bench:
        bench.accept(asking(bench, sampling_param_temperature=0.5)).wait()
        bench.accept(asking(bench, sampling_param_temperature=0.0)).wait()
        ask = bench.triton.ask({"text_input": np.array([PROMPT.encode()], np.object_)}, *OUTPUTS)
        bench.accept(ask).wait()
    asked = [request.sampling.is_greedy for request in engine.requests]
    assert [request.sampling.top_p for request in engine.requests] == [1.0, None, None]
    assert asked == [False, True, True] and engine.requests[-1].max_tokens == 32


def test_adapters_and_processors_go_on() -> None:
    engine = saying("one")
    names = {"lora_name": b"sql", "sampling_param_logits_post_processor_name": b"all"}
    with text_service(engine, llmapi=True) as bench:
        bench.accept(asking(bench, lora_id=7, lora_path=b"/a", **names)).wait()
    (request,) = engine.requests
    assert request.adapter == Adapter(task_id=7, name="sql", path="/a")
    extras = {name: array.tolist() for name, array in request.extras.items()}
    assert extras == {"logits_post_processor_name": [b"all"]}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_answers_both(streaming: bool) -> None:
    """Upstream's leaves a stopped request that does not stream without an answer."""
    engine = saying(" ".join("abcdefgh" * 9), step_seconds=0.02)
    with text_service(engine, llmapi=True) as bench:
        first = bench.accept(asking(bench, "one", streaming=streaming))
        second = bench.accept(asking(bench, "one", streaming=streaming))
        other = bench.accept(asking(bench, "other"))
        until(lambda: engine.live == 3)
        stop = bench.accept(asking(bench, "one", stop=True)).wait()
        codes = [ask.wait().error.code() for ask in (first, second)]
        assert [*codes, stop.error.code()] == ["CANCELLED"] * 3
        assert other.wait().error is None
        nobody = bench.accept(asking(bench, stop=True)).wait()
        assert "request id" in nobody.error.message()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"sampling_param_best_of": 2}, "sampling_param_best_of"),
        ({"text_input": [[b"a"]]}, "text_input"),
        ({"sampling_param_top_p": 7.0}, "top_p"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with text_service(saying("one"), llmapi=True) as bench:
        ask = bench.accept(asking(bench, **wrong)).wait()
    assert f": {field}: " in ask.error.message()


# --- the model of token ids behind it ---------------------------------------------------------


def test_a_trace_context_reaches_the_engine() -> None:
    """A text that is none does not."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with engine_service(3, 4) as bench:
        for sent in (trace, "none"):
            ask = bench.tokens()
            ask.sent_parameters = {"traceparent": sent}
            bench.accept(ask).wait()
        told = [request.traceparent for request in bench.engine.requests]
    assert told == [trace, None]


@pytest.mark.parametrize("engine", ["llm_api", "embedded"])
def test_what_an_engine_drafts_by_itself_is_told_once(engine: str) -> None:
    """On the last response, from an engine that may; the client asks for it without being asked."""
    model = replace(LAST_FORM, parameters={"engine": engine})
    request = EngineRequest(request_id="r", input_ids=(1,), max_tokens=2)
    asked = {"total_draft_tokens", "total_accepted_draft_tokens"} & set(model.outputs_for(request))
    assert bool(asked) == (engine == "llm_api")
    done = SpeculationStats(drafted=8, accepted=5)
    chunks = [EngineChunk((3,)), EngineChunk((4,), final=True, speculation=done)]
    writer = ChunkWriter(request, True, None)
    reader = ResponseReader(request, model)
    read = [next(reader.chunks(writer.arrays(chunk), chunk.final)) for chunk in chunks]
    assert [chunk.speculation for chunk in read] == [None, done if asked else None]


def test_what_an_engine_drafts_by_itself_is_counted() -> None:
    """A request without rounds of ours has no router that counts them."""
    metrics = RequestMetrics()
    stats = stats_of("r", EngineError("x"))
    metrics.add(replace(stats, speculation=SpeculationStats(drafted=8, accepted=5)))
    metrics.add(replace(stats, speculation=SpeculationStats(drafted=8, accepted=5, rounds=2)))
    assert metrics.numbers[SPECULATION["drafted"], ()] == 8
    assert metrics.numbers[SPECULATION["accepted"], ()] == 5
