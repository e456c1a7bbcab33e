"""Watches one running server: its processes twice a second, a canary request when it is silent.

Runs in a thread with an event loop of its own. Owns when to look; ``health`` decides what it means,
``serve`` what to do about it.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from trtllm_bls.errors import ConnectionFailed
from trtllm_bls.health.probe import Probe
from trtllm_bls.health.processes import ServerProcesses, free_shared_memory
from trtllm_bls.health.verdict import Observed, Verdict, evaluate
from trtllm_bls.launcher.ports import ask
from trtllm_bls.launcher.server import TritonServer
from trtllm_bls.launcher.workdir import BLS, ENGINE
from trtllm_bls.status import (
    ENGINE_REQUESTS,
    ENGINE_STEPS,
    REQUESTS_LABEL,
    STEPS_LABEL,
    ProcessStatus,
    StatusDirectory,
)

_REQUESTS = re.compile(rf"{ENGINE_REQUESTS}{{[^}}]*{REQUESTS_LABEL}=\"(\w+)\"[^}}]*}} (\S+)")
_SCRAPE_S = 2.0  # between two looks at the engine's own figures
_REMIND_S = 60.0  # the first reminder of a problem; the time to the next one doubles
_STEPS = re.compile(rf"{ENGINE_STEPS}{{[^}}]*{STEPS_LABEL[0]}=\"{STEPS_LABEL[1]}\"[^}}]*}} (\S+)")


@dataclass(frozen=True)
class Pace:
    """Seconds. ``look_s``: between looks. ``canary_s``: after so long without progress a canary is
    sent, and after a failed one the next follows in a fifth of that. ``answer_s``: the longest that
    an answer may take. ``kept_s``: the longest that a stopping server may take to unload a model
    without requests."""

    look_s: float = 0.5
    canary_s: float = 5.0
    answer_s: float = 10.0
    kept_s: float = 8.0

    @classmethod
    def within(cls, stall_s: float) -> Pace:
        """The defaults, or faster if ``stall_s`` leaves little time to see an engine make two
        steps."""
        return cls(canary_s=min(cls.canary_s, stall_s / 6), answer_s=min(cls.answer_s, stall_s / 3))


Load: TypeAlias = tuple[float, float]  # requests that have a token, and that have none yet


class Watch:
    """Watches a ready ``server`` until closed.

    ``verdict`` is the latest, ``looked_at`` its time. ``load`` is of all APIs, ``engine_load`` by
    the engine's own figures, ``None`` where it has none. ``engines``: what is wrong with each
    engine elsewhere. ``on_failed`` is called once, on the watch's thread, with the reasons in one
    line; nothing is looked at after that.
    """

    def __init__(
        self,
        server: TritonServer,
        stall_s: float,
        on_failed: Callable[[str], object],
        warn: Callable[[str], object],
        pace: Pace | None = None,
    ) -> None:
        self.verdict = Verdict()  # ready: a watch begins when the server has just become so
        self.looked_at = time.monotonic()
        self.draining = False  # somebody has asked for it through the status directory
        self.load: Load = (0, 0)
        self.engine_load: Load | None = None
        self.engines: dict[str, str] = {}
        self._problems = ProblemLog(warn)
        self._server = server
        self._stall_s = stall_s
        self._pace = pace or Pace.within(stall_s)
        self._on_failed = on_failed
        process = server.process
        self._processes = ServerProcesses(process) if process else None
        self._files = StatusDirectory(server.status_dir)
        self._probe = server.probe()
        self._has_canary = self._probe is not None and BLS in server.models
        self._progress_at = self._descriptors_at = self._busy_at = time.monotonic()
        self._moved = 0  # responses, and tokens taken from engines
        self._steps = math.inf  # of the engines, as last looked at
        self._steps_told = 0.0
        self._failures, self._error = 0, ""
        self._not_ready: tuple[str, ...] = ()
        self._closing = threading.Event()
        watching = partial(asyncio.run, self._watch())
        self._thread = threading.Thread(target=watching, name="watch", daemon=True)
        self._thread.start()

    @property
    def processes(self) -> dict[str, int]:
        """The number of running processes by name; a model's processes have the model's name."""
        found = self._processes.running if self._processes else {}
        return {name.removeprefix("model "): count for name, count in found.items()}

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join()

    async def _watch(self) -> None:
        async with self._probe or nullcontext() as probe:
            asking = asyncio.create_task(self._ask(probe) if probe else asyncio.sleep(0))
            scraping = asyncio.create_task(self._scrape())
            while not self._closing.is_set():
                self.looked_at = now = time.monotonic()
                statuses = self._files.read()
                self.verdict = evaluate(self._observe(statuses, now), now, self._stall_s)
                self._note(statuses, now)
                # A stopping server ends its processes one by one, within ``--exit-timeout``.
                if self.verdict.failed and not self._server.stop_requested:
                    self._on_failed("; ".join(self.verdict.reasons))
                    break
                if self._is_busy(statuses, now):
                    self._busy_at = now
                elif now - self._busy_at > self._pace.kept_s:
                    self._server.end_unloading()
                    break
                await asyncio.sleep(self._pace.look_s)
            asking.cancel()
            scraping.cancel()
            await asyncio.wait({asking, scraping})

    def _note(self, statuses: list[ProcessStatus], now: float) -> None:
        """Tell of requests and engines, and in the log of what is wrong."""
        if self.engine_load is not None:
            running, waiting = self.engine_load
            waiting += sum(status.queued for status in statuses)
        else:
            waiting = sum(status.waiting for status in statuses)
            running = sum(status.prompts for status in statuses) - waiting
        engines: dict[str, str] = {}
        for status in statuses:
            engines |= {name: engines.get(name) or ill for name, ill in status.engines.items()}
        self.load, self.engines = (running, waiting), engines
        if not (self._server.stop_requested or self.draining or self.verdict.failed):
            problems = {"the server is not ready": "; ".join(self.verdict.reasons)}
            if len(engines) > 1:
                problems |= {f"engine {name} takes no requests": engines[name] for name in engines}
            self._problems.look(problems, now)

    async def _scrape(self) -> None:
        """Forever: read the engine's own figures on Triton's ``/metrics``."""
        while True:
            with suppress(OSError, ValueError):  # a late answer shows as missing progress
                url = self._server.metrics_url
                _, metrics = await asyncio.to_thread(ask, url, self._pace.answer_s)
                self.engine_load = engine_load(metrics.decode())
                self._steps_told = sum(map(float, _STEPS.findall(metrics.decode())))
            await asyncio.sleep(min(_SCRAPE_S, self._pace.canary_s))

    def _is_busy(self, statuses: list[ProcessStatus], now: float) -> bool:
        """False if only Triton itself delays a stop: all requests have ended.

        Triton 24.10 never unloads a model if a client cancelled a request just as its last response
        left. That is the case when every model but ``tensorrt_llm_bls`` is unloaded, so that no new
        request can come, and all its processes have reported within a second that nothing runs.
        """
        left = set(self._server.models) - self._server.unloaded
        idle = all(s.handed_over and not s.running and now - s.loop_at < 1 for s in statuses)
        return not (self._server.stop_requested and left == {BLS} and statuses and idle)

    def _observe(self, statuses: list[ProcessStatus], now: float) -> Observed:
        if self._processes is None:
            return Observed(processes=("the server is dead",))
        self.draining = self._files.leaving
        moved = sum(status.responses + status.tokens for status in statuses)
        if moved > self._moved:
            self._progress_at = now
        self._moved = moved
        exhausted = self._processes.without_descriptors()
        if not exhausted:
            self._descriptors_at = now
        return Observed(
            processes=self._processes.problems(),
            descriptors=exhausted,
            descriptors_at=self._descriptors_at,
            models=self._not_ready,
            engine_elsewhere=ENGINE not in self._server.models,
            engine=next((each.engine_problem for each in statuses if each.engine_problem), None),
            progress_at=self._progress_at if self._has_canary else None,
            loop_at=min((status.loop_at for status in statuses), default=None),
            missed_turns=max((status.missed_turns for status in statuses), default=0),
            canary_failures=self._failures,
            canary_error=self._error,
            shared_memory=free_shared_memory(),
        )

    async def _ask(self, probe: Probe) -> None:
        """Forever: ask which models are ready, and send a canary if no other request progresses."""
        while True:
            try:
                missing = await probe.models_not_ready(self._server.models, self._pace.answer_s)
            except ConnectionFailed:
                pass  # a late answer shows as missing progress
            else:
                self._not_ready = missing
            quiet = time.monotonic() - self._progress_at >= self._pace.canary_s - self._pace.look_s
            if self._has_canary and (quiet or self._failures):
                # Steps of the engine are progress. Requests that do not stream send nothing until
                # they end. If they fill the engine's batch, a canary has to wait, and only the
                # engine's count of steps tells work from a standstill.
                before, self._steps = self._steps, self._steps_told
                if self._steps > before:
                    self._progress_at = time.monotonic()
                await self._send_canary(probe)
            await asyncio.sleep(self._pace.canary_s / (5 if self._failures else 1))

    async def _send_canary(self, probe: Probe) -> None:
        canary = await probe.canary(self._pace.answer_s)
        if canary.outcome == "answered":
            self._failures = 0
            self._progress_at = time.monotonic()
        elif canary.outcome == "failed":
            self._failures += 1
            self._error = canary.error


def engine_load(metrics: str) -> Load | None:
    """The requests that run and wait by the engines' own figures in Triton's ``metrics``."""
    told: dict[str, float] = {}
    for kind, number in _REQUESTS.findall(metrics):
        told[kind] = told.get(kind, 0) + float(number)
    if "scheduled" not in told:
        return None
    running = told["scheduled"]
    return running, told.get("waiting", max(told.get("active", 0) - running, 0))


class ProblemLog:
    """Says when a problem begins, again after 1, 2, 4 … minutes, and when it has ended."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._since: dict[str, tuple[float, float]] = {}  # its begin, and when it is said again

    def look(self, problems: Mapping[str, str], now: float) -> None:
        """``problems``: each with its cause, an empty text if there is none; ``now`` in seconds."""
        for problem, cause in problems.items():
            began, again = self._since.get(problem, (now, now))
            if cause and now >= again:
                lasted = f" for {now - began:.0f} s" if problem in self._since else ""
                self._say(f"{problem}{lasted}: {cause}")
                self._since[problem] = began, now + max(now - began, _REMIND_S)
            elif not cause and problem in self._since:
                del self._since[problem]
                self._say(f"ended after {now - began:.0f} s: {problem}")
