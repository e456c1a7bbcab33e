"""The OpenAI API's process as ``serve`` sees it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from tests.helpers.ports import unused_ports
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import until
from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.errors import SettingsError
from trtllm_bls.operate import http_process
from trtllm_bls.operate.http_process import HttpProcess, check
from trtllm_bls.operate.supervisor import ProcessStopped
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.status import ProcessStatus, StatusDirectory, start_of
from trtllm_bls.settings.command_options import ServeSettings


def server_beside(tmp_path: Path, **more: Any) -> Any:
    """A server whose engine is elsewhere, and cannot be reached."""
    port, front_port = unused_ports(2)
    failures: list[str] = []
    return SimpleNamespace(
        settings=ServeSettings(
            openai_port=port,
            http_port=front_port,
            engine="trtllm://127.0.0.1:1",
            model=DEMO / "target",
            **more,
        ),
        host="127.0.0.1",
        grpc_url="127.0.0.1:1",
        http_url="http://127.0.0.1:1",
        metrics_url="http://127.0.0.1:1/metrics",
        repository=REPOSITORY,
        workdir=tmp_path,
        status_dir=tmp_path,
        environment=dict(os.environ)
        | {"TRTLLM_BLS_STATUS_DIR": str(tmp_path), "TRTLLM_BLS_MODEL_DIR": str(DEMO / "target")},
        stop_requested=False,
        running=True,
        failures=failures,
        fail=failures.append,
    )


def answering(server: Any) -> list[str]:
    """A program that answers at the port of the API, which makes it ready."""
    port = str(server.settings.openai_port)
    return [sys.executable, "-m", "http.server", "-b", server.host, port]


def test_a_dead_api_is_started_again_unless_the_server_stops(tmp_path: Path) -> None:
    """Why, and that it answers again, is told once each."""
    server, told = server_beside(tmp_path), list[str | None]()
    api = HttpProcess(server, True, told.append, lambda _: None)
    try:
        api.start()
        api.keep()
        api.kill()
        until(lambda: told[1:] == [None])
        assert told[0] == "the HTTP program has ended (SIGKILL, perhaps out of memory)"
        server.stop_requested = True
        api.kill()
        until(lambda: "http" not in {thread.name for thread in threading.enumerate()})
    finally:
        api.close()
    assert (told[2:], server.failures) == ([], [])


def test_requests_call_the_model_as_serve_was_told(tmp_path: Path) -> None:
    """By several names; a LoRA adapter has one too."""
    server = server_beside(tmp_path, served_model_names=("llama", "claude"), loras=("math=7",))
    api = HttpProcess(server, True, lambda _: None, lambda _: None)
    try:
        api.start()
        port = server.settings.openai_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20) as answer:
            cards = json.load(answer)["data"]
    finally:
        api.close()
    assert [card["id"] for card in cards] == ["llama", "claude", "math"]


def test_the_api_chooses_its_processes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads there whether the model remembers prompts; alone, the other program does not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    server = server_beside(tmp_path, max_streams=128)
    server.public_http_url = "http://127.0.0.1:1"
    for with_api, workers in ((True, "auto"), (False, "2")):
        http = HttpProcess(server, with_api, lambda _: None, lambda _: None)
        assert f"--workers={workers}" in http.command


def test_a_dead_api_ends_a_server_that_is_not_to_be_started_again(tmp_path: Path) -> None:
    """``--on-failure exit`` holds for both."""
    server, told = server_beside(tmp_path, on_failure="exit"), list[str | None]()
    api = HttpProcess(server, True, told.append, lambda _: None)
    try:
        api.start()
        api.keep()
        api.kill()
        until(lambda: server.failures)
    finally:
        api.close()
    assert server.failures == ["the HTTP program has ended (SIGKILL, perhaps out of memory)"]
    assert told == []


def test_a_program_that_two_looks_in_a_row_find_stopped_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look may fall into the moment between a SIGSTOP and its SIGCONT."""
    stopped, runs = psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING
    states = [stopped, runs, stopped, stopped]
    monkeypatch.setattr(psutil.Process, "status", lambda process: states.pop(0) if states else runs)
    monkeypatch.setattr(http_process, "_LOOK_S", 0.01)
    server, told = server_beside(tmp_path, on_failure="exit"), list[str]()
    api = HttpProcess(server, True, lambda _: None, told.append)
    api.command = answering(server)
    try:
        api.start()
        api.keep()
        until(lambda: server.failures)
    finally:
        api.close()
    killed = [line for line in told if line.startswith("process")]
    assert killed == [f"process {api.pid} of the HTTP program was stopped: killed it"]
    assert states == []


def test_a_worker_whose_event_loop_is_stuck_is_killed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other threads still answer. A stuck process of the server is not this program's."""
    monkeypatch.setattr(http_process, "_LOOK_S", 0.01)
    server, told = server_beside(tmp_path), list[str]()
    api = HttpProcess(server, True, lambda _: None, told.append)
    workers = f"sleep 60 & sleep 60 & {shlex.join(answering(server))} & trap 'kill 0' TERM; wait"
    api.command = ["sh", "-c", workers]
    files = StatusDirectory(tmp_path)
    try:
        api.start()
        sleeping = [c.pid for c in psutil.Process(api.pid).children() if c.name() == "sleep"]
        stuck, well = sleeping
        now = time.monotonic()
        late = now - server.settings.stall_timeout - 1
        for pid, loop_at in ((stuck, late), (well, now + 60), (os.getpid(), late)):
            files.write(ProcessStatus(pid, now, loop_at, 0, 0))
        api.keep()
        until(lambda: start_of(stuck) is None)
        until(lambda: {status.pid for status in files.read()} == {well, os.getpid()})
    finally:
        api.close()
    reason = f"had its event loop stuck for {server.settings.stall_timeout} s"
    killed = [line for line in told if line.startswith("process")]
    assert set(killed) == {f"process {stuck} of the HTTP program {reason}: killed it"}


def test_an_api_is_not_waited_for_when_the_server_has_died(tmp_path: Path) -> None:
    """``serve`` then tells of the server at once, rather than of an API that found no engine."""
    port, front_port = unused_ports(2)
    server = SimpleNamespace(
        settings=ServeSettings(openai_port=port, http_port=front_port),
        host="127.0.0.1",
        grpc_url="127.0.0.1:1",
        http_url="http://127.0.0.1:1",
        metrics_url="http://127.0.0.1:1/metrics",
        repository=REPOSITORY,
        workdir=tmp_path,
        environment=dict(os.environ) | {"TRTLLM_BLS_STATUS_DIR": str(tmp_path)},
        stop_requested=False,
        running=False,
    )
    lines: list[str] = []
    api = HttpProcess(cast(TritonServer, server), True, lines.append, lines.append)
    try:
        with pytest.raises(ProcessStopped):
            api.start()
    finally:
        api.kill()
        api.close()


def test_keys_are_not_asked_for_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP port would be open without a word."""
    monkeypatch.delenv("TRTLLM_BLS_API_KEYS", raising=False)
    with pytest.raises(SettingsError, match="--http-keys: there are no keys"):
        check(ServeSettings(http_keys=True, openai_port=0))
