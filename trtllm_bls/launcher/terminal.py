"""What ``serve`` and ``demo`` show: progress, readable logs, addresses, errors.

Owns texts and colours. Progress and logs go to standard error, the addresses to standard output.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.launcher.certificates import curl_tls
from trtllm_bls.launcher.logs import TAIL_LINES, LogLine
from trtllm_bls.launcher.server import Listener, ServerFailed, TritonServer
from trtllm_bls.launcher.workdir import BLS

_STYLES = {"warning": "yellow", "error": "red", "fatal": "bold red"}


class Terminal(Listener):
    """Shows one server's start, log and end; ``log_file`` gets every line of the log unchanged.

    With ``problems_only`` set, only warnings and errors of the log are shown.
    """

    def __init__(
        self, console: Console, *, verbose: bool = False, log_file: BinaryIO | None = None
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._log_file = log_file
        self._status: Status | None = None
        self._log_file_failed = False
        self.problems_only = False
        self._printed: deque[str] = deque(maxlen=TAIL_LINES)
        self._models: tuple[str, ...] = ()
        self._started_at = time.monotonic()

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show a spinner, where there is a terminal, while the server starts."""
        with self._console.status("starting tritonserver") as self._status:
            yield
        self._status = None

    @contextmanager
    def lines_of_failure(self) -> Iterator[None]:
        """If the server fails, show those of its last lines that were not shown before."""
        try:
            yield
        except ServerFailed as failed:
            for line in failed.log_lines:
                if line not in self._printed:
                    self._print(Text("\n".join(f"  | {part}" for part in line.splitlines())))
            raise

    def problem(self, text: str) -> None:
        """A line of ``serve``'s own about an error."""
        self._own("error", text)

    def say(self, text: str) -> None:
        """A line of ``serve``'s own."""
        self._own("info", text)

    def warning(self, text: str) -> None:
        self._own("warning", f"warning: {text}")

    def _own(self, severity: str, text: str) -> None:
        """Show the line with its time, and write it to the log file in the form of Triton's."""
        date, now = time.strftime("%m%d %H:%M:%S").split()
        self._keep(f"{severity[0].upper()}{date} {now} {os.getpid()} serve:0] {text}")
        self._print(Text(f"{now} {text}", style=_STYLES.get(severity, "")))

    def log(self, line: LogLine) -> None:
        self._keep(line.raw)
        if self._verbose:
            self._print(Text(line.raw))
        elif line.noteworthy and (line.problem or not self.problems_only):
            self._printed.append(line.readable)
            self._print(Text(line.readable, style=_STYLES.get(line.severity, "")))

    def _keep(self, line: str) -> None:
        """Write a line to the log file; if that fails, warn once and go on."""
        if self._log_file is None:
            return
        try:
            self._log_file.write(line.encode() + b"\n")
        except OSError as error:
            told, self._log_file_failed = self._log_file_failed, True
            if not told:
                self.warning(f"the log file cannot be written and misses lines: {error.strerror}")
        else:
            self._log_file_failed = False

    def starting(self, models: tuple[str, ...]) -> None:
        self._models = models
        self._started_at = time.monotonic()
        self._print(Text(f"loading {len(models)} models: {', '.join(models)}"))
        self._show_progress(0)

    def model_ready(self, model: str, ready: int) -> None:
        seconds = time.monotonic() - self._started_at
        line = f"  ready {ready}/{len(self._models)}  {model}  ({seconds:.1f} s)"
        self._print(Text(line, style="green"))
        self._show_progress(ready)

    def _show_progress(self, ready: int) -> None:
        if self._status is not None:
            self._status.update(f"loading models, {ready} of {len(self._models)} ready")

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def announcement(server: TritonServer, health_port: int, api: tuple[str, str] | None = None) -> str:
    """The server's addresses, and a curl command to try it.

    ``api``: the URL of the OpenAI API, and a curl command for that.
    """
    health = f"http://{server.host}:{health_port}/health/ready"
    return "\n".join(
        (
            *([] if api is None else [f"OpenAI   {api[0]}/v1"]),
            f"HTTP     {server.public_http_url}",
            f"gRPC     {server.grpc_url}",
            f"metrics  {server.metrics_url}",
            f"health   {health}",
            "",
            _curl(server) if api is None else api[1],
        )
    )


def _curl(server: TritonServer) -> str:
    if BLS not in server.models:
        return f"curl -i{curl_tls(server.settings)} {server.public_http_url}/v2/health/ready"
    url = f"{server.public_http_url}/v2/models/{BLS}/generate"
    request = '"text_input": "Once upon a time", "max_tokens": 32'
    if server.settings.decoupled is not False:  # else there are no streams
        url, request = url + "_stream", request + ', "stream": true'
    url = f"{curl_tls(server.settings)} {url}"
    return f"curl -sN{url} -H 'Content-Type: application/json' -d '{{{request}}}'"


def show_error(console: Console, error: TrtllmBlsError) -> None:
    """One line that says what to do."""
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
