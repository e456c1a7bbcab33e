"""What requests leave behind in a process of ``tensorrt_llm_bls``: nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CoroutineType, TracebackType
from typing import Any

import grpc
import numpy as np
import pytest

from tests.client.test_request_path import parameters
from tests.helpers.fake_engine_server import HOLD, Fail, Say, Triton
from tests.helpers.fake_grpc_server import Abort, Step, in_a_thread
from tests.helpers.scripted_text import PROMPT, tokenizer
from tests.helpers.tiers import budget
from tests.helpers.waiting import until
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.reports import REQUESTS
from trtllm_bls.pipeline.testing import FakeTriton
from trtllm_bls.triton.request_server import RequestServer
from trtllm_bls.triton.text_service import TextService

MANY, AT_ONCE = budget(128, 256), 32
SAYS = [Say((token,)) for token in tokenizer().encode_word("It's fun, isn't it?")]
WHOLE: list[Step] = [*SAYS, Say((), final=True)]
BROKEN: list[Step] = [*SAYS[:3], Fail("the engine's own")]
ABORTED: list[Step] = [*SAYS[:3], Abort(grpc.StatusCode.INTERNAL, "gone")]
SILENT: list[Step] = [*SAYS[:3], HOLD]
STREAM, ENGLISH = np.array([[True]]), np.array([[PROMPT.encode()]], np.object_)
_ANYBODYS = (asyncio.Future, asyncio.Handle, BaseException, CoroutineType, TracebackType)
# What the engine does, and what the request has more than others.
KINDS: Mapping[str, tuple[list[Step], dict[str, Any]]] = {
    "whole": (WHOLE, {}),
    "stop word": (WHOLE, {"stop_words": np.array([[b"isn"]], np.object_)}),
    "fails": (BROKEN, {}),
    "aborted": (ABORTED, {}),
    "refused": (WHOLE, {"temperature": np.array([[-1]], np.float32)}),
    "left": (SILENT, {}),
    "late": (SILENT, {"timeout_ms": np.array([[20]], np.int32)}),
}


class Model:
    """All of ``tensorrt_llm_bls``, before an engine behind gRPC."""

    def __init__(self, engine: Triton) -> None:
        self._triton, self._engine = FakeTriton(), engine
        self._deployment: Any = Deployment(parameters(engine.url))
        service = TextService(self._deployment.orchestrator)
        self._server = RequestServer(self._triton, service.handle, log_ends=False)
        self._deployment.start(self._server.loop)
        self._asked = 0

    def ask(self, kind: str) -> None:
        """Many requests of one kind, to their ends."""
        for _ in range(MANY // AT_ONCE):
            asks = [self._request(KINDS[kind][1]) for _ in range(AT_ONCE)]
            self._server.accept(asks)
            for ask in asks:
                if kind == "left":
                    ask.wait(1).leave()
            for ask in asks:
                ask.wait()
        self._asked += MANY
        until(lambda: self._reported() == self._asked and not self._server.running)
        self._engine.asked.clear()
        self._engine.calls.clear()

    def _reported(self) -> float:
        numbers = self._deployment.reports.metrics.numbers
        return sum(value for (metric, _), value in numbers.items() if metric is REQUESTS)

    def _request(self, more: Mapping[str, Any]) -> Any:
        arrays = {"text_input": ENGLISH, "max_tokens": np.array([[100]], np.int32), **more}
        return self._triton.ask({"stream": STREAM, **arrays}, "text_output", "finish_reason")

    def close(self) -> None:
        self._server.close(self._deployment.close)
        assert self._triton.broken == []


@contextmanager
def model(kind: str) -> Iterator[Model]:
    with in_a_thread(lambda: Triton(*KINDS[kind][0])) as engine:
        assert isinstance(engine, Triton)
        made = Model(engine)
        try:
            yield made
        finally:
            made.close()


def kept() -> Counter[str]:
    """Objects of the package's types and what runs, fails or waits on its behalf, by type.

    Without timers that have been cancelled: asyncio keeps up to a hundred.
    """
    kinds = [type(one) for one in gc.get_objects() if not _is_cancelled(one)]
    return Counter(kind.__qualname__ for kind in kinds if _is_of_a_request(kind))


def _is_cancelled(one: object) -> bool:
    return type(one) is asyncio.TimerHandle and one.cancelled()


def _is_of_a_request(kind: type) -> bool:
    return kind.__module__.startswith("trtllm_bls.") or issubclass(kind, _ANYBODYS)


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged: pytest would keep it, with its traceback."""
    for logger in ("trtllm_bls", "grpc"):
        caplog.set_level(logging.CRITICAL, logger)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_leave_nothing_behind(kind: str) -> None:
    """However they end: not one object to ten requests, once caches are warm."""
    with model(kind) as bench:
        bench.ask(kind)
        gc.collect()
        before = kept()
        bench.ask(kind)

        def grown() -> dict[str, int]:
            gc.collect()
            return {name: now - before[name] for name, now in kept().items()}

        until(lambda: all(count < MANY / 10 for count in grown().values()), tells=grown)


@pytest.mark.parametrize("kind", ["whole", "stop word", "left"])
def test_requests_leave_nothing_to_the_garbage_collector(kind: str) -> None:
    """Their objects are freed as they end: its passes were a sixth of the event loop's work."""
    with model(kind) as bench:
        bench.ask(kind)
        gc.collect()
        gc.disable()
        try:
            before = kept()
            bench.ask(kind)

            def grown() -> dict[str, int]:
                return {name: now - before[name] for name, now in kept().items()}

            until(lambda: all(count < MANY / 10 for count in grown().values()), tells=grown)
        finally:
            gc.enable()
