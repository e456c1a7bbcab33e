"""What ``make test-clients`` tells of programs that it could not run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.clients import run
from tests.clients.agents import Agent
from tests.clients.run import Clock, agent_rows, node_rows, python_rows


def npm(folder: Path, lines: str) -> str:
    """A path on which there is such an npm alone."""
    folder.mkdir()
    script = folder / "npm"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 11 && exit 0\n{lines}\n')
    script.chmod(0o755)
    return str(folder)


def test_without_npm_its_clients_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not [*node_rows(Clock(), tmp_path, {}, True), *agent_rows(tmp_path, "", [])]
    assert capsys.readouterr().out.count("SKIPPED: there is no npm") == 2


def test_what_npm_and_pip_cannot_install_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", npm(tmp_path / "bin", "echo no such version >&2; exit 1"))
    monkeypatch.setattr(run, "AGENTS", [Agent("An agent", "an-agent", "chat", ())])
    rows = [*node_rows(Clock(), tmp_path / "node", {}, True), *agent_rows(tmp_path, "", [])]
    assert [(row.client, row.did, row.result) for row in rows] == [
        ("clients of npm", "is installed", "no such version"),
        ("An agent", "is installed", "no such version"),
    ]
    python = tmp_path / "absent" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$3" = --version ] && exit 0\necho no wheel >&2; exit 1\n')
    python.chmod(0o755)
    program = run.Program("Absent", "absent.py", ("absent",), quick=False)
    monkeypatch.setattr(run, "PROGRAMS_OF_PYTHON", [program])
    (row,) = python_rows(Clock(), tmp_path, {}, False)
    assert (row.client, row.did, row.result) == ("Absent", "is installed", "no wheel")


def test_what_has_no_time_left_is_told_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would only begin later, and what does not end in time."""
    monkeypatch.setenv("PATH", npm(tmp_path / "bin", "exec /bin/sleep 1000"))
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(run, "PROGRAMS", tmp_path)
    programs = [run.Program(name, "slow.py", ("pytest",)) for name in ("One", "Two")]
    monkeypatch.setattr(run, "PROGRAMS_OF_PYTHON", programs)
    assert not [*node_rows(Clock(time.monotonic() + 0.2), tmp_path / "node", {}, True)]
    assert not [*python_rows(Clock(time.monotonic() + 0.5), tmp_path, {}, True)]
    told = capsys.readouterr().out
    for name in ("clients of npm", "One", "Two"):
        assert f"NOT RUN: no time was left for {name}\n" in told


def test_a_program_that_tells_nothing_is_a_failure(tmp_path: Path) -> None:
    """Otherwise its row would be missing, and nobody would see it."""
    command = [sys.executable, "-c", "print('x CHECK {}')"]
    (row,) = run.checks(Clock(), "One", "", command, {}, tmp_path)
    assert row.result.startswith("it told nothing")


def test_a_program_that_never_ends_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there would be time."""
    monkeypatch.setattr(Clock.run, "__defaults__", (0.2,))
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    (row,) = run.checks(Clock(), "One", "", command, {}, tmp_path)
    assert row.result.startswith("no end within")
