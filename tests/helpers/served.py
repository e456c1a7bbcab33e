"""``trtllm-bls serve`` as a process of its own, over a repository of models."""

from __future__ import annotations

import json
import sys
import urllib.request
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.children import Child
from tests.helpers.ports import serve_ports


def good(url: str) -> dict[str, Any]:
    """A health endpoint's answer, which is a good one. ``serve`` tells it before it says so."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return dict(json.load(answer))


class Served:
    """``trtllm-bls serve`` as a process of its own, ready."""

    def __init__(self, repository: Path | None, *more: str) -> None:
        services = {"HTTP", "gRPC", "metrics", "health"}
        if "--openai-port" in more:  # It comes later than the 0 below, so it counts.
            services |= {"OpenAI"}
        words = [
            "serve",
            *serve_ports(),
            *("--openai-port", "0"),  # none
            *(["--model-repository", str(repository)] if repository else []),
            *("--exit-timeout", "20", "--ready-timeout", "200"),
            *more,
        ]
        self.child = Child([sys.executable, "-m", "trtllm_bls.cli", *words], name="serve")
        self.process = self.child.process
        self.output = self.child.output
        self.errors = self.child.errors
        try:
            lines = list(takewhile(str.strip, self.output))
            told = [
                (name, value.strip()) for name, value in (line.split(maxsplit=1) for line in lines)
            ]
            self.urls = dict(each for each in told if each[0] != "process")
            assert self.urls.keys() == services, f"serve told {sorted(self.urls)}"
            named = (value.split(maxsplit=1) for name, value in told if name == "process")
            self.pids = {name: int(pid) for pid, name in named}  # the last of each name
            self.curl = self.output.next()
            assert good(self.urls["health"])["restarts"] == 0
        except BaseException:  # nobody else would end it
            self.child.terminate()
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
        return self.errors.wait_for(word)

    def end(self) -> tuple[int, str]:
        """Exit code and remaining standard error."""
        return self.child.end(), self.errors.rest()
