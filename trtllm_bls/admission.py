"""Limits that are applied before any work is done: how large a request may be (``RequestLimits``),
and how many run at once (``Admission``).

The wire checks the size of what has arrived; the orchestrator and the engine's service check what
is asked for. Each refusal names the field, its value, the limit and the parameter that sets it
(``parameters``). Knows nothing of Triton or of engines.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from trtllm_bls.errors import InvalidRequest, Overloaded

_LOGIT_BYTES = 4  # FP32
# What structures a JSON schema, a regular expression or an EBNF grammar, outside of quotes.
_GUIDE_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[][(){},|]', re.S)
_NEW = 0.2  # weight of the newest request in the average duration


class Admission:
    """Places for ``max_running`` sequences on one event loop.

    Up to ``max_queued`` more sequences wait for one, in the order of their arrival.

    A request of n sequences takes n places at once. ``max_queue_s``: how long, in seconds, a
    request waits before it is refused; ``None`` = as long as its caller does.
    """

    def __init__(self, max_running: int, max_queued: int, max_queue_s: float | None) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._average_s = 0.0  # how long a request runs
        self.running = 0  # sequences
        self.queued = 0

    @property
    def room(self) -> int:
        """How many more sequences may run or wait; any thread may ask."""
        return self._max_running + self._max_queued - self.running - self.queued

    def check_room(self) -> None:
        """Raise ``Overloaded`` if ``acquire`` would refuse any request now.

        This is for a caller that can refuse a request before it reads it.
        """
        if self.room <= 0:
            raise self._overloaded("as many as may", "max_queued_requests")

    @asynccontextmanager
    async def acquire(self, sequences: int) -> AsyncIterator[None]:
        """Let a request of so many sequences run while the context is entered; wait for that first.

        Entering raises ``InvalidRequest`` for more sequences than may ever run at once, and
        ``Overloaded`` at once where as many wait as may, or after waiting too long.
        """
        if sequences > self._max_running:
            raise _limited(
                "num_return_sequences",
                f"{sequences} is not allowed; at most {self._max_running} sequences run at once",
                "max_running_requests",
            )
        loop = asyncio.get_running_loop()
        if not self._waiting and self.running + sequences <= self._max_running:
            self.running += sequences
        elif self.queued + sequences > self._max_queued:
            raise self._overloaded("as many as may", "max_queued_requests")
        else:
            await self._wait(loop.create_future(), sequences)
        began = loop.time()
        try:
            yield
        finally:
            took = loop.time() - began
            self._average_s += _NEW * (took - self._average_s) if self._average_s else took
            self.running -= sequences
            if self._waiting:
                self._admit()

    def refuse_waiting(self, problem: str) -> None:
        """Raise ``Overloaded(problem)`` in all that wait for a place."""
        for admitted, _ in self._waiting:
            if not admitted.done():
                admitted.set_exception(Overloaded(problem))

    async def _wait(self, admitted: asyncio.Future[None], sequences: int) -> None:
        """Return once the places are this request's."""
        entry = (admitted, sequences)
        self._waiting.append(entry)
        self.queued += sequences
        timer = None
        if self._max_queue_s is not None:
            timer = admitted.get_loop().call_later(self._max_queue_s, self._give_up, admitted)
        try:
            await admitted
        except BaseException:
            if entry in self._waiting:
                self._stop_waiting(entry)
            elif not admitted.cancelled() and admitted.exception() is None:
                self.running -= sequences  # admitted, and cancelled before it went on
            self._admit()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _give_up(self, admitted: asyncio.Future[None]) -> None:
        if not admitted.done():
            waited = f"this one waited {self._max_queue_s:g} s"
            admitted.set_exception(self._overloaded(waited, "max_queue_seconds"))

    def _admit(self) -> None:
        """Give free places to those that have waited longest."""
        while self._waiting and self.running + self._waiting[0][1] <= self._max_running:
            entry = self._waiting[0]
            self._stop_waiting(entry)
            if not entry[0].done():  # one that was refused or cancelled is about to leave
                self.running += entry[1]
                entry[0].set_result(None)

    def _stop_waiting(self, entry: tuple[asyncio.Future[None], int]) -> None:
        self._waiting.remove(entry)
        self.queued -= entry[1]

    def _overloaded(self, why: str, parameter: str) -> Overloaded:
        seconds = math.ceil(self._average_s * (self.queued + 1) / self._max_running)
        return Overloaded(
            f"sequences running: {self.running}, waiting: {self.queued}, {why} "
            f"(parameter {parameter}); "
            f"try again in about {max(1, seconds)} s",
            parameter,
        )


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Sizes are bytes, times seconds; ``None`` = no limit."""

    max_request_bytes: int = 64 * 2**20
    max_prompt_bytes: int = 2**20
    max_output_tokens: int | None = None
    max_logits_bytes: int = 256 * 2**20
    max_timeout_seconds: float | None = None
    max_guide_bytes: int = 2**18
    max_guide_depth: int = 100
    max_guide_nodes: int = 50_000

    def check(self, limit: str, field: str, value: float | None, unit: str) -> None:
        """Raises ``InvalidRequest`` if ``value`` is above the field ``limit`` of this class."""
        most = getattr(self, limit)
        if most is not None and value is not None and value > most:
            raise _limited(field, f"{value:.15g} {unit}; at most {most:.15g} are allowed", limit)

    def check_guide(self, extras: Mapping[str, Any]) -> None:
        """Raises ``InvalidRequest`` if the grammar of guided decoding in an engine's further
        inputs is too large or too deep.

        Compiling one costs an engine far more than reading it. Depth is that of its brackets,
        nodes are its brackets, commas and alternatives; those within quotes do not count.
        """
        field = "guided_decoding_guide"
        values = extras[field].reshape(-1).tolist() if field in extras else []
        guide = values[0] if values and isinstance(values[0], bytes) else b""
        self.check("max_guide_bytes", field, len(guide), "bytes")
        depth = deepest = nodes = 0
        for mark in _GUIDE_MARKS.findall(guide):
            if len(mark) > 1:  # a text in quotes
                continue
            nodes += 1
            depth += (mark in b"([{") - (mark in b")]}")
            deepest = max(deepest, depth)
        self.check("max_guide_depth", field, deepest, "levels")
        self.check("max_guide_nodes", field, nodes, "nodes")

    def check_logits(self, rows: int, vocab_size: int | None) -> None:
        """Raises ``InvalidRequest`` for too many rows of logits, of ``vocab_size`` each, in all
        responses together."""
        size = rows * (vocab_size or 0) * _LOGIT_BYTES
        field = "return_context_logits, return_generation_logits"
        self.check("max_logits_bytes", field, size, "bytes of logits")


def _limited(field: str, problem: str, parameter: str) -> InvalidRequest:
    return InvalidRequest(field, f"{problem} (parameter {parameter})", parameter)
