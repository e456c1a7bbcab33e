"""A service behind a real request server, on a fake Triton, over a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests.helpers.scripted_text import orchestrator
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.pipeline.testing import Ask, FakeTriton
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.triton.engine_service import EngineService
from trtllm_bls.triton.request_server import RequestServer
from trtllm_bls.triton.text_service import TextService

END = 0
SILENT = Fault(after_tokens=2)  # two tokens, then nothing


class Bench:
    """One service behind a request server, on a fake Triton, over a scripted engine."""

    def __init__(self, engine: ScriptedEngine, server: RequestServer, triton: FakeTriton) -> None:
        self.engine, self.server, self.triton = engine, server, triton

    def accept(self, *asks: Ask) -> Ask:
        self.server.accept(asks)
        return asks[0]

    def tokens(self, id: str = "", outputs: tuple[str, ...] = (), **inputs: Any) -> Ask:
        """A request to ``tensorrt_llm`` with the prompt (7, 8)."""
        arrays = {
            "input_ids": np.array([[7, 8]], np.int32),
            "input_lengths": np.array([2], np.int32),
            "request_output_len": np.array([10], np.int32),
            "end_id": np.array([END], np.int32),
            **inputs,
        }
        names = outputs or ("output_ids", "sequence_length")
        return self.triton.ask(arrays, *names, id=id)

    def text(self, *texts: str, outputs: tuple[str, ...] = (), **inputs: Any) -> Ask:
        """A request to ``tensorrt_llm_bls`` with a row for each text."""
        arrays = {
            "text_input": np.array([[text.encode()] for text in texts], np.object_),
            "max_tokens": np.full((len(texts), 1), 100, np.int32),
            **inputs,
        }
        return self.triton.ask(arrays, *(outputs or ("text_output", "finish_reason")))


TRUE = np.array([True])
STREAM = {"stream": np.array([[True]])}


@contextmanager
def serving(
    engine: Any, handle: Any, *, decoupled: bool = True, prepare_batch: Any = None
) -> Iterator[Bench]:
    """Every rule of Triton is kept, and in the end nothing runs any more."""
    triton, left = FakeTriton(), []
    server = RequestServer(triton, handle, decoupled=decoupled, prepare_batch=prepare_batch)

    async def finish() -> None:
        left.extend(asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]
        await engine.close()

    try:
        yield Bench(engine, server, triton)
    finally:
        server.close(finish)
        assert (triton.broken, left, engine.live) == ([], [], 0)


@contextmanager
def engine_service(
    *answer: int, exclude: bool = True, exposed: bool = False, **script: Any
) -> Iterator[Bench]:
    engine = ScriptedEngine(reciting(answer, 2, END), Script(vocab_size=50, **script))
    service = EngineService(engine, exclude, expose_kv_cache_metrics=exposed)
    with serving(engine, service.handle) as bench:
        yield bench


@contextmanager
def text_service(
    engine: Any,
    *,
    decoupled: bool = True,
    other: Tokenizer | None = None,
    llmapi: bool = False,
    exposed: bool = False,
) -> Iterator[Bench]:
    """``llmapi``: with the parameters that ``configure`` gives that model."""
    defaults = Defaults(accumulate=llmapi, expose_kv_cache_metrics=exposed)
    orchestra = orchestrator(engine, defaults, other)
    service = TextService(orchestra, exclude_input=not llmapi, llmapi=llmapi)
    with serving(
        engine, service.handle, decoupled=decoupled, prepare_batch=service.prepare_batch
    ) as bench:
        yield bench


def ids(ask: Ask) -> list[list[int]]:
    """What each response brings, up to its sequence length."""
    lengths = [length[0] for length in ask.said("sequence_length")]
    return [said[0][:n] for said, n in zip(ask.said("output_ids"), lengths, strict=True)]


def words(ask: Ask, row: int | None = None) -> str:
    """The text of one row; of the only one by default."""
    return b"".join(
        response["text_output"][0]
        for response in ask.responses
        if row is None or response["batch_index"][0, 0] == row
    ).decode()
