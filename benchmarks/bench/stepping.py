"""An engine that costs little, and processes that serve such a one as TrtllmService.

One timer gives every stream its next token at each step, as with in-flight batching. What it says
is each prompt back, over and over, or ``ids`` where those are given.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from bench.fast_service import FastService
from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.engines.trtllm_service.service_messages import MESSAGES
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import (
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    TokenIds,
)

_LENGTH = EngineChunk(token_ids=(), final=True, finish_reason=FinishReason.LENGTH)


class _Stream(QueuedChunks):
    def __init__(self, running: dict[QueuedChunks, tuple[TokenIds, int, int]]) -> None:
        super().__init__()
        self._running = running

    def _let_go(self, *, finished: bool) -> None:
        self._running.pop(self, None)


class SteppingEngine:
    """Implements ``trtllm_bls.engines.base.Engine``, as far as a plain stream needs it."""

    name = "stepping"

    def __init__(self, step_s: float, ids: TokenIds = ()) -> None:
        self._ids = ids
        self._step_s = step_s
        self._open: dict[QueuedChunks, tuple[TokenIds, int, int]] = {}
        self._due = 0.0
        self._ticking = False

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity()

    def generate(self, request: EngineRequest) -> QueuedChunks:
        stream = _Stream(self._open)
        self._open[stream] = (self._ids or request.input_ids, 0, request.max_tokens)
        if not self._ticking:
            self._ticking = True
            self._due = asyncio.get_running_loop().time()
            self._again()
        return stream

    def _again(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due + self._step_s, loop.time())
        loop.call_at(self._due, self._step)

    def _step(self) -> None:
        for stream, (ids, sent, length) in list(self._open.items()):
            chunk = EngineChunk(token_ids=(ids[sent % len(ids)],))
            self._open[stream] = (ids, sent + 1, length)
            if sent + 1 == length:
                del self._open[stream]
                stream.put([chunk, _LENGTH])
                stream.end()
            else:
                stream.put([chunk])
        self._ticking = bool(self._open)
        if self._ticking:
            self._again()

    async def close(self) -> None:
        pass


class Doubles:
    """``count`` processes, each a TrtllmService at one of ``ports``."""

    def __init__(self, count: int, model_dir: Path, step_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.ports: list[int] = []
        self._processes = []
        for _ in range(count):
            ready, theirs = context.Pipe()
            arguments = (theirs, model_dir, step_s)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self.ports.append(ready.recv())

    @property
    def ids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(ready: Connection, model_dir: Path, step_s: float) -> None:
    size = load_tokenizer(model_dir).vocab_size
    answers = {
        "HealthCheck": {"status": "OK"},
        "GetModelInfo": {"model_id": model_dir.name, "max_seq_len": 100_000, "vocab_size": size},
        "GetServerInfo": {"version": "1.3.0rc29", "backend": "pytorch", "world_size": 1},
        "Abort": {"success": True},
    }
    made = {name: MESSAGES[f"{name}Response"](**fields) for name, fields in answers.items()}

    async def run() -> None:
        ready.send(await FastService(step_s, made).start())
        await asyncio.get_running_loop().create_future()

    asyncio.run(run())
