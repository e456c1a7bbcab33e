"""``trtllm-bls serve`` as a process of its own, over a repository of models."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import psutil

from tests.helpers.ports import serve_ports
from tests.helpers.server_settings import ROOT


def good(url: str) -> dict[str, Any]:
    """A health endpoint's answer, which is a good one. ``serve`` tells it before it says so."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return dict(json.load(answer))


class Lines:
    """What a process writes to a pipe, up to its end. The process never waits for who reads it."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self._lines.put(line)
        self._lines.put(None)

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = self._lines.get()
        if line is None:
            self._lines.put(None)
            raise StopIteration
        return line

    def so_far(self) -> str:
        """What was not read yet, without waiting."""
        return "".join(filter(None, (self._lines.get() for _ in range(self._lines.qsize()))))


class Served:
    """``trtllm-bls serve`` as a process of its own, ready."""

    def __init__(self, repository: Path | None, *more: str) -> None:
        services = ["http", "grpc", "metrics", "health"]
        services += ["openai"] * ("--openai-port" in more)  # which counts, since it comes later
        words = [
            "serve",
            *serve_ports(),
            *("--openai-port", "0"),  # none
            *(["--model-repository", str(repository)] if repository else []),
            *("--exit-timeout", "20", "--ready-timeout", "200"),
            *more,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trtllm_bls.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.process.stdout and self.process.stderr
        self.output, self.errors = Lines(self.process.stdout), Lines(self.process.stderr)
        try:
            lines = list(takewhile(str.strip, self.output))
            told = [
                (name, value.strip()) for name, value in (line.split(maxsplit=1) for line in lines)
            ]
            self.urls = dict(each for each in told if each[0] != "process")
            assert len(self.urls) == len(services)
            named = (value.split(maxsplit=1) for name, value in told if name == "process")
            self.pids = {name: int(pid) for pid, name in named}  # the last of each name
            self.curl = next(self.output)
            assert good(self.urls["health"])["restarts"] == 0
        except BaseException:  # nobody else would end it, or tell what it wrote
            self.process.terminate()
            print(self.errors.so_far(), file=sys.stderr)
            raise
        (self.guard,) = self.children(self.process.pid, "guard.py")
        self.stub, *_ = self.children(self.server.pid, "triton_python")
        self.prefix = self.stub.cmdline()[2].rsplit("_", 1)[0]

    @property
    def server(self) -> psutil.Process:
        """tritonserver, which has another guard each time that it is started again."""
        (guard,) = self.children(self.process.pid, "guard.py")
        return self.children(guard.pid, "tritonserver")[0]

    def everything(self) -> list[psutil.Process]:
        """All processes of this ``serve``."""
        return [*psutil.Process(self.process.pid).children(recursive=True), self.own]

    @property
    def own(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def children(self, parent: int, word: str) -> list[psutil.Process]:
        """Those with ``word`` in their command line."""
        found = []
        for child in psutil.Process(parent).children():
            with suppress(psutil.NoSuchProcess):
                found += [child] if any(word in each for each in child.cmdline()) else []
        return found

    def wait_for_line(self, word: str) -> str:
        """Read standard error up to the line that holds ``word``."""
        return next(line for line in self.errors if word in line)

    def end(self) -> tuple[int, str]:
        """Exit code and remaining standard error."""
        return self.process.wait(60), "".join(self.errors)
