"""Tokens behind a request server: stops, rows, sequences, one FINAL on every path."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests.helpers.fake_metrics import Registry
from tests.helpers.request_servers import Gate
from tests.helpers.services_on_fake_backend import END, SILENT, TRUE, engine_service, ids, serving
from tests.helpers.waiting import until
from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.errors import EngineError
from trtllm_bls.orchestrator.status import ENGINE_REQUESTS, ENGINE_STEPS
from trtllm_bls.pipeline.testing import SECONDS
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.triton.engine_service import EngineService, EngineSteps
from trtllm_bls.types import EngineRequest


def test_tokens_stream_and_the_end_may_bring_none() -> None:
    """The final flag is on the last data response, there is no other after it."""
    with engine_service(3, 4) as bench:
        ask = bench.accept(bench.tokens(streaming=TRUE)).wait()
        assert ids(ask) == [[3], [4], []]


class EagerEngine(ScriptedEngine):
    """An engine that goes on whether its chunks are read or not, as real ones do."""

    def generate(self, request: EngineRequest) -> ChunkStream:
        scripted = super().generate(request)

        async def fill(chunks: QueuedChunks) -> None:
            async for chunk in scripted:
                chunks.put([chunk])

        return TaskChunks(fill)


def test_tokens_that_arrive_during_a_send_leave_together() -> None:
    """An engine that is faster than Triton's sends has no queue of single tokens behind it."""
    engine = EagerEngine(reciting((3, 4, 5, 6), 2, END), Script(vocab_size=50))
    gate = Gate()
    with serving(engine, EngineService(engine, exclude_input=True).handle) as bench:
        ask = bench.tokens(streaming=TRUE)
        ask.on_send = gate
        bench.accept(ask)
        assert gate.begun.wait(SECONDS)
        until(lambda: not engine.live)
        gate.open.set()
        assert ids(ask.wait()) == [[3], [4, 5, 6]]


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_the_prompt_is_in_the_whole_answer_unless_excluded(
    default: bool, asked: bool | None
) -> None:
    """The request's word goes before the model's; a stream never has it."""
    more = {} if asked is None else {"exclude_input_in_output": np.array([asked])}
    with engine_service(3, 4, exclude=default) as bench:
        whole = bench.accept(bench.tokens(**more)).wait()
        streamed = bench.accept(bench.tokens(**more, streaming=TRUE)).wait()
    excluded = default if asked is None else asked
    assert ids(whole) == [[3, 4] if excluded else [7, 8, 3, 4]]
    assert ids(streamed) == [[3], [4], []]


@pytest.mark.parametrize("exposed", [True, False])
def test_what_was_cached_is_on_the_first_response_where_it_is_exposed(exposed: bool) -> None:
    names = ("output_ids", "sequence_length", "cached_tokens", "kv_cache_alloc_new_blocks")
    with engine_service(3, 4, exposed=exposed, cached_tokens=1) as bench:
        measured = bench.accept(bench.tokens(outputs=names, return_perf_metrics=TRUE)).wait()
        streamed = bench.accept(bench.tokens(outputs=names, streaming=TRUE)).wait()
        whole = bench.accept(bench.tokens(outputs=names)).wait()
    told = [
        [response.get("cached_tokens") for response in ask.responses] for ask in (streamed, whole)
    ]
    assert told == ([[[[1]], None, None], [[[1]]]] if exposed else [[None] * 3, [None]])
    assert measured.said("kv_cache_alloc_new_blocks") == [[int(exposed)]]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_request_ends_with_what_there_is(streaming: bool) -> None:
    """The stopped request ends normally, without error; the stop itself says nothing."""
    with engine_service(3, 4, 5, 6) as bench:
        bench.engine.fault = SILENT
        extra = {"streaming": np.array([streaming])}
        ask = bench.accept(bench.tokens("mine", **extra))
        other = bench.accept(bench.tokens("other", **extra))
        watched = bench.accept(bench.tokens("watched", streaming=TRUE))
        watched.wait(responses=2)  # so the earlier ones have their two tokens, too
        stop = bench.accept(bench.tokens("mine", stop=TRUE))
        assert (stop.wait().responses, stop.error) == ([], None)
        assert ask.wait().error is None
        assert ids(ask) == ([[3], [4], []] if streaming else [[3, 4]])
        assert ids(other) == ([[3], [4]] if streaming else [])
        assert len(bench.engine.cancelled) == 1


def test_a_stop_right_behind_its_request_is_heard() -> None:
    """Even before the engine has been asked; the answer is then an empty one."""
    with engine_service(3, 4) as bench:
        bench.engine.fault = Fault()
        ask, stop = bench.tokens("mine", streaming=TRUE), bench.tokens("mine", stop=TRUE)
        bench.accept(ask, stop)
        assert ids(ask.wait()) == [[]] and ask.error is None
        assert stop.wait().error is None


def test_a_bias_is_measured_against_the_engines_own_vocabulary() -> None:
    """One value too many is the caller's mistake, and said before anything runs."""
    with engine_service(3, 4) as bench:
        size = bench.engine.script.vocab_size
        long = np.zeros((1, size + 1), np.float32)
        ask = bench.accept(bench.tokens(embedding_bias=long)).wait()
        problem = f"INVALID_ARG: embedding_bias: holds {size + 1} values; the vocabulary has {size}"
        assert ask.error is not None and ask.error.message().startswith(problem)
        fitting = bench.accept(bench.tokens(embedding_bias=long[:, 1:])).wait()
        assert ids(fitting) == [[3, 4]]


def test_stopping_what_does_not_run_is_no_error_but_needs_an_id() -> None:
    """It may just have ended; without an id nobody knows what is meant."""
    with engine_service(3) as bench:
        bench.accept(bench.tokens("mine")).wait()
        unknown = bench.accept(bench.tokens("mine", stop=TRUE)).wait()
        assert (unknown.responses, unknown.error) == ([], None)
        nameless = bench.accept(bench.tokens("", stop=TRUE)).wait()
        assert nameless.error is not None and "stop" in nameless.error.message()


def test_of_two_requests_of_one_id_the_newest_is_stopped() -> None:
    """As upstream does; the older one runs on."""
    with engine_service(3, 4) as bench:
        bench.engine.fault = SILENT
        asks = [bench.tokens("mine", streaming=TRUE) for _ in range(2)]
        bench.accept(*asks)
        for ask in asks:
            ask.wait(responses=2)
        bench.accept(bench.tokens("mine", stop=TRUE)).wait()
        asks[1].wait()
        assert len(bench.engine.cancelled) == 1 and bench.engine.live == 1


def test_two_stops_at_once_stop_two_requests_of_one_id() -> None:
    """The second one is not for the request that the first one has just stopped."""
    with engine_service(3, 4) as bench:
        bench.engine.fault = SILENT
        asks = [bench.tokens("mine", streaming=TRUE) for _ in range(2)]
        bench.accept(*asks)
        for ask in asks:
            ask.wait(responses=2)
        bench.accept(*(bench.tokens("mine", stop=TRUE) for _ in range(2)))
        for ask in asks:
            assert ids(ask.wait()) == [[3], [4], []] and ask.error is None
        assert len(bench.engine.cancelled) == 2


def rows(**more: Any) -> dict[str, Any]:
    return {
        "input_ids": np.array([[7, 8, 0], [9, 8, 0]], np.int32),
        "input_lengths": np.array([2, 2], np.int32),
        "request_output_len": np.array([10, 10], np.int32),
        "end_id": np.array([END, END], np.int32),
        **more,
    }


def test_rows_are_answered_side_by_side() -> None:
    """Each response says its row; the last row's end ends the request; engine ids differ."""
    names = ("output_ids", "sequence_length", "batch_index")
    rule = reciting((3, 4, 5), 2, END)
    engine = ScriptedEngine(lambda c: rule(c) + c[0] // 9, Script(vocab_size=50))
    with serving(engine, EngineService(engine, True).handle) as bench:
        ask = bench.accept(bench.tokens(outputs=names, **rows(streaming=np.array([True] * 2))))
        found = list(zip([i[0] for i in ask.wait().said("batch_index")], ids(ask), strict=True))
        assert [tokens for row, tokens in found if row == 0] == [[3], [4], [5], []]
        assert [tokens for row, tokens in found if row == 1] == [[4], [5], [6]] + [[1]] * 7
        assert len({request.request_id for request in engine.requests}) == 2


@pytest.mark.parametrize("streaming", [True, False])
def test_one_failing_row_ends_the_others(streaming: bool) -> None:
    """One error for the whole request, after which no row runs on."""
    with engine_service(*[3] * 10) as bench:
        engine = bench.engine
        engine.script = Script(vocab_size=50)
        engine.fault = Fault(error=EngineError("row two"), after_requests=1, after_tokens=2)
        forever = np.array([2**31 - 1] * 2, np.int32)
        inputs = rows(request_output_len=forever, end_id=np.array([-1, -1], np.int32))
        ask = bench.accept(bench.tokens(**inputs, streaming=np.array([streaming] * 2))).wait()
        assert ask.error is not None and ask.error.message() == "INTERNAL: row two"
        assert engine.live == 0


def test_rows_and_sequences_multiply() -> None:
    """Two rows of three sequences have six ends, and then comes FINAL."""
    names = ("output_ids", "sequence_length", "batch_index", "sequence_index")
    with engine_service(3) as bench:
        count = np.array([3, 3], np.int32)
        ask = bench.accept(bench.tokens(outputs=names, **rows(num_return_sequences=count))).wait()
    pairs = zip(ask.said("batch_index"), ask.said("sequence_index"), strict=True)
    assert sorted((row[0], index[0]) for row, index in pairs) == [
        (row, index) for row in range(2) for index in range(3)
    ]


def test_two_hundred_token_requests_at_once_with_stops_and_leaving() -> None:
    """A stop, a caller leaving and the end may meet in any order."""
    chance = random.Random(6)
    with engine_service(*range(3, 20)) as bench:
        bench.engine.fault = Fault(after_requests=100, after_tokens=3)
        asks, stops = [], []
        for number in range(200):
            asks.append(bench.tokens(f"r{number}", streaming=np.array([chance.random() < 0.7])))
            bench.accept(asks[-1])
            stops.append(bench.tokens(f"r{chance.randrange(number + 1)}", stop=TRUE))
            bench.accept(stops[-1])
            if chance.random() < 0.3:
                chance.choice(asks).leave()
        for number in range(100, 200):
            bench.accept(bench.tokens(f"r{number}", stop=TRUE))
        for ask in asks + stops:
            assert ask.wait().error is None
        assert [ask for ask in asks if not ask.gone and not ids(ask)] == []


def test_logits_of_all_rows_are_counted_before_any_is_computed() -> None:
    """One row's would be allowed; both are too many."""
    limits = RequestLimits(max_logits_bytes=15 * 50 * 4)
    engine = ScriptedEngine(reciting((1, 2), 2, END), Script(vocab_size=50))
    with serving(engine, EngineService(engine, True, limits).handle) as bench:
        wanted = {"return_generation_logits": np.array([True])}
        assert bench.accept(bench.tokens(**wanted)).wait().error is None
        both = {
            "input_ids": np.array([[7, 8]] * 2, np.int32),
            "input_lengths": np.array([2, 2], np.int32),
            "request_output_len": np.array([10, 10], np.int32),
            "end_id": np.array([END, END], np.int32),
            "return_generation_logits": np.array([True, True]),
        }
        error = bench.accept(bench.tokens(**both)).wait().error
    assert error is not None
    assert "4000 bytes of logits; at most 3000 are allowed" in error.message()


def test_requests_without_a_token_wait() -> None:
    """Also those whose answer comes in one piece."""
    engine = ScriptedEngine(reciting((3, 4, 5, 6), 2, END), Script(vocab_size=50))
    service = EngineService(engine, exclude_input=True)

    def requests() -> dict[str, int]:
        return {key: value for key, value in service.figures().items() if "iter" not in key}

    with serving(engine, service.handle) as bench:
        engine.fault = SILENT
        assert requests() == {"scheduled": 0, "waiting": 0}
        ask = bench.accept(bench.tokens("mine"))
        watched = bench.accept(bench.tokens("watched", streaming=TRUE))
        watched.wait(responses=2)
        assert requests() == {"scheduled": 2, "waiting": 0}
        engine.fault = replace(SILENT, after_tokens=0)
        waits = bench.accept(bench.tokens("waits"))
        until(lambda: requests() == {"scheduled": 2, "waiting": 1})
        for id in ("mine", "watched", "waits"):
            bench.accept(bench.tokens(id, stop=TRUE)).wait()
        for each in (ask, watched, waits):
            each.wait()
        until(lambda: requests() == {"scheduled": 0, "waiting": 0})


def test_steps_and_requests_are_told_as_the_cpp_backend_tells_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each process adds what is new, since Triton adds up the series of several."""
    monkeypatch.setattr("trtllm_bls.triton.engine_service.EVERY_SECONDS", 0.01)
    registry, figures = Registry(), {"iteration_counter": 0, "scheduled": 0, "waiting": 0}
    of = {"model": "m", "version": "1"}

    def told() -> list[int]:
        steps = registry.of(ENGINE_STEPS, general_type="iteration_counter", **of)
        kinds = ("scheduled", "waiting")
        return [steps, *(registry.of(ENGINE_REQUESTS, request_type=kind, **of) for kind in kinds)]

    steps = EngineSteps(registry, {"model_name": "m", "model_version": "1"}, lambda: figures)
    assert told() == [0, 0, 0]
    for counter, scheduled in ((5, 2), (9, 1)):
        figures.update(iteration_counter=counter, scheduled=scheduled)
        until(lambda: told() == [*figures.values()])
    steps.close()
    assert set(registry.kinds.values()) == {"gauge"}
