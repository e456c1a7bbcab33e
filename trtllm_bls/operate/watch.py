"""The watch over a server, and its answers over HTTP.

``Watch`` looks at the processes twice a second, and sends a canary request when the server is
silent. It runs in a thread with an event loop of its own. It decides when to look; ``health``
judges the observations, and ``serve`` acts on the verdict. ``HealthEndpoint`` answers:

    /health/startup   200 once the server has been ready for the first time
    /health/live      200 unless the watch over the server is stuck; ``serve`` restarts a server
    /health/ready     200 while the server can serve, 503 with the reasons otherwise
    /metrics          the same for Prometheus, with processes and restarts

``HealthState`` computes the answers from the watch's latest observations. A probe never reaches the
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
_MAX_CONNECTIONS = 200  # each has a thread of ``serve``


@dataclass(frozen=True)
class Pace:
    """The times of a watch, in seconds.

    ``look_s`` lies between looks. After ``canary_s`` without progress a canary is sent; after a
    failed one the next follows in a fifth of that. An answer may take ``answer_s``, and a stopping
    server ``unload_s`` to unload a model without requests.
    """

    look_s: float = 0.5
    canary_s: float = 5.0
    answer_s: float = 10.0
    unload_s: float = 8.0

    @classmethod
    def within(cls, stall_s: float) -> Pace:
        """Choose the defaults, or faster times if they would miss two steps within ``stall_s``."""
        return cls(canary_s=min(cls.canary_s, stall_s / 6), answer_s=min(cls.answer_s, stall_s / 3))


RequestCounts: TypeAlias = tuple[float, float]  # requests that have a token, and that have none yet


class HttpDoor(Protocol):
    """The HTTP program, as far as the watch concerns it. Its methods may wait."""

    def answers(self, timeout: float) -> bool:
        """Return True if it answers a GET in ``timeout`` seconds, or is being started again."""

    def replace(self, reason: str) -> None:
        """Kill it, so that another one is started."""


class Watch:
    """A watch over a ready ``server`` until closed, and over ``http`` in front of it, if any.

    ``verdict`` is the latest, ``looked_at`` its time. ``load`` counts the requests of all APIs,
    ``engine_load`` those in the engine's own figures, ``None`` where it has none. ``engines`` has
    the problem of each engine elsewhere, empty if there is none. ``draining`` is true once somebody
    has asked for it through the status directory. ``warn`` gets problems as lines. When the server
    has failed, the watch's thread calls its ``fail`` once, with the reasons in one line, and ends.
    """

    def __init__(
        self,
        server: TritonServer,
        warn: Callable[[str], object],
        pace: Pace | None = None,
        http: HttpDoor | None = None,
    ) -> None:
        now = time.monotonic()
        self.verdict = Verdict()  # ready: a watch begins when the server has just become so
        self.looked_at = now
        self.draining = False
        self.load: RequestCounts = (0, 0)
        self.engine_load: RequestCounts | None = None
        self.engines: dict[str, str] = {}
        self._server = server
        self._stall_s = server.settings.stall_timeout
        self._http = http
        self._pace = pace or Pace.within(self._stall_s)
        self._problems = ProblemLog(warn)
        self._processes: ServerProcesses | None = None
        running = server.process  # it may end between two looks
        if running is not None:
            self._processes = ServerProcesses(running)
        self._files = StatusDirectory(server.status_dir)
        self._probe = server.probe()
        self._observed = Observed(
            descriptors_at=now,
            engine_elsewhere=ENGINE_NAME not in server.models,
        )
        if self._probe is not None and BLS_NAME in server.models:
            self._observed.progress_at = now  # without a canary nothing would show progress
        if http is not None:
            self._observed.http_at = now
        # The responses of the server's processes and of the HTTP program's, and the tokens that
        # they took from engines.
        self._progress = 0
        self._http_progress = 0
        self._steps = 0.0  # those of the engines
        self._has_requests = False  # the engine has requests of Triton's door
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=partial(asyncio.run, self._watch()), name="watch", daemon=True
        )
        self._thread.start()

    @property
    def processes(self) -> dict[str, int]:
        """The number of running processes by name; a model's processes have the model's name."""
        if self._processes is None:
            return {}
        counts = self._processes.running
        return {name.removeprefix("model "): count for name, count in counts.items()}

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join()

    async def _watch(self) -> None:
        server = self._server
        busy_at = time.monotonic()
        async with self._probe or nullcontext() as probe:
            tasks = [asyncio.create_task(self._scrape())]
            if probe is not None:
                tasks.append(asyncio.create_task(self._ask(probe)))
            if self._http is not None:
                tasks.append(asyncio.create_task(self._ask_http(self._http)))
            while not self._closing.is_set():
                now = time.monotonic()
                self.looked_at = now
                server.wake_guard()
                statuses = self._files.read()
                self._look(statuses, now)
                # A stopping server ends its processes one by one, within ``--exit-timeout``.
                if self.verdict.failed and not server.stop_requested:
                    server.fail("; ".join(self.verdict.reasons))
                    break
                if not self._is_kept(statuses, now):
                    busy_at = now
                elif now - busy_at > self._pace.unload_s:
                    server.end_unloading()
                    break
                await asyncio.sleep(self._pace.look_s)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _is_kept(self, statuses: list[ProcessStatus], now: float) -> bool:
        """Return True if a stopping server holds a model that has no requests.

        Triton 24.10 never unloads a model if a client cancelled a request just as its last response
        left. That is the case when every model but ``tensorrt_llm_bls`` is unloaded, so that no new
        request can come, and all its processes have reported within a second that nothing runs.
        """
        server = self._server
        if not server.stop_requested or set(server.models) - server.unloaded != {BLS_NAME}:
            return False
        for status in statuses:
            if not status.handed_over or status.running or now - status.loop_at >= 1:
                return False
        return bool(statuses)

    def _look(self, statuses: list[ProcessStatus], now: float) -> None:
        """Look at this machine, judge, and report requests, engines and problems."""
        self._observe(statuses, now)
        self.verdict = evaluate(self._observed, now, self._stall_s)

        if self.engine_load is not None:
            running, waiting = self.engine_load
            waiting += sum(status.queued for status in statuses)
        else:
            waiting = sum(status.waiting for status in statuses)
            running = sum(status.prompts for status in statuses) - waiting
        engines: dict[str, str] = {}
        for status in statuses:
            for name, problem in status.engines.items():
                engines[name] = engines.get(name) or problem
        self.load = (running, waiting)
        self.engines = engines
        if not (self._server.stop_requested or self.draining or self.verdict.failed):
            problems = {"the server is not ready": "; ".join(self.verdict.reasons)}
            if len(engines) > 1:
                for name, problem in engines.items():
                    problems[f"engine {name} takes no requests"] = problem
            self._problems.look(problems, now)

    def _observe(self, statuses: list[ProcessStatus], now: float) -> None:
        """Observe the processes of this machine."""
        observed = self._observed
        if self._processes is None:
            observed.processes = ("the server is dead",)
            return
        self.draining = self._files.leaving
        pids = self._processes.pids
        server_statuses: list[ProcessStatus] = []
        http_statuses: list[ProcessStatus] = []
        for status in statuses:
            if status.pid in pids:
                server_statuses.append(status)
            else:
                http_statuses.append(status)
        progress = _progress(server_statuses)
        if progress > self._progress and observed.progress_at is not None:
            observed.progress_at = now
        self._progress = progress
        http_progress = _progress(http_statuses)
        if http_progress > self._http_progress and observed.http_at is not None:
            observed.http_at = now
        self._http_progress = http_progress
        self._has_requests = self._steps_are_for(server_statuses)
        observed.processes = self._processes.problems()
        observed.descriptors = self._processes.without_descriptors()
        if not observed.descriptors:
            observed.descriptors_at = now
        observed.engine = None
        for status in statuses:
            observed.engine = observed.engine or common_problem(status.engines) or None
        observed.loop_at = min((status.loop_at for status in statuses), default=None)
        observed.server_loop_at = min((status.loop_at for status in server_statuses), default=None)
        observed.missed_turns = max((status.missed_turns for status in statuses), default=0)
        observed.shared_memory = free_shared_memory()

    def _steps_are_for(self, statuses: list[ProcessStatus]) -> bool:
        """Return True if a step of the engine may be one for a request of Triton's door.

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
        observed = self._observed
        pace = self._pace
        steps = math.inf
        while True:
            with suppress(ConnectionFailed):  # a late answer shows as missing progress
                observed.models = await probe.models_not_ready(self._server.models, pace.answer_s)
            progress_at = observed.progress_at
            if progress_at is not None and (
                observed.canary_failures
                or time.monotonic() - progress_at >= pace.canary_s - pace.look_s
            ):
                # Steps of the engine are progress. Requests that do not stream send nothing until
                # they end. If they fill the engine's batch, a canary has to wait, and only the
                # engine's count of steps tells work from a standstill.
                if self._steps > steps and self._has_requests:
                    observed.progress_at = time.monotonic()
                steps = self._steps
                canary = await probe.canary(pace.answer_s)
                if canary.outcome == "answered":
                    observed.canary_failures = 0
                    observed.progress_at = time.monotonic()
                elif canary.outcome == "failed":
                    observed.canary_failures += 1
                    observed.canary_error = canary.error
            if observed.canary_failures:
                await asyncio.sleep(pace.canary_s / 5)
            else:
                await asyncio.sleep(pace.canary_s)

    async def _ask_http(self, http: HttpDoor) -> None:
        """Forever: ask the HTTP program if none of its responses has left, and have it replaced."""
        observed = self._observed
        pace = self._pace
        while True:
            assert observed.http_at is not None
            silent_s = time.monotonic() - observed.http_at
            if silent_s > 2 * self._stall_s and not self._server.stop_requested:
                await asyncio.to_thread(http.replace, f"has answered nothing for {silent_s:.0f} s")
                observed.http_at = time.monotonic()  # The next one has as long.
            is_silent = silent_s >= pace.canary_s - pace.look_s
            if is_silent and await asyncio.to_thread(http.answers, pace.answer_s):
                observed.http_at = time.monotonic()
            await asyncio.sleep(pace.canary_s)


def _progress(statuses: list[ProcessStatus]) -> int:
    """Count the responses of processes, and the tokens that they took from engines."""
    return sum(status.responses + status.tokens for status in statuses)


def engine_load(metrics: str) -> RequestCounts | None:
    """Read how many requests run and wait by the engines' own figures in Triton's ``metrics``."""
    counts: dict[str, float] = {}
    for kind, number in _ENGINE_REQUESTS_LINE.findall(metrics):
        counts[kind] = counts.get(kind, 0) + float(number)
    if "scheduled" not in counts:
        return None
    running = counts["scheduled"]
    return running, counts.get("waiting", max(counts.get("active", 0) - running, 0))


class ProblemLog:
    """A log of problems: their begin, reminders after 1, 2, 4 … minutes, and their end."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._times: dict[str, tuple[float, float]] = {}  # the begin, and the next reminder

    def look(self, problems: Mapping[str, str], now: float) -> None:
        """Log changes of ``problems``, each with its cause, which is empty where it has ended."""
        for problem, cause in problems.items():
            if problem not in self._times:
                if cause:
                    self._write(f"{problem}: {cause}")
                    self._times[problem] = (now, now + _REMIND_S)
                continue
            began_at, remind_at = self._times[problem]
            duration = now - began_at
            if not cause:
                del self._times[problem]
                self._write(f"ended after {duration:.0f} s: {problem}")
            elif now >= remind_at:
                self._write(f"{problem} for {duration:.0f} s: {cause}")
                self._times[problem] = (began_at, now + max(duration, _REMIND_S))


# --- the answers over HTTP ------------------------------------------------------------------

_counter = partial(ServerMetric, kind="counter")
_RESTARTED = "Times that {} was started again"
_RUNNING_MEANING = "Requests that have a token and are not over"
_WAITING_MEANING = "Requests that have no token yet"
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
            self._watch = None
            self._reason = "the server has ended"

    @property
    def is_serving(self) -> bool:
        """True while the server is up, so that requests may run."""
        return self._watch is not None

    def restarting(self, reason: str) -> None:
        """Note that the server has failed and will be started again, and the OpenAI API with it."""
        self.restarts += 1
        self.api_problem = None
        self._reason = f"restarting: {reason}"

    def problems(self) -> dict[str, list[str]]:
        """Return the reasons to answer no, by probe."""
        watch = self._watch
        startup: list[str] = []
        live: list[str] = []
        ready: list[str] = []
        if not self.started:
            startup.append(self._reason)
        if watch is None:
            ready.append(self._reason)
        else:
            if self.draining or watch.draining:
                ready.append("the server is draining")
            ready += watch.verdict.reasons
            if self.api_problem:
                ready.append(self.api_problem)
            if time.monotonic() - watch.looked_at > _STUCK_S:
                live.append("the watch over the server is stuck")
        if not ready:
            self._not_ready_since = None
        elif self._not_ready_since is None:
            self._not_ready_since = time.monotonic()
        return {"startup": startup, "live": live, "ready": ready}

    def answer(self, probe: str) -> tuple[HTTPStatus, dict[str, object]]:
        """Return the status and the body with which to answer a probe."""
        reasons = self.problems()[probe]
        since = self._not_ready_since
        watch = self._watch
        body: dict[str, object] = {
            "ok": not reasons,
            "reasons": reasons,
            "restarts": self.restarts,
        }
        if probe == "ready":
            if since is not None:
                body["not_ready_seconds"] = int(time.monotonic() - since)
            if watch is not None and watch.engines:
                body["engines"] = {name: text or "ok" for name, text in watch.engines.items()}
        if reasons:
            return HTTPStatus.SERVICE_UNAVAILABLE, body
        return HTTPStatus.OK, body

    def metrics(self) -> str:
        """Return the text of ``/metrics``."""
        watch = self._watch
        processes = self._processes
        running: float = 0
        waiting: float = 0
        engine_running: dict[str, float] = {}
        engine_waiting: dict[str, float] = {}
        engines: dict[str, float] = {}
        if watch is not None:
            processes = watch.processes
            running, waiting = watch.load
            if watch.engine_load is not None:
                engine_running[""], engine_waiting[""] = watch.engine_load
            for name, problem in watch.engines.items():
                engines[name] = int(not problem)
        samples: tuple[Mapping[str, float], ...] = (
            {"": int(not self.problems()["ready"])},
            self._dropped_lines(),
            processes,
            {"": self.restarts},
            {"": self.api_restarts},
            {"": running},
            {"": waiting},
            engine_running,
            engine_waiting,
            engines,
        )
        rows = zip(SERVER_METRICS, samples, strict=True)
        return "".join(metric.text(values) for metric, values in rows)


class HealthEndpoint(ThreadingHTTPServer):
    """A server of health probes on ``host:port`` until closed; a port of 0 is any free one.

    Raises ``SetupError`` for a busy port.

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
        self.allowed: tuple[Collection[str], Collection[str]] | None = None
        if is_loopback(host):
            self.allowed = (hosts, origins)
        listener = listen(host, port, "--health-port")
        self.port: int = listener.getsockname()[1]
        super().__init__((host, self.port), _Handler, bind_and_activate=False)
        self.socket.close()  # made by the constructor, and not bound
        self.socket = listener
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
        return threading.active_count() < _MAX_CONNECTIONS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CONNECTION_S
    server: HealthEndpoint

    def do_GET(self) -> None:
        """Answer with an object as JSON, or with a text as Prometheus reads it."""
        path, _, _ = self.path.partition("?")
        state = self.server.state
        if self.server.allowed is not None:
            host = self.headers.get("Host", "")
            origin = self.headers.get("Origin", "")
            if problem := browser_problem(host, origin, *self.server.allowed):
                self._send_json(HTTPStatus(problem[0]), {"error": problem[1]})
                return
        if path == "/metrics":
            content_type = "text/plain; version=0.0.4; charset=utf-8"
            self._send(HTTPStatus.OK, content_type, state.metrics())
        elif path in ("/health/startup", "/health/live", "/health/ready"):
            self._send_json(*state.answer(path.rpartition("/")[2]))
        else:
            error = "use /health/startup, live or ready, or /metrics"
            self._send_json(HTTPStatus.NOT_FOUND, {"error": error})

    def _send_json(self, status: HTTPStatus, answer: Mapping[str, object]) -> None:
        self._send(status, "application/json", json.dumps(answer))

    def _send(self, status: HTTPStatus, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""
