"""Processes that serve an engine which costs little as TrtllmService."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bench.fast_service import FastService
from trtllm_bls.engines.trtllm_service.service_messages import MESSAGES
from trtllm_bls.text.tokenizer import load_tokenizer


class Doubles:
    """``count`` processes, each a TrtllmService at one of ``urls``.

    What they say is ``says``, or else each prompt, over and over.
    """

    def __init__(
        self, count: int, model_dir: Path, step_s: float, says: Sequence[int] = ()
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.urls: list[str] = []
        self._processes = []
        for _ in range(count):
            ready, theirs = context.Pipe()
            arguments = (theirs, model_dir, step_s, tuple(says))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self.urls.append(f"127.0.0.1:{ready.recv()}")

    @property
    def ids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(ready: Connection, model_dir: Path, step_s: float, says: tuple[int, ...]) -> None:
    size = load_tokenizer(model_dir).vocab_size
    answers = {
        "HealthCheck": {"status": "OK"},
        "GetModelInfo": {"model_id": model_dir.name, "max_seq_len": 100_000, "vocab_size": size},
        "GetServerInfo": {"version": "1.3.0rc29", "backend": "pytorch", "world_size": 1},
        "Abort": {"success": True},
    }
    made = {name: MESSAGES[f"{name}Response"](**fields) for name, fields in answers.items()}

    async def run() -> None:
        ready.send(await FastService(step_s, made, says).start())
        await asyncio.get_running_loop().create_future()

    asyncio.run(run())
