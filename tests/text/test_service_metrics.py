"""A scripted load through the service, counted exactly, whatever the ends of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from doubles.scripted import Fault, ScriptedEngine
from tests.helpers.fake_metrics import Registry
from tests.helpers.scripted_text import saying, tokenizer
from tests.helpers.services_on_fake_backend import STREAM, Bench, serving
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.orchestrator.orchestrator import Defaults, Orchestrator
from trtllm_bls.orchestrator.reports import (
    DURATION,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    RESPONSES,
    TritonMetrics,
)
from trtllm_bls.triton.text_service import TextService
from trtllm_bls.types import RequestStats, TextRequest

TEXT = "one two three four"
TOKENS = len(tokenizer().encode_word(TEXT))
PROMPT = "The quick"
PROMPT_IDS = len(tokenizer().encode(PROMPT, add_special_tokens=True))
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@contextmanager
def counted(engine: ScriptedEngine) -> Iterator[tuple[Bench, Registry, list[RequestStats]]]:
    """The registry is complete once the bench has closed."""
    registry, found = Registry(), list[RequestStats]()
    service = TextService(Orchestrator(tokenizer(), engine, Defaults(), on_end=found.append))
    with serving(engine, service.handle) as bench:
        yield bench, registry, found
    metrics = TritonMetrics(registry, "m")
    for stats in found:
        metrics.add(stats)
    metrics.publish()


def row(value: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value]], dtype)


def test_every_end_is_counted_once() -> None:
    """Good ones, refused ones (by the wire, the orchestrator, the engine), failed and left ones."""
    engine = saying(TEXT)
    with counted(engine) as (bench, registry, _):
        streams = [bench.accept(bench.text(PROMPT, **STREAM)).wait() for _ in range(3)]
        whole = bench.accept(bench.text(PROMPT)).wait()
        both = bench.accept(bench.text(PROMPT, PROMPT)).wait()
        cut = bench.accept(bench.text(PROMPT, max_tokens=row(2), **STREAM)).wait()
        bench.accept(bench.text(PROMPT, top_p=row(7, np.float32))).wait()
        bench.accept(bench.text(PROMPT, beam_width=row(2))).wait()
        engine.fault = Fault(error=InvalidRequest("end_id", "no"))
        bench.accept(bench.text(PROMPT)).wait()
        engine.fault = Fault(error=EngineError("broken"))
        bench.accept(bench.text(PROMPT)).wait()
        engine.fault = Fault(after_tokens=3)  # silent
        left = bench.accept(bench.text(PROMPT, **STREAM)).wait(responses=3)
        left.leave()
        left.wait()
        engine.fault = Fault()  # from the beginning
        late = bench.accept(bench.text(PROMPT, timeout_ms=row(1), **STREAM)).wait()
        engine.fault = Fault(after_tokens=3)
        open_until_shutdown = bench.accept(bench.text(PROMPT, **STREAM)).wait(responses=3)
    assert registry.numbers(REQUESTS.name) == {
        ("success", "end_id"): 6,
        ("success", "length"): 1,
        ("refused", "top_p"): 1,
        ("refused", "beam_width"): 1,
        ("refused", "end_id"): 1,
        ("failed", "EngineError"): 1,
        ("cancelled", "caller_left"): 1,
        ("cancelled", "deadline"): 1,
        ("cancelled", "shutdown"): 1,
    }
    assert len(registry.of(DURATION.name, model="m", outcome="success")) == 7
    assert registry.of(GENERATION_TOKENS.name, model="m") == 6 * TOKENS + 2 + 2 * 3
    began = [*streams, cut, left, open_until_shutdown]
    assert len(registry.of(FIRST_TOKEN.name, model="m")) == len(began)
    # All but the two that were refused before they were tokenised.
    assert registry.of(PROMPT_TOKENS.name, model="m") == 12 * PROMPT_IDS
    answers = [*streams, whole, both, cut, left, late, open_until_shutdown]
    sent = sum(len(ask.responses) for ask in answers)
    assert registry.of(RESPONSES.name, model="m") == sent


def test_rows_of_a_batch_end_for_each_others_failure() -> None:
    """The one that failed is told apart from those that it took along."""
    engine = saying(TEXT)
    engine.fault = Fault(after_tokens=2)
    with counted(engine) as (bench, registry, _):
        bench.accept(bench.text(PROMPT, "")).wait()
    assert registry.numbers(REQUESTS.name) == {
        ("refused", "text_input"): 1,
        ("cancelled", "batch"): 1,
    }


def test_a_trace_context_is_passed_on_to_the_engine() -> None:
    """One that is none starts no trace, and does no harm."""
    engine = saying(TEXT)
    with counted(engine) as (bench, _, found):
        for sent in (TRACEPARENT, TRACEPARENT.upper(), "00-" + "0" * 32, 7, None):
            ask = bench.text(PROMPT)
            ask.sent_parameters = {"traceparent": sent, "other": 1}
            bench.accept(ask).wait()
    kept = [TRACEPARENT, None, None, None, None]
    assert [request.traceparent for request in engine.requests] == kept
    assert [stats.traceparent for stats in found] == kept
    assert TextRequest(request_id="r", max_tokens=1).traceparent is None
