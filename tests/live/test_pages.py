"""Pages that one follows: their commands, run in order, give the output that they show."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.served import Served
from tests.helpers.server_settings import ROOT
from tests.helpers.waiting import until

BLOCK = re.compile(r"^```\n(.*?)^```", re.M | re.S)
# A command goes on where its line ends with a backslash or inside quotes.
COMMAND = re.compile(r"^\$ ((?:[^'\n]|'[^']*'|(?<=\\)\n)*)\n", re.M)
SERVE = re.compile(r"^(?:\$ )?(?:\.venv/bin/trtllm-bls|make) serve\b(.*)$", re.M)


def blocks(name: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


def pattern(shown: str) -> str:
    """What matches an output that a page shows: any number for a number, anything for an …"""
    parts = re.split(r"((?:\b[0-9a-f]+)?…|\d+(?:\.\d+)?)", re.sub(r"\s+", " ", shown.strip()))
    number = r"\d+(?:\.\d+)?"
    return "".join(
        ".*" if part.endswith("…") else number if part[:1].isdigit() else re.escape(part)
        for part in parts
    )


def shows(output: str, shown: str) -> bool:
    return re.search(pattern(shown), re.sub(r"\s+", " ", output), re.S) is not None


class Followed:
    """A server that a page's line has started, on ports of its own."""

    def __init__(self, served: Served, moved: dict[str, str]) -> None:
        self.served = served
        self._moved = moved  # what the page names, and what stands for it here

    def command(self, command: str) -> str:
        for name, own in self._moved.items():
            command = command.replace(name, own)
        return command

    def run(self, block: str) -> None:
        """The commands of a block, each until it gives what is shown; lines of the server."""
        if not block.startswith("$"):
            self.writes({line for line in block.strip().split("\n") if line != "…"})
            return
        _, *parts = COMMAND.split(block)
        for command, shown in zip(parts[::2], parts[1::2], strict=True):
            words = ["bash", "-c", self.command(command)]
            until(lambda words=words, shown=shown: shows(output(words), shown))

    def writes(self, lines: set[str]) -> None:
        """Read the server's terminal until it has had each of these lines, in any order."""
        for written in self.served.errors:
            lines = {line for line in lines if not shows(written, line)}
            if not lines:
                return
        raise AssertionError(f"the server ended without {lines}")


def output(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)
    return done.stdout + done.stderr


@contextmanager
def following(name: str, moved: dict[str, str] | None = None) -> Iterator[Followed]:
    """The server of the page's line; on leaving it has drained and ended with exit code 0."""
    moved = moved or {}
    options = next(filter(None, map(SERVE.search, blocks(name))))[1]
    if made := re.search(r'SERVE_OPTIONS="([^"]*)"', options):
        options = made[1]
    elif "PIP_EXTRA" in options:
        options = ""
    for named, own in moved.items():
        options = options.replace(named, own)
    (port,) = unused_ports(1)
    served = Served(None, *shlex.split(options), "--openai-port", str(port))
    for service, usual in (("HTTP", 8000), ("health", 8003), ("OpenAI", 9000)):
        own = re.search(r":(\d+)", served.urls[service].removeprefix("http:"))
        assert own
        moved[f"localhost:{usual}"] = f"127.0.0.1:{own[1]}"
    ours = f"{Path(sys.executable).parent}/trtllm-bls generate --url {served.urls['gRPC']}"
    moved[".venv/bin/trtllm-bls generate"] = ours
    try:
        yield Followed(served, moved)
        served.process.terminate()
        assert served.end()[0] == 0
    finally:
        served.process.kill()
        served.guard.wait(60)


@pytest.mark.slow
def test_the_tutorial_and_the_page_on_tool_calls() -> None:
    """On the demo model, which both start; at last the tutorial kills the engine by its pid."""
    start, addresses, *steps = blocks("tutorial.md")
    first, *calls = blocks("tool-calls.md")
    assert first == start and len(calls) == 2 and len(steps) == 10
    with following("tutorial.md") as followed:
        served = followed.served
        told = [f"{name} {url}" for name, url in served.urls.items()]
        told += [f"process {pid} {name}" for name, pid in served.pids.items()]
        for line in addresses.strip().split("\n")[1:]:
            assert line == "…" or shows("\n".join(told), line), line
        for block in calls:
            followed.run(block)
        followed._moved["kill -9 4725"] = f"kill -9 {served.pids['model tensorrt_llm']}"
        for block in steps:
            followed.run(block)


@pytest.mark.slow
def test_the_page_on_an_engine_of_one_s_own(tmp_path: Path) -> None:
    """Copied into a repository as the page says."""
    begin, ask = blocks("openai-python-backend.md")
    moved = {"/tmp/own": str(tmp_path / "own")}
    for command in begin.split("\n")[:2]:
        words = command.removeprefix("$ ").replace("/tmp/own", moved["/tmp/own"])
        subprocess.run(words, shell=True, check=True, cwd=ROOT, timeout=280)
    with following("openai-python-backend.md", moved) as followed:
        followed.run(ask)


@pytest.mark.slow
def test_the_page_on_the_pytorch_engine() -> None:
    """With the stand-in of its first line."""
    begin, ask, _ = blocks("pytorch-engine.md")
    (port,) = unused_ports(1)
    moved = {"50051": str(port), ".venv/bin/python": sys.executable}
    line = begin.split("\n")[0].removeprefix("$ ").removesuffix("&")
    for named, own in moved.items():
        line = line.replace(named, own)
    with Child(shlex.split(line)) as service:
        assert "listening" in service.output.next()
        with following("pytorch-engine.md", moved) as followed:
            followed.run(ask)
