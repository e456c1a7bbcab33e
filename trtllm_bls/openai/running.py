"""The requests that run in one process of the API, which ``Lifecycle`` watches and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trtllm_bls.errors import CancelCause, TrtllmBlsError


class RunningRequests:
    """A ``services.lifecycle.Serving``. While ``refusal`` is set, new requests raise it."""

    loop: asyncio.AbstractEventLoop  # set when the application starts

    def __init__(self) -> None:
        self.refusal: TrtllmBlsError | None = None
        self.responses = 0  # text chunks that the orchestrator has sent
        self._running: dict[asyncio.Task[None], str] = {}

    @property
    def running(self) -> list[str]:
        """Their ids; any thread may ask."""
        return list(self._running.copy().values())  # atomic under the GIL

    @contextmanager
    def one(self, request_id: str) -> Iterator[None]:
        """Around one request, in the task that answers it. Raises ``refusal``."""
        if self.refusal is not None:
            raise self.refusal
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = request_id
        try:
            yield
        finally:
            del self._running[task]

    async def end_all(self) -> None:
        """End every request; its client is told why."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel(CancelCause.SHUTDOWN.value)
        if tasks:
            await asyncio.wait(tasks)
