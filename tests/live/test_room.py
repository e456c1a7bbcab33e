"""A server that runs out of file descriptors, or of shared memory, while it serves."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.served import Served, good
from tests.helpers.server_settings import ROOT
from tests.helpers.waiting import run_async
from tests.live.conftest import echo_settings
from trtllm_bls.client import Client
from trtllm_bls.errors import ClientError
from trtllm_bls.operate.health import ServerProcesses
from trtllm_bls.operate.tritonserver import TritonServer

pytestmark = pytest.mark.live
QUESTION = {"text_input": "Once upon a time " * 40, "max_tokens": 400}


@contextmanager
def without_descriptors(server: TritonServer) -> Iterator[None]:
    """No process of the server can open another file, socket or pipe."""
    assert server.process is not None
    before = {}
    for process in (server.process, *server.process.children()):
        before[process] = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (0, before[process][1]))
    try:
        yield
    finally:
        for process, limit in before.items():
            process.rlimit(psutil.RLIMIT_NOFILE, limit)


def running_process(server: TritonServer) -> psutil.Process:
    assert server.process is not None
    return server.process


def test_without_descriptors_what_runs_goes_on_and_later_all_is_well(tmp_path: Path) -> None:
    """Clients that are connected are answered; one that connects gets its own error in its own
    time, and is served once there are descriptors again. No process ends."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 0

    async def run(server: TritonServer) -> None:
        async with (
            Client(server.grpc_url) as connected,
            Client(
                server.grpc_url,
                keepalive_s=400,  # otherwise it would share the connection
            ) as newcomer,
        ):
            expected = (await connected.generate(**QUESTION)).text
            async with connected.stream(**QUESTION) as stream:
                text = (await anext(aiter(stream))).text
                with without_descriptors(server):
                    async for event in stream:
                        text += event.text
                    assert (await connected.generate(**QUESTION, deadline_s=60)).text == expected
                    told = ServerProcesses(running_process(server)).without_descriptors()
                    assert any("tritonserver has used its 0 file desc" in line for line in told)
                    with pytest.raises(ClientError):
                        await newcomer.generate(**QUESTION, deadline_s=2)
            assert text == expected
            assert (await newcomer.generate(**QUESTION, deadline_s=60)).text == expected

    with TritonServer(echo_settings(tmp_path)) as server:
        assert server.process is not None
        pids = {child.pid for child in server.process.children()}
        run_async(run(server))
        assert {child.pid for child in server.process.children()} == pids
        assert server.process.is_running()


@pytest.mark.slow
def test_a_server_that_stays_without_descriptors_is_started_again(repository: Path) -> None:
    """Whoever connected meanwhile, and was neither answered nor refused, has an end."""
    running = Served(repository, "--stall-timeout", "2")
    try:
        server = running.server
        # tritonserver's own port: the program in front of its HTTP port has descriptors of its own.
        host, _, port = running.urls["gRPC"].partition(":")
        server.rlimit(psutil.RLIMIT_NOFILE, (0, server.rlimit(psutil.RLIMIT_NOFILE)[1]))
        with socket.create_connection((host, int(port)), timeout=60) as waiting:
            waiting.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            told = running.wait_for_line("starting again")
            # The program in front of port 8000 may miss its answers by then, which is told, too.
            cause, *further, end = told.strip().split("; ")
            assert cause.endswith("tritonserver has used its 0 file descriptors")
            assert [line for line in further if "has answered nothing for" not in line] == []
            assert end == "starting again in 1 s"
            with suppress(ConnectionResetError):
                assert waiting.recv(1) == b""
        running.wait_for_line("serving again")
        assert good(running.urls["health"])["restarts"] == 1
        running.process.terminate()
        assert running.end()[0] == 0
    finally:
        running.process.kill()
        running.process.wait(60)


@pytest.mark.slow  # failed sends themselves: tests/unit/test_python_backend_sends.py
def test_without_shared_memory_who_waits_is_told_and_later_all_is_well() -> None:
    """What runs goes on, what needs room gets an error at once, and no process ends."""
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = "mount -t tmpfs -o size=48m tmpfs /dev/shm"
    if subprocess.run([*alone, mount], capture_output=True, timeout=120).returncode:
        pytest.skip("mounts a /dev/shm of its own: run it as root with CAP_SYS_ADMIN")
    script = f"{mount} && exec {sys.executable} -m tests.live.full_shared_memory"
    told = subprocess.run([*alone, script], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert told.returncode == 0, told.stderr
    outcome = json.loads(told.stdout.splitlines()[-1])
    assert outcome["stream"] == outcome["expected"] == outcome["after"]
    assert outcome["small"] == [outcome["short"]] * 4
    assert len(outcome["large"]) == 8
    assert all("shared memory" in error for error in outcome["large"])
    assert "tokens; at most" in outcome["large_after"]
    assert outcome["same_processes"]
