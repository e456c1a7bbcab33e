"""``trtllm-bls serve`` as a process: its printed addresses, its signals, its ends."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.helpers.ports import ANY_PORTS
from tests.helpers.served import Served, good
from tests.helpers.server_settings import ROOT
from tests.helpers.ticking_models import left_over, stream
from tests.helpers.waiting import until
from trtllm_bls.errors import SetupError
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import ServeSettings

# --- from the command line ------------------------------------------------------------------


@pytest.fixture
def served(repository: Path) -> Iterator[Served]:
    running = Served(repository, "--exit-timeout", "1000")
    assert left_over(running.prefix)
    yield running
    running.process.kill()
    running.guard.wait(60)
    assert left_over(running.prefix) == []
    assert not running.stub.is_running()


def test_control_apis_are_refused(served: Served) -> None:
    """Whoever could map shared memory would read other requests; what clients need stays open."""
    for path in (
        "/v2/systemsharedmemory/region/mine/register",
        "/v2/repository/models/ticker/unload",
        "/v2/logging",
        "/v2/trace/setting",
    ):
        form = {"Content-Type": "application/json"}
        request = urllib.request.Request(served.urls["HTTP"] + path, b"{}", form)
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(request, timeout=10)
        refused.value.close()
    with grpcclient.InferenceServerClient(served.urls["gRPC"]) as client:
        for call in (
            lambda: client.register_system_shared_memory("mine", "/mine", 64),
            lambda: client.unload_model("ticker"),
            lambda: client.update_log_settings({"log_info": False}),
            lambda: client.update_trace_settings(settings={"trace_rate": "1"}),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
        assert client.is_server_ready()
        assert client.get_model_metadata("ticker").name == "ticker"
        assert client.get_model_config("ticker").config.name == "ticker"
        assert client.get_inference_statistics("ticker").model_stats
    served.process.terminate()
    assert served.end()[0] == 0


def test_the_printed_curl_line_works(served: Served) -> None:
    """Copied from the terminal into a shell."""
    assert served.curl.startswith("curl ")
    answer = subprocess.run(
        served.curl, shell=True, capture_output=True, text=True, check=True, timeout=120
    )
    assert answer.stdout.startswith("HTTP/1.1 200")
    served.process.terminate()
    code, errors = served.end()
    # Nothing runs, so nothing is waited for: Triton's HTTP port has no connection left.
    assert code == 0
    assert "not unload in time" not in errors, errors


def test_a_running_stream_is_drained(served: Served) -> None:
    """The first signal lets requests end; all their answers arrive, and the exit code is 0."""
    with stream(served.urls["gRPC"], 50) as following:
        words = [following()]
        served.process.terminate()
        served.wait_for_line("stopping: running requests have 1000 s")
        while (word := following()) is not None:
            words.append(word)
    assert words == ["tick"] * 50
    assert served.end()[0] == 0


# A request that the server refuses, from a client that ends without closing its stream.
RUDE = """
import os, sys, queue
import numpy as np
import tritonclient.grpc as grpcclient

client, answers = grpcclient.InferenceServerClient(sys.argv[1]), queue.Queue()
client.start_stream(lambda result, error: answers.put(error), stream_timeout=120)
wrong = grpcclient.InferInput("count", [1], "FP32")
wrong.set_data_from_numpy(np.ones(1, np.float32))
client.async_stream_infer("ticker", [wrong])
print(answers.get(timeout=30), flush=True)
os._exit(1)
"""


def test_no_request_is_reported_lost_where_none_ran(repository: Path) -> None:
    """Triton keeps a refused request of a client that broke off; nobody waits for its answer."""
    running = Served(repository, "--exit-timeout", "3")
    words = [sys.executable, "-c", RUDE, running.urls["gRPC"]]
    refused = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    assert "data-type" in refused.stdout, refused.stderr
    running.process.terminate()
    code, errors = running.end()
    assert code == 0
    assert "cut off" not in errors


def test_the_second_signal_forces(served: Served) -> None:
    """Requests are cut off rather than waited for, and the exit code tells the signal."""
    with stream(served.urls["gRPC"], 100_000) as following:
        following()
        served.process.send_signal(signal.SIGINT)
        served.wait_for_line("stopping")
        served.process.send_signal(signal.SIGINT)
        assert served.end()[0] == 128 + signal.SIGINT


def test_a_server_that_dies_can_end_serve_with_its_last_words(repository: Path) -> None:
    """One clear line, the last log lines under it, exit code 1."""
    running = Served(repository, "--on-failure", "exit")
    running.guard.children()[0].kill()
    code, errors = running.end()
    assert code == 1
    assert "error: the server ended by itself (SIGKILL, perhaps out of memory)" in errors
    assert "Traceback" not in errors


def test_a_killed_guard_leaves_nothing_and_the_server_comes_back(served: Served) -> None:
    """The stubs it would have ended are ended, their shared memory goes, ports stay the same."""
    served.guard.kill()
    assert "starting again in 1 s" in served.wait_for_line("starting again")
    assert left_over(served.prefix) == []
    assert not served.stub.is_running()
    served.wait_for_line("serving again")
    with stream(served.urls["gRPC"], 1) as following:
        assert [following(), following()] == ["tick", None]
    served.process.terminate()
    assert served.end()[0] == 0


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_stub_that_dies_or_stops_ends_every_request(served: Served, number: int) -> None:
    """Triton would keep its clients waiting; they get an end, and a server that works.

    So does who comes in the moment before that is noticed.
    """
    rounds = 0

    def is_next_one_in_time() -> bool:
        """Return false where the next request met the server that was started again."""
        nonlocal rounds
        rounds += 1
        stub, *_ = served.children(served.server.pid, "triton_python")
        with stream(served.urls["gRPC"], 100_000) as following:
            following()
            stub.send_signal(number)
            # The server may end before this request is sent, or after.
            try:
                with stream(served.urls["gRPC"], 1) as next_one:
                    assert next_one() == "tick"
                is_in_time = False
            except InferenceServerException:
                is_in_time = True
            with pytest.raises(InferenceServerException):
                while following():
                    pass
        served.wait_for_line("serving again")
        assert good(served.urls["health"])["restarts"] == rounds
        return is_in_time

    until(is_next_one_in_time, 200)
    told = served.errors.text()
    if number == signal.SIGSTOP:
        assert "the process of model ticker is stopped" in told
    elif "lock_exception" in told:  # it died with a lock of Triton, which aborts by that
        assert "the server ended by itself (SIGABRT; boost's lock_exception" in told
    else:
        assert "the process of model ticker is dead" in told
    with stream(served.urls["gRPC"], 1) as following:
        assert [following(), following()] == ["tick", None]
    served.process.terminate()
    assert served.end()[0] == 0


def test_a_limit_of_files_that_is_too_low_is_one_line(repository: Path) -> None:
    """A server without descriptors answers nobody; it is not started."""
    words = f"ulimit -n 300; exec {sys.executable} -m trtllm_bls.cli serve {shlex.join(ANY_PORTS)}"
    ran = subprocess.run(
        ["sh", "-c", f"{words} --model-repository {repository}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: only 300 files may be open (ulimit -Hn), 768 are needed")


def test_a_killed_launcher_takes_its_server_along(served: Served) -> None:
    """Nobody else would stop it or clean up after it."""
    served.process.kill()
    served.guard.wait(60)
    assert left_over(served.prefix) == []
    assert not served.stub.is_running()
    served.end()


def test_a_busy_port_is_one_line(repository: Path) -> None:
    """Nothing is started; the line names the port and the option to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServeSettings(
            model_repository=repository, http_port=port, grpc_port=0, metrics_port=0
        )
        with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1: .*--http-port"):
            TritonServer(settings).start()
