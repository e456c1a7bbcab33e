"""Counts and logs requests that are over, on a thread of its own.

Each metric and each log line is a round trip to Triton, for which an event loop full of streams
should not wait. The loop only queues the figures of a request; four times a second the thread
reads them.
"""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trtllm_bls.services.request_metrics import LOOP_LAG, RUNNING, WAITING, Metrics
from trtllm_bls.status import CANARY_ID
from trtllm_bls.types import Outcome, RequestStats, SpeculationStats

EVERY_SECONDS = 0.25
_MOST_WAITING = 2**17  # if Triton no longer answers, the oldest figures are dropped
_LAG_TURNS = 4  # the event loop's lag is measured every so many turns

log = logging.getLogger(__name__)


def unreported_id() -> str:
    """An id for a request of this process's own, which is neither counted nor logged."""
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


# --- the log ---------------------------------------------------------------------------------

# Characters of a value, as written, so that no line is too long for ``TritonLogHandler``.
_LONGEST, _LONGEST_PROMPT = 250, 900
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RequestLog:
    """Logs one line per request that is over, as ``key=value`` pairs (logfmt) or as JSON.

    Failures are warnings. ``prompts``: with what the caller sent. Callers choose ids, and errors
    quote their values, so each value is cut, and escaped: it can neither end the line nor reach a
    terminal as a command.
    """

    as_json: bool = False
    prompts: bool = False

    def add(self, stats: RequestStats) -> None:
        """Write one request's line."""
        level = logging.WARNING if stats.outcome is Outcome.FAILED else logging.INFO
        log.log(level, "%s", self.line(stats))

    def line(self, stats: RequestStats) -> str:
        """The line; what a request does not have is left out."""
        found = {key: value for key, value in self._fields(stats).items() if value is not None}
        if self.as_json:
            return json.dumps(found)
        return "request " + " ".join(f"{key}={_logfmt(value)}" for key, value in found.items())

    def _fields(self, stats: RequestStats) -> dict[str, Any]:
        done = stats.speculation
        return {
            "id": _cut(stats.request_id, _LONGEST),
            "api": stats.api,
            "outcome": stats.outcome.value,
            "reason": stats.reason,
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "sequences": stats.sequences,
            "responses": stats.responses,
            "duration_ms": _ms(stats.duration_s),
            "queue_ms": _ms(stats.queue_s),
            "ttft_ms": _ms(stats.ttft_s),
            "inter_token_ms": _ms(stats.inter_token_s),
            "longest_gap_ms": _ms(stats.longest_gap_s),
            "rounds": done and done.rounds,
            "drafted": done and done.drafted,
            "accepted": done and done.accepted,
            "acceptance": round(done.accepted / done.drafted, 3) if done and done.drafted else None,
            "trace_id": stats.traceparent and stats.traceparent.split("-")[1],
            "error": _cut(stats.error, _LONGEST),
            "prompt": _cut(stats.prompt, _LONGEST_PROMPT) if self.prompts else None,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _cut(text: str | None, most: int) -> str | None:
    if text is None:
        return None
    shown = text[:most]
    while len(json.dumps(shown)) > most:
        shown = shown[: len(shown) * 7 // 8]
    return shown if shown == text else shown + "..."


def _logfmt(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
