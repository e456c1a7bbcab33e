"""Writes the status file of a ``tensorrt_llm_bls`` process, and drains the process on demand.

While a process drains, it refuses new requests. A request with speculative decoding goes on with
one plain request to the target: Triton refuses further requests from us once it was told to stop.
At the deadline, the requests that still run end with an error rather than a broken connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from trtllm_bls.errors import ShuttingDown, TrtllmBlsError
from trtllm_bls.orchestrator.deployment import BaseDeployment
from trtllm_bls.orchestrator.status import ProcessStatus, StatusDirectory

TICK_SECONDS = 0.05
WRITE_SECONDS = 1.0
# A request that has just been accepted needs a moment to reach the engine. The process counts as
# handed over only once nothing was on its way for so long.
SETTLE_SECONDS = 0.25
NUM_IDS = 20  # ids of requests in a status

log = logging.getLogger(__name__)


class Serving(Protocol):
    """The server of requests: ``RequestServer``. Any thread may read its properties.

    ``running``: the ids of requests that have not ended. ``responses``: the number of responses so
    far, errors left out. ``end_all`` ends every request with an error.
    """

    refusal: TrtllmBlsError | None
    loop: asyncio.AbstractEventLoop  # runs its requests

    @property
    def running(self) -> list[str]: ...

    @property
    def responses(self) -> int: ...

    async def end_all(self) -> None: ...


class Lifecycle:
    """A thread that writes the process's status file in ``directory`` and obeys its drain file.

    ``is_first``: this process is the first of its server, so a drain file that is there was left by
    an earlier server, and is removed. Raises ``OSError`` if the directory cannot be written.
    """

    def __init__(
        self, server: Serving, sender: BaseDeployment, directory: str, *, is_first: bool = True
    ) -> None:
        self._server = server
        self._sender = sender
        self._files = StatusDirectory(Path(directory))
        self._loop_at = time.monotonic()
        self._has_turned = True  # the event loop, since it last got a callback from here
        self._missed_turns = 0
        self._sender_drain: Future[None] | None = None  # since a drain was demanded
        self._unsettled_at = 0.0  # the last time in a drain when a request was on its way
        self._has_ended_all = False  # a drain's deadline has ended the running requests
        self._engines: dict[str, str] = {}
        self._closing = threading.Event()
        if is_first:
            self._files.forget_drain()
        self._write()
        self._thread = threading.Thread(target=self._run, name="lifecycle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Call this before the server is closed, whose loop the thread uses."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        written_at = 0.0
        engine_check: Future[None] | None = None
        while not self._closing.wait(TICK_SECONDS):
            now = time.monotonic()
            deadline = self._files.drain_deadline()
            if deadline is not None:
                self._drain(deadline, now)
            if self._has_turned:
                self._has_turned = False
                self._missed_turns = 0
                self._server.loop.call_soon_threadsafe(self._note_turn)
            else:
                self._missed_turns += 1
            if now - written_at >= WRITE_SECONDS or self._sender_drain is not None:
                written_at = now
                if engine_check is None or engine_check.done():
                    engine_check = self._begin(self._check_engines())
                try:
                    self._write()
                except OSError as error:
                    # ``serve`` removes the directory when it ends, and a draining process may
                    # live a moment longer.
                    if self._sender_drain is None or not isinstance(error, FileNotFoundError):
                        log.warning("status_dir %s: %s", self._files.path, error.strerror)

    def _drain(self, deadline: float, now: float) -> None:
        if self._sender_drain is None:
            self._server.refusal = ShuttingDown()
            self._sender_drain = self._begin(self._sender.drain())
            log.info("draining; %s", _running_text(self._server.running))
        if not (self._sender_drain.done() and self._sender.handed_over):
            self._unsettled_at = now
        if now >= deadline and not self._has_ended_all:
            self._has_ended_all = True
            if running := self._server.running:
                log.warning("time is up; %s", _running_text(running))
            self._begin(self._server.end_all())

    def _begin(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._server.loop)

    def _note_turn(self) -> None:
        self._loop_at = time.monotonic()
        self._has_turned = True

    async def _check_engines(self) -> None:
        self._engines = await self._sender.engine_problems()

    def _write(self) -> None:
        now = time.monotonic()
        is_settled = now - self._unsettled_at > SETTLE_SECONDS
        running = self._server.running
        load = self._sender.load()
        self._files.write(
            ProcessStatus(
                pid=os.getpid(),
                written_at=now,
                loop_at=self._loop_at,
                responses=self._server.responses,
                tokens=load.tokens,
                running=len(running),
                requests=tuple(running[:NUM_IDS]),
                engines=self._engines,
                prompts=load.running + load.waiting,
                waiting=load.waiting,
                queued=load.queued,
                handed_over=self._sender_drain is not None and is_settled,
                missed_turns=self._missed_turns,
            )
        )


def _running_text(running: list[str]) -> str:
    """Return the number of running requests, and the ids of some, for the log."""
    if not running:
        return "no request runs"
    ids = ", ".join(running[:NUM_IDS])
    if len(running) > NUM_IDS:
        ids += ", ..."
    return f"requests running: {len(running)} ({ids})"
