"""Runs published clients of the OpenAI, Responses and Messages APIs, and writes what they did.

``python -m tests.clients.run --quick`` is for CI: what it has not run in 3 minutes is told and
fails nothing. Without it terminal agents and the larger frameworks run too. ``--write`` puts the
result into docs/clients.md. Packages come from npm and PyPI at their newest versions; one that
cannot be installed is a failure, unless there is no npm or pip at all. ``SUITES`` names a directory
of suites that are no packages: each folder in it has an executable ``run``, which is given BASE_URL
and MODEL.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents import AGENTS, Agent
from tests.clients.model import MODEL, obedient_server

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- begin: clients -->\n", "<!-- end: clients -->\n"
_LIMIT_S = 240
_QUICK_S = 180
# What may fail, and why: the client, and how its report begins.
MAY_FAIL: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Program:
    """A file of ``programs``, with the packages that it needs; the first gives the version."""

    name: str
    file: str
    packages: tuple[str, ...]
    quick: bool = True


PROGRAMS_OF_NODE = (
    Program("openai (Node)", "openai_node.mjs", ("openai", "zod")),
    Program("@anthropic-ai/sdk (Node)", "anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    Program(
        "AI SDK",
        "ai_sdk.mjs",
        (
            "ai",
            "zod",
            *(
                f"@ai-sdk/{name}"
                for name in ("openai", "anthropic", "open-responses", "openai-compatible")
            ),
        ),
    ),
    Program("@openai/agents (Node)", "agents_node.mjs", ("@openai/agents", "openai", "zod")),
)
PROGRAMS_OF_PYTHON = (
    Program("openai (Python)", "openai_python.py", ("openai",)),
    Program("anthropic (Python)", "anthropic_python.py", ("anthropic",)),
    Program("openai-agents (Python)", "agents_python.py", ("openai-agents",), quick=False),
    Program(
        "LangChain",
        "langchain_python.py",
        ("langchain", "langchain-openai", "langchain-anthropic"),
        quick=False,
    ),
    Program(
        "LlamaIndex",
        "llamaindex_python.py",
        ("llama-index-llms-openai-like", "llama-index-core"),
        quick=False,
    ),
    Program(
        "Pydantic AI", "pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]",), quick=False
    ),
    Program("smolagents", "smolagents_python.py", ("smolagents[openai]",), quick=False),
    Program("Claude Agent SDK", "claude_agent_python.py", ("claude-agent-sdk",), quick=False),
    Program("aider", "aider_python.py", ("aider-chat",), quick=False),
)


class TimeIsUp(Exception):
    """What is left is not run any more."""


class NotInstalled(Exception):
    """Why a package could not be installed."""


@dataclass(frozen=True)
class Clock:
    """When all has to have ended, as ``time.monotonic`` tells it."""

    end: float = float("inf")

    def run(
        self, command: list[str], most_s: float = _LIMIT_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program. Raises ``TimeIsUp``, and ``TimeoutExpired`` after ``most_s``."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeIsUp
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=min(left, most_s), **options
            )
        except subprocess.TimeoutExpired:
            if left > most_s:
                raise
            raise TimeIsUp from None


@contextmanager
def _told(what: str) -> Iterator[list[Row]]:
    """Tells if there is no time left for something; a failed install becomes a row."""
    rows: list[Row] = []
    try:
        yield rows
    except TimeIsUp:
        print(f"NOT RUN: no time was left for {what}", flush=True)
    except NotInstalled as error:
        rows.append(Row(what, "", "", "is installed", str(error)))


@dataclass(frozen=True)
class Row:
    """What one client did: ``result`` is ``ok``, or the reason why not."""

    client: str
    version: str
    api: str
    did: str
    result: str

    @property
    def excuse(self) -> str:
        return next(
            (
                why
                for (client, did), why in MAY_FAIL.items()
                if client == self.client and self.did.startswith(did)
            ),
            "",
        )


def checks(
    clock: Clock,
    client: str,
    version: str,
    command: list[str],
    environment: dict[str, str],
    work: Path,
) -> Iterator[Row]:
    """What a program's lines tell; its end with another code than 0 is a failure, too."""
    try:
        done = clock.run(command, cwd=work, env=environment)
    except subprocess.TimeoutExpired:
        yield Row(client, version, "", "runs", f"no end within {_LIMIT_S} s")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("CHECK ")]
    if not (lines or done.returncode):
        yield Row(client, version, "", "runs", f"it told nothing: {done.stdout[-300:]}")
    for line in lines:
        told = json.loads(line.removeprefix("CHECK "))
        yield Row(client, version, told["api"].strip(), told["did"], told["result"])
    if done.returncode:
        yield Row(client, version, "", "runs", (done.stderr or done.stdout)[-600:])


def works(*command: str) -> bool:
    """Whether the program is there and tells its version."""
    try:
        return not subprocess.run(
            [*command, "--version"], capture_output=True, timeout=120
        ).returncode
    except OSError:
        return False


def node_rows(
    clock: Clock, packages: Path, environment: dict[str, str], quick: bool
) -> Iterator[Row]:
    """Rows of the programs for Node; a row with the reason where they cannot be installed."""
    if not works("npm"):
        print("SKIPPED: there is no npm, so no client of npm was run")
        return
    programs = [each for each in PROGRAMS_OF_NODE if each.quick or not quick]
    names = sorted({f"{name}@latest" for each in programs for name in each.packages})
    with _told("clients of npm") as rows:
        npm_install(clock, packages, names)
    yield from rows
    if not all((packages / "node_modules" / each.packages[0]).is_dir() for each in programs):
        return
    for file in PROGRAMS.glob("*.mjs"):
        shutil.copy(file, packages)
    for each in programs:
        version = npm_version(packages, each.packages[0])
        with _told(each.name):
            command = ["node", each.file]
            yield from checks(clock, each.name, version, command, environment, packages)


def npm_install(clock: Clock, packages: Path, names: list[str]) -> None:
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-save", "--loglevel=error"]
    done = clock.run([*command, *names], most_s=900, cwd=packages)
    if done.returncode:
        raise NotInstalled(done.stderr.strip()[-600:])


def npm_version(packages: Path, name: str) -> str:
    found = json.loads((packages / "node_modules" / name / "package.json").read_text())
    return str(found["version"])


def python_rows(
    clock: Clock, packages: Path, environment: dict[str, str], quick: bool
) -> Iterator[Row]:
    """Rows of the programs for Python: the quick ones need what this environment has."""
    for each in PROGRAMS_OF_PYTHON:
        name = re.split(r"\[", each.packages[0])[0]
        with _told(each.name) as rows:
            if each.quick:
                version, python = importlib.metadata.version(name), Path(sys.executable)
            elif quick:
                continue
            else:
                python = packages / name / "bin" / "python"
                if not python.exists():
                    venv.create(packages / name, with_pip=True)
                if not works(str(python), "-m", "pip"):
                    print(f"SKIPPED: there is no pip for {each.name}")
                    continue
                pip = [str(python), "-I", "-m", "pip", "--disable-pip-version-check", "-q"]
                done = clock.run([*pip, "install", "--upgrade", *each.packages], most_s=900)
                if done.returncode:
                    raise NotInstalled(done.stderr.strip()[-600:])
                told = f"import importlib.metadata as m; print(m.version({name!r}))"
                version = clock.run([str(python), "-c", told]).stdout.strip()
            command = [str(python), str(PROGRAMS / each.file)]
            yield from checks(clock, each.name, version, command, environment, packages)
        yield from rows


def agent_rows(packages: Path, url: str, names: list[str]) -> Iterator[Row]:
    """Rows of programs for the terminal; each does a task in a folder of its own."""
    if not works("npm"):
        print("SKIPPED: there is no npm, so no program for the terminal was run")
        return
    for agent in AGENTS:
        if names and agent.name not in names:
            continue
        folder = packages / agent.name.replace(" ", "-")
        with _told(agent.name) as rows:
            npm_install(Clock(), folder, [f"{agent.npm}@latest"])
            yield from _tasks(agent, folder, url)
        yield from rows


def _tasks(agent: Agent, folder: Path, url: str) -> Iterator[Row]:
    version = npm_version(folder, agent.npm)
    for task in agent.tasks:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        (work / "home").mkdir(parents=True)
        try:
            task(work, folder / "node_modules" / ".bin", url)
            result = "ok"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"[-600:]
        yield Row(agent.name, version, agent.api, (task.__doc__ or "").strip().rstrip("."), result)


def suite_rows(clock: Clock, environment: dict[str, str]) -> Iterator[Row]:
    """Rows of suites that are no packages, such as Open Responses', vLLM's and Triton's."""
    directory = os.environ.get("SUITES")
    for suite in sorted(Path(directory).iterdir()) if directory else ():
        if (suite / "run").is_file():
            with _told(suite.name):
                command = [str(suite / "run")]
                yield from checks(clock, suite.name, "", command, environment, suite)


def table(rows: list[Row]) -> str:
    """The rows for the page, one for each client and API."""
    lines = ["| client | version | API | what it did | result |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        reason = row.excuse or " ".join(row.result.split())[:120].replace("|", r"\|")
        result = "works" if row.result == "ok" else reason
        lines.append(f"| {row.client} | {row.version} | {row.api} | {row.did} | {result} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end after 3 minutes")
    parser.add_argument("--write", action="store_true", help="write the table of docs/clients.md")
    parser.add_argument("--only", nargs="*", default=[], help="names of terminal agents")
    parser.add_argument("--packages", type=Path, default=ROOT / ".cache" / "clients")
    asked = parser.parse_args()
    packages = asked.packages.absolute()
    packages.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    clock = Clock(time.monotonic() + _QUICK_S) if asked.quick else Clock()
    with obedient_server() as api:
        told = {"BASE_URL": api.url, "MODEL": MODEL, "PYTHONPATH": str(PROGRAMS)}
        environment = {**os.environ, **told, "AI_SDK_LOG_WARNINGS": "false"}
        sources: list[Iterator[Row]] = []
        if not asked.only:
            sources.append(node_rows(clock, packages / "node", environment, asked.quick))
            sources.append(python_rows(clock, packages, environment, asked.quick))
        sources += [] if asked.quick else [agent_rows(packages, api.url, asked.only)]
        for source in [*sources, suite_rows(clock, environment)]:
            for row in source:
                rows.append(row)
                print(
                    f"{row.client} {row.version} · {row.api} · {row.did}: {row.result}", flush=True
                )
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + table(rows) + END + after, encoding="utf-8")
    failed = [row for row in rows if row.result != "ok" and not row.excuse]
    print(f"{len(rows)} checks, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
