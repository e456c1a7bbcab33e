"""What ``serve`` knows of its server: seen by a watch, and told over HTTP.

``Watch`` looks at the processes twice a second, and sends a canary request when the server is
silent. It runs in a thread with an event loop of its own. It owns when to look; ``health`` decides
what it means, ``serve`` what to do about it. ``HealthEndpoint`` answers:

    /health/startup   200 once the server has been ready for the first time
    /health/live      200 unless the watch over the server is stuck; ``serve`` restarts a server
    /health/ready     200 while the server can serve, 503 with the reasons otherwise
    /metrics          the same for Prometheus, with processes and restarts

``HealthState`` computes the answers from what ``Watch`` has seen last. A probe never reaches the
server, so it is fast under any load.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, TypeAlias

from trtllm_bls.errors import ConnectionFailed
from trtllm_bls.http.browsers import browser_problem
from trtllm_bls.operate.health import (
    Observed,
    Probe,
    ServerProcesses,
    Verdict,
    evaluate,
    free_shared_memory,
)
from trtllm_bls.operate.ports import ask
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.status import (
    ENGINE_REQUESTS,
    ENGINE_STEPS,
    ENGINE_UP,
    REQUESTS_LABEL,
    STEPS_LABEL,
    ProcessStatus,
    ServerMetric,
    StatusDirectory,
    common_problem,
)
from trtllm_bls.settings.command_options import is_loopback, listen
from trtllm_bls.settings.model_names import BLS_NAME, ENGINE_NAME

_LABELS = r"[^{}]{0,200}"
_ENGINE_REQUESTS_LINE = re.compile(
    rf'{ENGINE_REQUESTS}{{{_LABELS}{REQUESTS_LABEL}="(\w+)"{_LABELS}}} (\S+)'
)
_ENGINE_STEPS_LINE = re.compile(
    rf'{ENGINE_STEPS}{{{_LABELS}{STEPS_LABEL[0]}="{STEPS_LABEL[1]}"{_LABELS}}} (\S+)'
)
_SCRAPE_S = 2.0  # between two looks at the engine's own figures
_REMIND_S = 60.0  # the first reminder of a problem; the time to the next one doubles
_STUCK_S = 60.0  # without a look
_CONNECTION_S = 5.0  # for a client that says nothing
_MOST_CONNECTIONS = 200  # each has a thread of ``serve``


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


RequestCounts: TypeAlias = tuple[float, float]  # requests that have a token, and that have none yet


class HttpDoor(Protocol):
    """The HTTP program, as far as the watch concerns it. Its methods may wait."""

    def answers(self, timeout: float) -> bool:
        """True if it answers a GET within ``timeout`` seconds, or is being started again."""

    def replace(self, why: str) -> None:
        """Kill it, so that another one is started."""


class Watch:
    """Watches a ready ``server`` until closed, and ``http`` in front of it, if there is one.

    ``verdict`` is the latest, ``looked_at`` its time. ``load`` is of all APIs, ``engine_load`` by
    the engine's own figures, ``None`` where it has none. ``engines``: what is wrong with each
    engine elsewhere. ``draining``: somebody has asked for that through the status directory.
    ``warn`` is told of problems. When the server has failed, its ``fail`` is called once, on the
    watch's thread, with the reasons in one line; nothing is looked at after that.
    """

    def __init__(
        self,
        server: TritonServer,
        warn: Callable[[str], object],
        pace: Pace | None = None,
        http: HttpDoor | None = None,
    ) -> None:
        self.verdict = Verdict()  # ready: a watch begins when the server has just become so
        self.looked_at = now = time.monotonic()
        self.draining = False
        self.load: RequestCounts = (0, 0)
        self.engine_load: RequestCounts | None = None
        self.engines: dict[str, str] = {}
        self._server, self._stall_s = server, server.settings.stall_timeout
        self._http = http
        self._pace = pace or Pace.within(self._stall_s)
        self._problems = ProblemLog(warn)
        process = server.process
        self._processes = ServerProcesses(process) if process else None
        self._files = StatusDirectory(server.status_dir)
        self._probe = server.probe()
        has_canary = self._probe is not None and BLS_NAME in server.models
        self._seen = Observed(
            descriptors_at=now,
            engine_elsewhere=ENGINE_NAME not in server.models,
            progress_at=now if has_canary else None,  # else nothing would tell of progress
            http_at=now if http is not None else None,
        )
        # Responses, and tokens taken from engines: of the server's processes and of HTTP's.
        self._moved = 0
        self._http_moved = 0
        self._steps = 0.0  # of the engines
        self._has_requests = False  # of Triton's door, at the engine
        self._closing = threading.Event()
        watching = partial(asyncio.run, self._watch())
        self._thread = threading.Thread(target=watching, name="watch", daemon=True)
        self._thread.start()

    @property
    def processes(self) -> dict[str, int]:
        """The number of running processes by name; a model's processes have the model's name."""
        running = self._processes.running if self._processes else {}
        return {name.removeprefix("model "): count for name, count in running.items()}

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join()

    async def _watch(self) -> None:
        server, busy_at = self._server, time.monotonic()
        async with self._probe or nullcontext() as probe:
            asking = asyncio.create_task(self._ask(probe) if probe else asyncio.sleep(0))
            scraping = asyncio.create_task(self._scrape())
            http = self._http
            asking_http = asyncio.create_task(self._ask_http(http) if http else asyncio.sleep(0))
            while not self._closing.is_set():
                self.looked_at = now = time.monotonic()
                server.wake_guard()
                statuses = self._files.read()
                self._look(statuses, now)
                # A stopping server ends its processes one by one, within ``--exit-timeout``.
                if self.verdict.failed and not server.stop_requested:
                    server.fail("; ".join(self.verdict.reasons))
                    break
                # Triton 24.10 never unloads a model if a client cancelled a request just as its
                # last response left. That is the case when every model but ``tensorrt_llm_bls`` is
                # unloaded, so that no new request can come, and all its processes have reported
                # within a second that nothing runs.
                idle = all(
                    s.handed_over and not s.running and now - s.loop_at < 1 for s in statuses
                )
                loaded = set(server.models) - server.unloaded
                unloading = server.stop_requested and loaded == {BLS_NAME}
                if not (unloading and statuses and idle):
                    busy_at = now
                elif now - busy_at > self._pace.kept_s:
                    server.end_unloading()
                    break
                await asyncio.sleep(self._pace.look_s)
            tasks = {asking, scraping, asking_http}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _look(self, statuses: list[ProcessStatus], now: float) -> None:
        """Look at what is on this machine, judge, and tell of requests, engines and problems."""
        seen = self._seen
        if self._processes is None:
            seen.processes = ("the server is dead",)
        else:
            self.draining = self._files.leaving
            own = self._processes.pids.keys()
            of_server = [status for status in statuses if status.pid in own]
            of_http = [status for status in statuses if status.pid not in own]
            moved, http_moved = _progress(of_server), _progress(of_http)
            if moved > self._moved and seen.progress_at is not None:
                seen.progress_at = now
            if http_moved > self._http_moved and seen.http_at is not None:
                seen.http_at = now
            self._moved = moved
            self._http_moved = http_moved
            self._has_requests = self._steps_are_for(of_server)
            seen.processes = self._processes.problems()
            seen.descriptors = self._processes.without_descriptors()
            if not seen.descriptors:
                seen.descriptors_at = now
            ill = (common_problem(status.engines) for status in statuses)
            seen.engine = next(filter(None, ill), None)
            seen.loop_at = min((status.loop_at for status in statuses), default=None)
            seen.server_loop_at = min((status.loop_at for status in of_server), default=None)
            seen.missed_turns = max((status.missed_turns for status in statuses), default=0)
            seen.shared_memory = free_shared_memory()
        self.verdict = evaluate(seen, now, self._stall_s)

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

    def _steps_are_for(self, statuses: list[ProcessStatus]) -> bool:
        """True if a step of the engine may be one for a request of Triton's door.

        A request runs there, be it the canary, and the engine's figures do not say that its queue
        is empty while the canary alone runs: then the canary has not reached the engine, whose
        steps are for the OpenAI API.
        """
        running = sum(status.running for status in statuses)
        engine_has_queue = self.engine_load is None or self.engine_load[1] > 0
        return running > 1 or (running == 1 and engine_has_queue)

    async def _scrape(self) -> None:
        """Forever: read the engine's own figures on Triton's ``/metrics``."""
        while True:
            with suppress(OSError, ValueError):  # a late answer shows as missing progress
                url = self._server.metrics_url
                _, body = await asyncio.to_thread(ask, url, self._pace.answer_s)
                metrics = body.decode()
                self.engine_load = engine_load(metrics)
                self._steps = sum(map(float, _ENGINE_STEPS_LINE.findall(metrics)))
            await asyncio.sleep(min(_SCRAPE_S, self._pace.canary_s))

    async def _ask(self, probe: Probe) -> None:
        """Forever: ask which models are ready, and send a canary if no other request progresses."""
        seen, pace, steps = self._seen, self._pace, math.inf
        while True:
            with suppress(ConnectionFailed):  # a late answer shows as missing progress
                seen.models = await probe.models_not_ready(self._server.models, pace.answer_s)
            progress_at = seen.progress_at
            if progress_at is not None and (
                seen.canary_failures
                or time.monotonic() - progress_at >= pace.canary_s - pace.look_s
            ):
                # Steps of the engine are progress. Requests that do not stream send nothing until
                # they end. If they fill the engine's batch, a canary has to wait, and only the
                # engine's count of steps tells work from a standstill.
                before, steps = steps, self._steps
                if steps > before and self._has_requests:
                    seen.progress_at = time.monotonic()
                canary = await probe.canary(pace.answer_s)
                if canary.outcome == "answered":
                    seen.canary_failures = 0
                    seen.progress_at = time.monotonic()
                elif canary.outcome == "failed":
                    seen.canary_failures += 1
                    seen.canary_error = canary.error
            await asyncio.sleep(pace.canary_s / (5 if seen.canary_failures else 1))

    async def _ask_http(self, http: HttpDoor) -> None:
        """Forever: ask the HTTP program if none of its responses has left, and have it replaced."""
        seen, pace = self._seen, self._pace
        while True:
            assert seen.http_at is not None
            silent_s = time.monotonic() - seen.http_at
            if silent_s > 2 * self._stall_s and not self._server.stop_requested:
                await asyncio.to_thread(http.replace, f"has answered nothing for {silent_s:.0f} s")
                seen.http_at = time.monotonic()  # The next one has as long.
            is_silent = silent_s >= pace.canary_s - pace.look_s
            if is_silent and await asyncio.to_thread(http.answers, pace.answer_s):
                seen.http_at = time.monotonic()
            await asyncio.sleep(pace.canary_s)


def _progress(statuses: list[ProcessStatus]) -> int:
    """The responses of processes, and the tokens that they took from engines."""
    return sum(status.responses + status.tokens for status in statuses)


def engine_load(metrics: str) -> RequestCounts | None:
    """The requests that run and wait by the engines' own figures in Triton's ``metrics``."""
    counts: dict[str, float] = {}
    for kind, number in _ENGINE_REQUESTS_LINE.findall(metrics):
        counts[kind] = counts.get(kind, 0) + float(number)
    if "scheduled" not in counts:
        return None
    running = counts["scheduled"]
    return running, counts.get("waiting", max(counts.get("active", 0) - running, 0))


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


# --- told over HTTP -------------------------------------------------------------------------

_counter = partial(ServerMetric, kind="counter")
_RESTARTED = "Times that {} was started again"
_RUNNING_MEANING, _WAITING_MEANING = (
    "Requests that have a token and are not over",
    "Requests that have no token yet",
)
SERVER_METRICS = (
    ServerMetric("trtllm_bls_server_ready", "1 while /health/ready says so, else 0"),
    _counter(
        "trtllm_bls_server_dropped_lines_total",
        "Lines of output that a slow reader or a full disk has lost, by stream",
        ("output",),
    ),
    ServerMetric("trtllm_bls_server_processes", "Processes that run, by name", ("process",)),
    _counter("trtllm_bls_server_restarts_total", _RESTARTED.format("the server")),
    _counter("trtllm_bls_openai_restarts_total", _RESTARTED.format("the OpenAI API")),
    ServerMetric("trtllm_bls_server_num_requests_running", f"{_RUNNING_MEANING}, of all APIs"),
    ServerMetric("trtllm_bls_server_num_requests_waiting", f"{_WAITING_MEANING}, of all APIs"),
    ServerMetric(
        "trtllm_bls_engine_num_requests_running", f"{_RUNNING_MEANING}, as the engine says"
    ),
    ServerMetric(
        "trtllm_bls_engine_num_requests_waiting", f"{_WAITING_MEANING}, as the engine says"
    ),
    ENGINE_UP,
)


class HealthState:
    """The server's state, written by ``serve`` and read by the threads of ``HealthEndpoint``.

    ``dropped_lines`` counts lines of output that were lost, by stream.
    """

    started = draining = False
    restarts = api_restarts = 0
    api_problem: str | None = None  # why the OpenAI API does not answer
    _watch: Watch | None = None
    _processes: Mapping[str, int] = {"tritonserver": 0}  # while there is no watch; by name
    _reason = "the server is starting"
    _not_ready_since: float | None = None

    def __init__(self, dropped_lines: Callable[[], Mapping[str, int]] = dict) -> None:
        self._dropped_lines = dropped_lines

    @contextmanager
    def serving(self, watch: Watch) -> Iterator[None]:
        """Within this block the server is up, and ``watch`` observes it."""
        self.started = True
        self._watch = watch
        try:
            yield
        finally:
            self._processes = dict.fromkeys(watch.processes, 0)
            self._watch, self._reason = None, "the server has ended"

    def restarting(self, reason: str) -> None:
        """The server has failed and will be started again, and the OpenAI API with it."""
        self.restarts += 1
        self.api_problem = None
        self._reason = f"restarting: {reason}"

    def problems(self) -> dict[str, list[str]]:
        """For each probe the reasons to answer no."""
        watch = self._watch
        not_ready, not_live = [self._reason], list[str]()
        if watch is not None:
            not_ready = ["the server is draining"] if self.draining or watch.draining else []
            not_ready += [*watch.verdict.reasons, *([self.api_problem] if self.api_problem else [])]
            if time.monotonic() - watch.looked_at > _STUCK_S:
                not_live = ["the watch over the server is stuck"]
        since = self._not_ready_since or time.monotonic()
        self._not_ready_since = since if not_ready else None
        startup = [] if self.started else [self._reason]
        return {"startup": startup, "live": not_live, "ready": not_ready}

    def answer(self, probe: str) -> tuple[HTTPStatus, dict[str, object]]:
        """The status and the body with which to answer a probe."""
        reasons, since, watch = self.problems()[probe], self._not_ready_since, self._watch
        body = {"ok": not reasons, "reasons": reasons, "restarts": self.restarts}
        if probe == "ready":
            if since is not None:
                body["not_ready_seconds"] = int(time.monotonic() - since)
            if watch is not None and watch.engines:
                body["engines"] = {name: ill or "ok" for name, ill in watch.engines.items()}
        return HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK, body

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        watch = self._watch
        load, engine, engines = (0.0, 0.0), None, dict[str, str]()
        if watch is not None:
            load, engine, engines = watch.load, watch.engine_load, watch.engines
        values: tuple[Mapping[str, float], ...] = (
            {"": int(not self.problems()["ready"])},
            self._dropped_lines(),
            watch.processes if watch is not None else self._processes,
            {"": self.restarts},
            {"": self.api_restarts},
            *({"": number} for number in load),
            *({"": number} if engine else {} for number in engine or load),
            {name: int(not problem) for name, problem in engines.items()},
        )
        rows = zip(SERVER_METRICS, values, strict=True)
        return "".join(metric.text(samples) for metric, samples in rows)


class HealthEndpoint(ThreadingHTTPServer):
    """Answers on ``host:port`` until closed; a port of 0 is any free one. Raises ``SetupError``.

    ``hosts`` and ``origins`` may ask, too, where ``host`` is this machine alone.
    """

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        state: HealthState,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        self.state = state
        self.allowed = (hosts, origins) if is_loopback(host) else None
        listening = listen(host, port, "--health-port")
        self.port: int = listening.getsockname()[1]
        super().__init__((host, self.port), _Handler, bind_and_activate=False)
        self.socket.close()  # made by the constructor, and not bound
        self.socket = listening
        self._thread = threading.Thread(target=self.serve_forever, name="health-endpoint")
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def service_actions(self) -> None:
        """Twice a second: note since when the server is not ready, also if nobody asks."""
        self.state.problems()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return threading.active_count() < _MOST_CONNECTIONS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CONNECTION_S
    server: HealthEndpoint

    def do_GET(self) -> None:
        """Answer with an object as JSON, or with a text as Prometheus reads it."""
        path, state, allowed = self.path.partition("?")[0], self.server.state, self.server.allowed
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin", "")
        status, kind, answer = HTTPStatus.OK, "application/json", dict[str, object]()
        if allowed is not None and (problem := browser_problem(host, origin, *allowed)):
            status, answer = HTTPStatus(problem[0]), {"error": problem[1]}
        elif path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
        elif path in ("/health/startup", "/health/live", "/health/ready"):
            status, answer = state.answer(path.rpartition("/")[2])
        else:
            status = HTTPStatus.NOT_FOUND
            answer = {"error": "use /health/startup, live or ready, or /metrics"}
        body = (json.dumps(answer) if answer else state.metrics()).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""
