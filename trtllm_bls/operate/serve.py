"""``serve``: a server in the foreground, watched, and restarted with back-off when it fails.

Owns signals, restarts and the exit code, and what ``serve`` shows: progress and readable logs on
standard error, addresses on standard output. ``demo`` is three prompts through such a server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from trtllm_bls.bundled import DEMO
from trtllm_bls.client.client import Client
from trtllm_bls.client.terminal import ClientReply
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate import http_process, preparation
from trtllm_bls.operate.health import ServerProcesses
from trtllm_bls.operate.http_process import HttpProcess, chat_curl
from trtllm_bls.operate.logs import TAIL_LINES, LogLine, parse
from trtllm_bls.operate.ports import curl_tls
from trtllm_bls.operate.supervisor import ProcessStopped, keep_running
from trtllm_bls.operate.tritonserver import (
    Listener,
    ServerFailed,
    TritonServer,
)
from trtllm_bls.operate.watch import HealthEndpoint, HealthState, Watch
from trtllm_bls.orchestrator.log_lines import json_line
from trtllm_bls.orchestrator.output import LAST_LINES_S, QueuedStream, dropped_lines, gap_text
from trtllm_bls.settings.command_options import ServeSettings, listen
from trtllm_bls.settings.model_names import BLS_NAME

_LINE_STYLES = {"warning": "yellow", "error": "red", "fatal": "bold red"}


def serve(settings: ServeSettings, verbose: bool) -> int:
    """Serve until SIGINT or SIGTERM; the first signal drains, the second kills.

    Returns the exit code: 0 after draining, 128 + n if signal n killed the server or came before
    it was ready. Raises ``SetupError`` if the server does not start, or if it ends by itself and
    ``--on-failure`` is ``exit``.
    """
    with ExitStack() as stack:
        log_file = None
        if settings.log_file is not None:
            try:
                # Unbuffered: a line that a full disk refuses is lost; it does not delay the next.
                opener = partial(os.open, mode=0o600)
                log_file = stack.enter_context(open(settings.log_file, "ab", 0, opener=opener))
            except OSError as error:
                raise SettingsError(f"--log-file {settings.log_file}: {error.strerror}") from error
        as_json = preparation.log_format(settings) == "json"
        terminal = Terminal(Console(stderr=True), verbose=verbose, as_json=as_json)
        if log_file is not None:
            stack.enter_context(terminal.keeping(log_file.fileno()))
        stack.enter_context(terminal.errors())
        with_http = http_process.check(settings)
        if with_http and not settings.http_port:
            with listen(settings.host, 0, "--http-port") as listener:
                settings = replace(settings, http_port=listener.getsockname()[1])
        if not with_http:
            terminal.say(
                "no OpenAI API, and Triton's own HTTP port without limits: "
                "pip install 'trtllm-bls[openai]' for both"
            )
        state = HealthState(terminal.dropped_lines)
        endpoint = HealthEndpoint(
            settings.host,
            settings.health_port,
            state,
            settings.allowed_hosts,
            settings.allowed_origins,
        )
        stack.callback(endpoint.close)
        server = TritonServer(settings, terminal, behind_http=with_http)
        stack.callback(server.stop)
        service = _Service(server, terminal, state, endpoint.port)
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, service.on_signal))
        try:
            with terminal.lines_of_failure():
                is_cut_off = service.run()
            if not is_cut_off:
                return 0
            terminal.say("running requests were cut off")
        except ProcessStopped:
            pass
        return 128 + service.last_signal


@dataclass
class _Service:
    """The server and the program that answers HTTP in front of it; keeps ``state`` up to date."""

    server: TritonServer
    terminal: Terminal
    state: HealthState
    health_port: int
    http: HttpProcess | None = None  # while it runs
    last_signal: int = 0
    _running: ExitStack = field(default_factory=ExitStack)  # ends all but the server

    def run(self) -> bool:
        """Serve until a stop is requested; return True if requests were cut off.

        Raises ``ProcessStopped`` if the request came during a start, ``SetupError`` if the first
        start fails, and ``ServerFailed`` after a failure with ``--on-failure exit``.
        """
        try:
            self.start()
            text = announcement(self.server, self.health_port, self.http)
            if self.terminal.as_json:
                text = json_line(text, source="serve")
            Console().print(Text(text), soft_wrap=True)
            return keep_running(self, self.server.settings.on_failure == "restart")
        finally:
            self.discard()

    def start(self) -> None:
        """See ``Restartable``: the server, the HTTP program in front of it, and their watch."""
        with self.terminal.progress():
            self.server.start()
        self.server.keep_ports()
        if self.server.behind_http:
            self._start_http()
        watch = Watch(self.server, self.terminal.warning, http=self.http)
        self._running.callback(watch.close)
        self._running.enter_context(self.state.serving(watch))

    def wait(self) -> bool:
        """See ``Restartable``: wait for the server's end; return True if requests were cut off."""
        return self.server.wait()

    def discard(self) -> None:
        """See ``Restartable``."""
        self._running.close()
        self.server.discard()

    def is_stopping(self) -> bool:
        """See ``Restartable``."""
        return self.server.stop_requested

    def on_failure(self, error: SetupError, pause_s: float) -> None:
        """See ``Restartable``."""
        self.state.restarting(str(error))
        self.terminal.say(f"{error}; starting again in {pause_s:.0f} s", "error")

    def on_recovery(self, away_s: float) -> None:
        """See ``Restartable``."""
        self.terminal.say(f"serving again, {away_s:.1f} s later")
        for line in processes(self.server, self.http):
            self.terminal.say(line)

    def _start_http(self) -> None:
        with_api = bool(self.server.settings.openai_port) and BLS_NAME in self.server.models
        self.http = HttpProcess(
            self.server,
            with_api,
            self._on_http_problem,
            lambda raw: self.terminal.log(parse(raw)),
        )
        self._running.callback(self.http.close)
        self._running.callback(setattr, self, "http", None)
        # If the server is stopping or has ended, ``wait`` reports it.
        with suppress(ProcessStopped):
            self.http.start()
        self.http.keep()

    def _on_http_problem(self, problem: str | None) -> None:
        self.state.api_problem = problem
        if problem is None:
            self.terminal.say("the HTTP program answers again")
        else:
            self.state.api_restarts += 1
            self.terminal.say(f"{problem}; starting it again", "error")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Have the server stop."""
        self.last_signal = number
        self.state.draining = True
        if self.server.request_stop():
            if self.http is not None:  # after the first signal it drains with the server
                self.http.kill()
            text = "killing the server"
        elif not self.state.is_serving:  # no request can run yet
            text = "stopping before the server is ready; signal again to end at once"
        else:
            text = (
                f"stopping: running requests have {self.server.settings.exit_timeout} s to end; "
                "signal again to end at once"
            )
        if self.terminal.as_json:
            text = json_line(text, source="serve")
        # rich is not safe inside a handler; the stream that ``cli`` has put here is.
        sys.stderr.write(f"{text}\n")


# --- output ---------------------------------------------------------------------------------


class Terminal(Listener):
    """A listener that shows a server's start, log and end.

    With ``problems_only`` set, only warnings and errors of the log are shown. With ``as_json`` each
    is one JSON object. No method waits for whoever reads the output, if the console's file is a
    ``QueuedStream``.
    """

    def __init__(self, console: Console, *, verbose: bool = False, as_json: bool = False) -> None:
        self._console = console
        self.as_json = as_json
        self._verbose = verbose
        self._log_file: QueuedStream | None = None
        self._status = self.progress()
        self.problems_only = False
        self._printed: deque[str] = deque(maxlen=TAIL_LINES)
        self._models: tuple[str, ...] = ()
        self._started_at = time.monotonic()
        if as_json and isinstance(console.file, QueuedStream):
            console.file.gap_text = lambda lines: json_line(gap_text(lines), "warning", "serve")

    @contextmanager
    def keeping(self, descriptor: int) -> Iterator[None]:
        """Write every line of the log, unchanged, to the file behind ``descriptor``, too."""
        self._log_file = QueuedStream(descriptor, on_failure=self._on_log_file_failure)
        self._log_file.gap_text = lambda lines: as_log_line(gap_text(lines), "warning")
        try:
            yield
        finally:
            self._log_file.drain(LAST_LINES_S)
            self._log_file = None

    def dropped_lines(self) -> dict[str, int]:
        """Count the lines that were dropped since their reader was too slow, by output."""
        counts: dict[str, int] = dict(dropped_lines())
        if self._log_file is not None:
            counts["log_file"] = self._log_file.dropped
        return counts

    def _on_log_file_failure(self, error: OSError) -> None:
        self.warning(f"the log file cannot be written and misses lines: {error.strerror}")

    def progress(self) -> Status:
        """Make a spinner to show, where there is a terminal, while the server starts."""
        console = self._console
        if self.as_json:
            console = Console(quiet=True)
        self._status = console.status("starting tritonserver")
        return self._status

    @contextmanager
    def errors(self) -> Iterator[None]:
        """End with exit code 1 after an error that a JSON line reports."""
        try:
            yield
        except SetupError as error:
            if not self.as_json or isinstance(error, ProcessStopped):
                raise
            self.say(str(error), "error")
            sys.exit(1)

    @contextmanager
    def lines_of_failure(self) -> Iterator[None]:
        """If the server fails, show its last lines that were not shown yet."""
        try:
            yield
        except ServerFailed as failure:
            for line in failure.log_lines:
                if line in self._printed:
                    continue
                if not self.as_json:
                    line = "\n".join(f"  | {part}" for part in line.splitlines())
                self._print(line, level="error")
            raise

    def warning(self, text: str) -> None:
        self.say(f"warning: {text}", "warning")

    def say(self, text: str, severity: str = "info") -> None:
        """Show a line of ``serve``'s own, and write it to the log file in the form of Triton's."""
        now = time.localtime()
        self._keep(as_log_line(text, severity, now))
        if not self.as_json:
            text = f"{time.strftime('%H:%M:%S', now)} {text}"
        self._print(text, severity)

    def log(self, line: LogLine) -> None:
        self._keep(line.raw)
        if (not self._verbose and not line.noteworthy) or (self.problems_only and not line.problem):
            return
        self._printed.append(line.readable)
        if self.as_json:
            self._print(line.text, line.severity or "info", line.source)
        elif self._verbose:
            self._print(line.raw, line.severity)
        else:
            self._print(line.readable, line.severity)

    def _keep(self, line: str) -> None:
        if self._log_file is not None:
            self._log_file.write(f"{line}\n")

    def starting(self, models: tuple[str, ...]) -> None:
        self._models = models
        self._started_at = time.monotonic()
        self._print(f"loading {len(models)} models: {', '.join(models)}")
        self._status.update(f"loading models, 0 of {len(models)} ready")

    def model_ready(self, model: str, ready: int) -> None:
        seconds = time.monotonic() - self._started_at
        line = f"ready {ready}/{len(self._models)}  {model}  ({seconds:.1f} s)"
        if not self.as_json:
            line = f"  {line}"
        self._print(line, style="green")
        self._status.update(f"loading models, {ready} of {len(self._models)} ready")

    def _print(
        self, text: str, level: str = "info", source: str = "serve", style: str = ""
    ) -> None:
        line = Text(text, style=style or _LINE_STYLES.get(level, ""))
        if self.as_json:
            line = Text(json_line(text, level, source))
        self._console.print(line, soft_wrap=True)


def as_log_line(text: str, severity: str, now: time.struct_time | None = None) -> str:
    """Write a line of ``serve``'s own in the form of Triton's log."""
    stamp = time.strftime("%m%d %H:%M:%S", now or time.localtime())
    return f"{severity[0].upper()}{stamp} {os.getpid()} serve:0] {text}"


def processes(server: TritonServer, http: HttpProcess | None) -> list[str]:
    """Return a line for each process, with its pid."""
    names = {}
    running = server.process  # it may end between two looks
    if running is not None:
        names = ServerProcesses(running).pids
    if http is not None:
        names[http.pid] = "HTTP"
    return [f"process  {pid} {name}" for pid, name in names.items()]


def announcement(server: TritonServer, health_port: int, http: HttpProcess | None = None) -> str:
    """Return the server's addresses and processes, and a curl command to try it."""
    settings = server.settings
    url = server.public_http_url
    lines = [
        f"HTTP     {url}",
        f"gRPC     {server.grpc_url}",
        f"metrics  {server.metrics_url}",
        f"health   http://{server.host}:{health_port}/health/ready",
        *processes(server, http),
        "",
    ]
    curl = f"curl -i{curl_tls(settings)} {url}/v2/health/ready"
    if http is not None and http.url is not None:
        lines.insert(0, f"OpenAI   {http.url}/v1")
        curl = f"{chat_curl(http.url, settings)}\nor chat in a browser: {http.url}/"
    elif BLS_NAME in server.models:
        url = f"{url}/v2/models/{BLS_NAME}/generate"
        request = '"text_input": "Once upon a time", "max_tokens": 32'
        if settings.decoupled is not False:  # else there are no streams
            url += "_stream"
            request += ', "stream": true'
        json_body = f"-H 'Content-Type: application/json' -d '{{{request}}}'"
        curl = f"curl -sN{curl_tls(settings)} {url} {json_body}"
    return "\n".join([*lines, curl])


# --- demo -----------------------------------------------------------------------------------

PROMPTS = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["demo"]


def demo(settings: ServeSettings, verbose: bool, max_tokens: int) -> int:
    """Start a server, print its answers to three prompts as they stream, stop it.

    Returns the exit code: 1 if an answer is empty.
    """
    progress = Terminal(Console(stderr=True), verbose=verbose)
    server = TritonServer(settings, progress)
    try:
        with progress.progress(), progress.lines_of_failure():
            server.start()
        progress.problems_only = True  # no line of the log between a prompt and its answer
        answers = asyncio.run(ask(server.grpc_url, PROMPTS, max_tokens, Console()))
    finally:
        server.stop()
    url = f"http://{settings.host}:{ServeSettings.openai_port}"
    text = (
        f"A page to chat is at {url}/ while `make serve` or `trtllm-bls serve` runs, "
        f"OpenAI's API at {url}/v1:"
    )
    Console().print(Text(f"\n{text}\n{chat_curl(url, settings)}"), soft_wrap=True)
    return 0 if all(answer.text.strip() for answer in answers) else 1


async def ask(
    url: str, prompts: Sequence[str], max_tokens: int, console: Console
) -> tuple[ClientReply, ...]:
    """Stream each prompt's answer to the console, then a line of figures for each."""
    answers = []
    async with Client(url) as client:
        for prompt in prompts:
            console.print(Text(f"\n{prompt}", style="bold"), soft_wrap=True)  # log lines may follow
            reply = ClientReply(max_tokens)
            answers.append(reply)
            async with client.stream(
                text_input=prompt, max_tokens=max_tokens, return_num_output_tokens=True
            ) as stream:
                async for event in stream:
                    reply.add(event)
                    console.out(event.text, end="", highlight=False)
            console.print("\n")
    for prompt, answer in zip(prompts, answers, strict=True):
        result = "no text came back"
        if answer.arrivals:
            figures = answer.figures()
            tokens = figures["num_output_tokens"] or "?"
            result = (
                f"{tokens} tokens in {figures['duration_ms'] / 1000:.2f} s, the first after "
                f"{figures['ttft_ms']:.0f} ms; ended: {figures['ended']}"
            )
        color = "green" if answer.text else "red"
        console.print(Text(f"{prompt!r}: {result}", style=color))
    return tuple(answers)
