"""Servers that tests share and programs that tests start: a run says it when one dies or stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import watched as servers
from tests.helpers.children import Child
from tests.helpers.fake_tritonserver import installation
from tests.helpers.server_settings import ROOT, free_ports
from tests.helpers.ticking_models import TICKER, write_model
from tests.helpers.waiting import until
from tests.helpers.watched import ServerEnded, check, logs, watched

TALKS = "print('the last words', flush=True)\nserve()"


def test_the_first_test_that_meets_a_dead_server_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its signal and last lines; the next tests have a new server at the same address."""
    for name in ("_ENDING_S", "_NOTICED_S"):  # the end comes for sure, however late
        monkeypatch.setattr(servers, name, 60.0)
    write_model(tmp_path / "models", "m", TICKER)
    settings = free_ports(
        server=installation(tmp_path / "triton", TALKS), model_repository=tmp_path / "models"
    )
    with watched(settings, "shared") as server:
        url = server.http_url
        check("first", ["shared"])
        assert server.process is not None
        server.process.kill()
        check("another group's", ["other"])
        with pytest.raises(ServerEnded, match=r"(?s)shared: .*\(SIGKILL.*the last words"):
            check("second", ["shared"], failed=True)
        check("third", ["shared"])
        assert (server.running, server.http_url) == (True, url)
        assert "the last words" in dict(logs(["shared"])).popitem()[1]
        server.process.kill()
        with pytest.raises(ServerEnded, match="SIGKILL"):
            check("fourth", ["shared"], failed=True)
        for test in ("fifth", "sixth"):
            with pytest.raises(ServerEnded, match="is gone: it ended in second and in fourth"):
                check(test, ["shared"])


def test_a_shared_server_that_does_not_start_shows_its_lines(tmp_path: Path) -> None:
    """They are nowhere else."""
    write_model(tmp_path / "models", "m", TICKER)
    program = "print('no such device', flush=True)\nsys.exit(3)"
    settings = free_ports(
        server=installation(tmp_path / "triton", program), model_repository=tmp_path / "models"
    )
    with (
        pytest.raises(ServerEnded, match=r"(?s)exit code 3.*no such device"),
        watched(settings, "shared"),
    ):
        pass


def test_waiting_for_a_child_says_what_it_wrote() -> None:
    """Both of its outputs are read, however much it writes."""
    script = "import sys, time; print('x' * 300_000); print('y' * 300_000, file=sys.stderr)"
    with Child(
        [sys.executable, "-c", f"{script}; print('up', flush=True); time.sleep(1000)"]
    ) as child:
        assert child.output.wait_for("up") == "up\n"
        with pytest.raises(AssertionError, match=r"(?s)waited 0 s for the end.*runs.*stdout.*up"):
            child.end(0.1)
    assert not child.running
    assert "ended with -9" in child.report()


RUN = """
import subprocess, sys, time
import pytest
from tests.helpers.children import Child

def test_leaves_a_child():
    global left
    left = subprocess.Popen(["sleep", "1000"])

def test_has_a_child():
    script = "import time; print('from the child', flush=True); time.sleep(1003)"
    Child([sys.executable, "-c", script]).output.next()
    assert False

@pytest.fixture(scope="session")
def shared():
    with subprocess.Popen(["sleep", "1001"]) as process:
        yield process
        process.kill()

def test_shares_a_child(shared):
    pass

def test_finds_it_again(shared):
    assert shared.poll() is None

def test_leaves_a_grandchild():
    words = ["sh", "-c", "setsid sleep 1002 >/dev/null 2>&1 &"]
    subprocess.run(words, check=True, timeout=60)

async def test_waits():
    import asyncio
    await asyncio.Event().wait()
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_run_names_what_its_tests_leave_behind(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Children of one test, and whatever else is there at the end; the coroutine that waits."""
    tests = tmp_path / "tests"  # below the root, as ours
    tests.mkdir()
    (tests / "test_it.py").write_text(RUN)
    (tests / "conftest.py").write_text(
        "import tests.conftest as own\nfrom tests.conftest import *\nown.ASYNC_TEST_S = 0.1\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += [*workers, "-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path), str(tests)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    failures = [line.split()[1].rpartition("::")[2] for line in lines if line.startswith("FAILED")]
    assert failures == ["test_has_a_child", "test_waits"]
    errors = [line.split()[1].rpartition("::")[2] for line in lines if line.startswith("ERROR")]
    assert errors == ["test_leaves_a_child", "test_has_a_child"]
    assert "these processes outlived the test and are killed now" in done.stdout
    assert "sleep 1000" in done.stdout
    assert "from the child" in done.stdout
    assert "asyncio.Event().wait()" in done.stdout
    assert "error: this process outlived the tests and is killed now" in done.stdout
    assert "sleep 1002" in done.stdout
    assert "sleep 1001" not in done.stdout
    until(lambda: not any(map(_sleeps, Path("/proc").glob("[0-9]*/cmdline"))))


def _sleeps(command: Path) -> bool:
    try:
        return command.read_bytes() in (b"sleep\x001000\0", b"sleep\x001002\0")
    except OSError:
        return False
