"""Counting and logging requests that are over, in a thread of its own.

Each is a round trip to Triton that an event loop full of streams should not wait for. The loop only
queues a request's figures; four times a second the thread takes them.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trtllm_bls.request_stats import RequestStats
from trtllm_bls.services.request_metrics import LOOP_LAG, RUNNING, WAITING, Metrics
from trtllm_bls.status import CANARY_ID
from trtllm_bls.types import SpeculationStats

EVERY_SECONDS = 0.25
_MOST_WAITING = 2**17  # where Triton takes no figures any more, the oldest are dropped
_LAG_TURNS = 4  # turns from one question for the event loop's lag to the next

log = logging.getLogger(__name__)


def unreported_id() -> str:
    """For a request of this process's own, which is neither counted nor logged."""
    return f"{_canary()}-{uuid.uuid4().hex}"


def _canary() -> str:
    return os.environ.setdefault(CANARY_ID, uuid.uuid4().hex)  # as ``serve`` has set it, if it has


class RequestReports:
    """Gives the figures of requests to ``metrics`` and to each of ``readers``.

    ``add`` and ``add_speculation`` may be called at any time, on any thread, and never wait. What
    is added is read from ``start`` to ``close``.
    """

    def __init__(
        self, metrics: Metrics, readers: Sequence[Callable[[RequestStats], object]] = ()
    ) -> None:
        self.metrics = metrics
        self._readers = (metrics.add, *readers)
        # The last kind of item is the event loop's lag.
        self._queue: collections.deque[RequestStats | SpeculationStats | float]
        self._queue = collections.deque(maxlen=_MOST_WAITING)
        self.add: Callable[[RequestStats], None] = self._queue.append
        self.add_speculation: Callable[[SpeculationStats], None] = self._queue.append
        self._load = (0, 0)  # running and waiting, as published
        self._canary = _canary()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop, load: Callable[[], tuple[int, int]]) -> None:
        """Begin to read. ``load`` tells how many requests run and how many wait."""
        self._thread = threading.Thread(
            target=self._run, args=(loop, load), name="request-reports", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Read what is left, then end the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: Any, load: Callable[[], tuple[int, int]]) -> None:
        turn = 0
        while not self._closing.wait(EVERY_SECONDS):
            self._turn(load)
            turn += 1
            if turn % _LAG_TURNS == 0 and not loop.is_closed():
                loop.call_soon_threadsafe(self._note_lag, time.perf_counter())
        self._turn(load)

    def _turn(self, load: Callable[[], tuple[int, int]]) -> None:
        while self._queue:
            self._read(self._queue.popleft())
        before, self._load = self._load, load()
        for metric, old, new in zip((RUNNING, WAITING), before, self._load, strict=True):
            if new != old:
                self.metrics.record(metric, (), new - old)
        self._do(self.metrics.publish)

    def _read(self, item: RequestStats | SpeculationStats | float) -> None:
        if isinstance(item, RequestStats):
            if item.request_id.rpartition("-")[0] == self._canary:
                return
            for read in self._readers:
                self._do(partial(read, item))
        elif isinstance(item, SpeculationStats):
            self._do(partial(self.metrics.add_speculation, item))
        else:
            self._do(partial(self.metrics.record, LOOP_LAG, (), item))

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # whatever Triton raises, requests go on and so do their figures
            log.exception("the figures of a request could not be published")

    def _note_lag(self, asked_at: float) -> None:
        self._queue.append(time.perf_counter() - asked_at)
