"""What a request may cost is checked before any work is done for it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import Collected, asking, saying, tokenizer
from tests.helpers.virtual_time import Clock, run_by_the_clock, settle
from tests.helpers.waiting import run_async
from trtllm_bls.errors import InvalidRequest, Overloaded
from trtllm_bls.orchestrator.orchestrator import Admission, Defaults, Orchestrator
from trtllm_bls.settings.parameters import BlsParameters
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.text.prompts import MAX_PREDICTION_CHARS
from trtllm_bls.triton.tensors import read_rows
from trtllm_bls.types import (
    EngineCapacity,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    Guide,
    Sampling,
    TextRequest,
    Wants,
)
from trtllm_bls.wire.contract import BLS, ENGINE, POSTPROCESSING

SMALL = RequestLimits(max_prompt_bytes=10, max_request_bytes=100)


class Untouched(bytes):
    """Text that must not be decoded."""

    def decode(self, *_: Any, **__: Any) -> str:
        raise AssertionError("decoded before its size was checked")


def strings(*rows: list[bytes]) -> Any:
    array = np.empty((len(rows), len(rows[0])), dtype=np.object_)
    for row, items in enumerate(rows):
        array[row] = items
    return array


@pytest.mark.parametrize(
    ("model", "arrays", "says"),
    [
        (
            BLS,
            {"text_input": strings([Untouched(11)])},
            "text_input: 11 bytes; at most 10 are allowed (parameter max_prompt_bytes)",
        ),
        (
            BLS,
            {"messages": strings([b"short"], [Untouched(11)])},
            "messages: 11 bytes; at most 10 are allowed (parameter max_prompt_bytes)",
        ),
        (
            BLS,
            {"text_input": strings(*([Untouched(10)] for _ in range(11)))},
            "inputs: 110 bytes; at most 100 are allowed (parameter max_request_bytes)",
        ),
        (
            ENGINE,
            {"input_ids": np.zeros((1, 26), np.int32)},
            "inputs: 104 bytes; at most 100 are allowed (parameter max_request_bytes)",
        ),
        (
            POSTPROCESSING,
            {"TOKENS_BATCH": np.zeros((1, 1, 26), np.int32)},
            "inputs: 104 bytes; at most 100 are allowed (parameter max_request_bytes)",
        ),
        (
            BLS,
            {"stop_words": strings([Untouched(1)] * 1025)},
            "stop_words: 1025 strings; at most 1024 are allowed",
        ),
        (
            BLS,
            {"bad_words": strings([Untouched(1025)])},
            "bad_words: one of 1025 bytes; at most 1024 are allowed",
        ),
    ],
)
def test_sizes_are_refused_before_anything_is_decoded(model: Any, arrays: Any, says: str) -> None:
    """The refusal names the field, its size, the limit and the parameter that sets it."""
    if says.startswith("stop_words"):
        arrays = {"stop_words": arrays["stop_words"].reshape(1, -1)}
    with pytest.raises(InvalidRequest) as raised:
        read_rows(model, arrays, SMALL)
    assert str(raised.value) == says


def run(request: TextRequest, **more: Any) -> None:
    engine = saying("one two three")
    orchestrator = Orchestrator(tokenizer(), engine, Defaults(**more))
    try:
        run_async(orchestrator.run(request, Collected()))
    finally:
        assert not engine.requests, "the engine was asked"


def test_more_tokens_than_the_operator_allows_are_refused() -> None:
    """Before the engine hears of them."""
    limits = RequestLimits(max_output_tokens=99)
    with pytest.raises(InvalidRequest, match=r"^max_tokens: 100 tokens; at most 99 .*max_output"):
        run(asking(), limits=limits)


def test_a_longer_time_than_the_operator_allows_is_refused() -> None:
    """A caller cannot hold a place for a week."""
    limits = RequestLimits(max_timeout_seconds=60)
    with pytest.raises(InvalidRequest, match=r"^timeout_ms: 61 s; at most 60 .*max_timeout"):
        run(asking(timeout_s=61), limits=limits)
    limits.check("max_timeout_seconds", "timeout_ms", 60, "s")


def test_logits_are_counted_before_they_are_computed() -> None:
    """Those of every new token, four bytes each."""
    size = 5 * tokenizer().vocab_size * 4
    ask = asking(wants=Wants(generation_logits=True), max_tokens=5)
    with pytest.raises(
        InvalidRequest, match=rf"return_.*: {size} bytes .* 1000 .*max_logits_bytes\)"
    ):
        run(ask, limits=RequestLimits(max_logits_bytes=1000))
    RequestLimits(max_logits_bytes=size).check_logits(5, tokenizer().vocab_size)
    RequestLimits(max_logits_bytes=1000).check_logits(5, None)  # an engine that does not tell


@pytest.mark.parametrize(
    ("guide", "problem"),
    [
        ("a" * 101, "101 bytes; at most 100 .*max_guide_bytes"),
        ("[" * 6 + "]" * 6, "6 levels; at most 5 .*max_guide_depth"),
        ("1,2,3,4,5,6,7,8,9,10,11,12", "11 nodes; at most 10 .*max_guide_nodes"),
    ],
)
def test_a_guide_that_is_costly_to_compile_is_refused(guide: str, problem: str) -> None:
    """Whatever the engine: one behind Triton has no limits of its own."""
    limits = RequestLimits(max_guide_bytes=100, max_guide_depth=5, max_guide_nodes=10)
    with pytest.raises(InvalidRequest, match=f"^guided_decoding_guide: {problem}"):
        run(asking(guide=Guide("json_schema", guide)), limits=limits)
    for taken in ('["[[[[[[,,,,,,,,,,,"]', "[]" * 5):  # depth is of what is open
        limits.check_guide(Guide("json_schema", taken))
    flat = RequestLimits(max_guide_bytes=1000, max_guide_depth=1, max_guide_nodes=1000)
    flat.check_guide(Guide("json_schema", "[],{},()," * 30))


def test_a_prediction_has_a_limit() -> None:
    """Before it is tokenised."""
    too_long = "a" * (MAX_PREDICTION_CHARS + 1)
    with pytest.raises(InvalidRequest, match=rf"^prediction: .* at most {MAX_PREDICTION_CHARS} "):
        run(asking(prediction=too_long))


def test_who_sets_no_limits_has_those_of_the_parameters() -> None:
    """The engine's own service and a process without a configuration."""
    limits = RequestLimits()
    for key in ("max_request_bytes", "max_prompt_bytes", "max_logits_bytes", "max_guide_bytes"):
        assert getattr(limits, key) == getattr(BlsParameters, key)


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({}, 0),
        ({"wants": Wants(generation_logits=True)}, 2 * 10),
        ({"wants": Wants(context_logits=True), "streaming": False}, 2 * 3),
        ({"wants": Wants(context_logits=True)}, 2 * 3 * 10),
        ({"wants": Wants(generation_logits=True), "max_tokens": 1000}, 2 * 97),
        ({"wants": Wants(generation_logits=True), "input_ids": (1,) * 101}, 0),
    ],
)
def test_a_stream_repeats_the_logits_of_its_prompt(more: Any, rows: int) -> None:
    """No more tokens than the model's longest sequence has room for are counted."""
    request = EngineRequest(
        **{
            "request_id": "r",
            "input_ids": (1, 2, 3),
            "max_tokens": 10,
            "num_return_sequences": 2,
            **more,
        }
    )
    assert request.logit_rows(EngineCapacity(max_sequence_tokens=100)) == rows


def test_reused_blocks_are_not_told() -> None:
    """New blocks would tell the same; how many there are in all depends on the caller alone."""
    metrics = EngineMetrics(
        kv_cache_alloc_new_blocks=1, kv_cache_reused_blocks=2, kv_cache_alloc_total_blocks=3
    )
    assert metrics.without_reuse() == EngineMetrics(kv_cache_alloc_total_blocks=3)


@pytest.mark.parametrize("exposed", [False, True])
def test_an_operator_may_have_reused_blocks_told(exposed: bool) -> None:
    """``expose_kv_cache_metrics``; not as shipped."""
    sink = Collected()
    engine = saying("one two three", cached_tokens=2)
    defaults = Defaults(expose_kv_cache_metrics=exposed)
    request = asking(stream=True, wants=Wants(perf_metrics=True))
    run_async(Orchestrator(tokenizer(), engine, defaults).run(request, sink))
    told = sink.chunks[-1].metrics
    assert told is not None
    assert (told.kv_cache_reused_blocks is not None) == exposed
    assert told.kv_cache_alloc_total_blocks is not None
    ending = sink.chunks[-1].ending
    assert ending is not None and ending.cached_tokens == (2 if exposed else None)


def test_the_time_in_the_queue_is_part_of_the_requests_own() -> None:
    """A request whose time is up while it waits ends as one whose time is up, and leaves."""

    async def scenario(clock: Clock) -> None:
        engine = saying("one two three")
        admission = Admission(1, 1, None)
        orchestrator = Orchestrator(tokenizer(), engine, Defaults(), admission=admission)
        sink = Collected()
        async with admission.acquire(1):
            waiting = asyncio.create_task(orchestrator.run(asking(timeout_s=3), sink))
            await settle()
            with pytest.raises(Overloaded):
                await orchestrator.run(asking(), Collected())
            clock.now = 4
            await waiting
            assert (admission.running, admission.queued) == (1, 0)
        assert not engine.requests
        (chunk,) = sink.chunks
        assert chunk.ending is not None
        assert chunk.ending.finish_reason is FinishReason.TIMEOUT

    run_by_the_clock(scenario)


async def test_a_refused_request_takes_no_place() -> None:
    """What can be refused by looking at it is refused before it waits."""
    admission = Admission(1, 0, None)
    orchestrator = Orchestrator(tokenizer(), saying("one"), Defaults(), admission=admission)

    async with admission.acquire(1):
        with pytest.raises(InvalidRequest, match="beam_width"):
            await orchestrator.run(asking(sampling=Sampling(beam_width=2)), Collected())
