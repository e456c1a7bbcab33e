"""The OpenAI API over an engine that costs little, in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from bench.stepping import SteppingEngine
from trtllm_bls.bundled import DEMO
from trtllm_bls.engines.base import Engine
from trtllm_bls.http.limits import ConnectionLimits, accepting
from trtllm_bls.openai.app import ApiSettings, create_app
from trtllm_bls.openai.workers import uvicorn_options
from trtllm_bls.orchestrator.orchestrator import Admission, Defaults, Orchestrator
from trtllm_bls.orchestrator.reports import RequestMetrics, RequestReports
from trtllm_bls.settings.command_options import raise_open_files
from trtllm_bls.text.tokenizer import load_tokenizer


class Backend:
    """The orchestrator over ``SteppingEngine``, or over what ``over`` makes of that."""

    def __init__(
        self,
        step_s: float,
        over: Callable[[Engine], Engine] | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(DEMO / "target")
        text = "Once upon a time there was a fox who liked the river and the hills. "
        engine: Engine = SteppingEngine(step_s, self.tokenizer.encode_word(text))
        self.engine = over(engine) if over else engine
        self.reports = RequestReports(RequestMetrics())
        self.orchestrator = Orchestrator(
            self.tokenizer, self.engine, Defaults(), on_end=self.reports.add, admission=admission
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reports.start(loop, self.orchestrator.load)

    async def close(self) -> None:
        self.reports.close()


@contextmanager
def serving_api(step_s: float, places: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server that has a token for each stream every ``step_s``.

    ``places``: how many requests run, and how many more wait; ``None``: any number.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    context = multiprocessing.get_context("fork")
    ready, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, listening, step_s, places), daemon=True)
    process.start()
    try:
        yield listening.getsockname()[1], ready.recv()
    finally:
        process.terminate()
        process.join()


def _serve(
    ready: Connection, listening: socket.socket, step_s: float, places: tuple[int, int] | None
) -> None:
    import uvicorn

    raise_open_files()
    backend = Backend(step_s, admission=Admission(*places, None) if places else None)
    app = create_app(backend, ApiSettings(model_names=("m",)))
    config = uvicorn.Config(app, **uvicorn_options(ConnectionLimits(), exit_timeout=1))
    ready.send(os.getpid())
    uvicorn.Server(config).run(accepting(listening))
