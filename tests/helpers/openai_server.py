"""The OpenAI API on a real socket, in a thread, over a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
import uvicorn.server

from tests.helpers.scripted_text import tokenizer
from tests.helpers.waiting import join, until
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import ShuttingDown
from trtllm_bls.http.limits import ConnectionLimits
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.openai.sockets import PATH
from trtllm_bls.openai.workers import uvicorn_options
from trtllm_bls.orchestrator.orchestrator import Admission, Defaults, Load, Orchestrator
from trtllm_bls.orchestrator.reports import RequestLog, RequestMetrics, RequestReports
from trtllm_bls.text.tokenizer import Tokenizer

MODEL = "scripted"
TICK_S = 0.01


async def _tick(seconds: float) -> None:
    await asyncio.sleep(min(seconds, TICK_S))


# uvicorn looks each 0.1 s whether it should end, and sleeps as long twice before it does. Hundreds
# of tests end a server.
uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": _tick})  # type: ignore[assignment]


@dataclass
class ScriptedBackend:
    """What ``Deployment`` is in production."""

    engine: Engine
    tokenizer: Tokenizer = field(default_factory=tokenizer)
    defaults: Defaults = field(default_factory=Defaults)
    admission: Admission | None = None
    problems: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reports = RequestReports(RequestMetrics(), [RequestLog().add])
        self.orchestrator = Orchestrator(
            self.tokenizer,
            self.engine,
            self.defaults,
            on_end=self.reports.add,
            admission=self.admission,
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reports.start(loop, self.orchestrator.load)

    def load(self) -> Load:
        return self.orchestrator.load()

    async def engine_problems(self) -> dict[str, str]:
        return self.problems

    def engine_sequences(self) -> dict[str, int]:
        return {}

    async def drain(self) -> None:
        if self.admission is not None:
            self.admission.refuse_waiting(ShuttingDown)
        if isinstance(self.engine, RoutingEngine):
            self.engine.drain()

    @property
    def handed_over(self) -> bool:
        return not isinstance(self.engine, RoutingEngine) or self.engine.handed_over

    async def close(self) -> None:
        await self.engine.close()
        self.reports.close()


@dataclass
class RunningApi:
    host: str
    port: int
    engine: Any
    call: Callable[..., None]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def serving(
    engine: Engine,
    backend: Any = None,
    exit_timeout: int = 5,
    limits: ConnectionLimits | None = None,
    **settings: Any,
) -> Iterator[RunningApi]:
    """A running server; on leaving it drains."""
    app = create_app(
        backend or ScriptedBackend(engine), ApiSettings(**{"model_names": (MODEL,), **settings})
    )
    listening = socket.create_server(("127.0.0.1", 0))
    limits = limits or ConnectionLimits(socket_path=PATH.encode())
    most = settings.get("max_body_bytes", ApiSettings.max_body_bytes)
    server = uvicorn.Server(uvicorn.Config(app, **uvicorn_options(limits, exit_timeout, most)))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    host, port = listening.getsockname()[:2]
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started, "uvicorn did not start"
        yield RunningApi(host, port, engine, server.handle_exit)
    finally:
        server.should_exit = True
        join(thread)
        listening.close()
