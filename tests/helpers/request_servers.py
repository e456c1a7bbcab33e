"""Request servers on a fake Triton, and sends that are slow or fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from trtllm_bls.pipeline.testing import SECONDS, Ask, FakeTriton, TritonModelError
from trtllm_bls.triton.request_server import Call, RequestServer, SenderThreads

Handle = Callable[[Call], Awaitable[None]]
ONE = {"number": np.array([[1]], dtype=np.int32)}


def number(value: int) -> dict[str, Any]:
    return {"number": np.array([[value]], dtype=np.int32)}


@contextmanager
def opened(triton: FakeTriton, handle: Handle, decoupled: bool = True) -> Iterator[RequestServer]:
    """A server that must not leave a task behind nor break a rule of Triton."""
    server = RequestServer(triton, handle, decoupled=decoupled)
    left: list[asyncio.Task[Any]] = []

    async def finish() -> None:
        of_senders = server._senders._delayed.values()  # which end when the senders do
        left.extend(asyncio.all_tasks() - {asyncio.current_task(), *of_senders})  # type: ignore[arg-type]

    try:
        yield server
    finally:
        server.close(finish)
        assert (left, triton.broken) == ([], [])


class ManualSenders(SenderThreads):
    """Sends nothing by itself, and remembers which delays were asked for in place of a timer."""

    def __init__(self) -> None:
        no_loop: Any = None
        super().__init__(no_loop, 0)
        self.delays: list[float | None] = []
        self.delayed: list[Call] = []

    def delay(self, call: Call, seconds: float | None) -> None:
        self.delays.append(seconds)
        self.delayed.append(call)

    def send(self) -> None:
        """Send all that was handed over."""
        for queued in (self._first_sends, self._later_sends):
            while queued:
                call, action = queued.popleft()
                self._reports.append((call, call.deliver(action.response, action.final)))
        self.take_reports()

    def time_is_up(self) -> None:
        """What was delayed is handed over, and sent."""
        delayed, self.delayed = self.delayed, []
        for call in delayed:
            self.act(call, call.outbox.due())
        self.send()


def call_of(ask: Ask, triton: FakeTriton, senders: SenderThreads | None = None) -> Call:
    """A call whose responses are sent by nobody, unless the test does."""
    return Call(triton, ask, senders or ManualSenders(), decoupled=True)


def failing(times: int) -> Callable[[Any], None]:
    """For ``Ask.on_send``: so many sends fail."""
    left = iter(range(times))

    def on_send(response: Any) -> None:
        if next(left, None) is not None:
            raise TritonModelError("no space left in shared memory")

    return on_send


class Gate:
    """For ``Ask.on_send``: sends wait here until it is open; ``begun``: one does."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, response: Any) -> None:
        self.begun.set()
        assert self.open.wait(SECONDS)


def answered(handle: Handle, *outputs: str) -> Ask:
    """One request, answered to its end."""
    triton = FakeTriton()
    ask = triton.ask(ONE, *(outputs or ("number",)), id="mine")
    with opened(triton, handle) as server:
        server.accept([ask])
        return ask.wait()
