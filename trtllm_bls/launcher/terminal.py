"""What ``serve`` and ``demo`` show: progress, readable logs, addresses, errors.

Owns texts and colours. Progress and logs go to standard error, the addresses to standard output.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.launcher.listener import Listener
from trtllm_bls.launcher.logs import TAIL_LINES, LogLine
from trtllm_bls.launcher.server import ServerFailed, TritonServer

_STYLES = {"warning": "yellow", "error": "red", "fatal": "bold red"}
_TEXT_MODEL = "tensorrt_llm_bls"


class Terminal(Listener):
    """Shows one server's start, log and end; ``log_file`` gets every line of its log as it is.

    With ``problems_only`` set, lines of the log below a warning are not shown.
    """

    def __init__(
        self, console: Console, *, verbose: bool = False, log_file: TextIO | None = None
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._log_file = log_file
        self._status: Status | None = None
        self.problems_only = False
        self._shown: deque[str] = deque(maxlen=TAIL_LINES)
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
        """If the server fails, show those of its last lines that were not shown as they came."""
        try:
            yield
        except ServerFailed as failed:
            for line in failed.log_lines:
                if line not in self._shown:
                    self._print(Text("\n".join(f"  | {part}" for part in line.splitlines())))
            raise

    def say(self, text: str) -> None:
        """One line of our own."""
        self._print(Text(text))

    def log(self, line: LogLine) -> None:
        if self._log_file is not None:
            self._log_file.write(line.raw + "\n")
            self._log_file.flush()
        if self._verbose:
            self._print(Text(line.raw))
        elif line.noteworthy and (line.problem or not self.problems_only):
            self._shown.append(line.readable)
            self._print(Text(line.readable, style=_STYLES.get(line.severity, "")))

    def warning(self, text: str) -> None:
        self._print(Text(f"warning: {text}", style="yellow"))

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


def announcement(server: TritonServer, api: tuple[str, str] | None = None) -> str:
    """Where the server is, and a command that shows it working.

    ``api`` is the same of the OpenAI API beside it.
    """
    return "\n".join(
        (
            *([] if api is None else [f"OpenAI   {api[0]}/v1"]),
            f"HTTP     {server.http_url}",
            f"gRPC     {server.grpc_url}",
            f"metrics  {server.metrics_url}",
            "",
            _curl(server) if api is None else api[1],
        )
    )


def _curl(server: TritonServer) -> str:
    if _TEXT_MODEL not in server.models:
        return f"curl -i {server.http_url}/v2/health/ready"
    url = f"{server.http_url}/v2/models/{_TEXT_MODEL}/generate"
    request = '"text_input": "Once upon a time", "max_tokens": 32'
    if server.settings.decoupled is not False:  # else there are no streams
        url, request = url + "_stream", request + ', "stream": true'
    return f"curl -sN {url} -H 'Content-Type: application/json' -d '{{{request}}}'"


def show_error(console: Console, error: TrtllmBlsError) -> None:
    """One line that says what to do."""
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
