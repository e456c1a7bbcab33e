"""The launcher and real servers with tiny models: ready, stopped, killed, and nothing left over."""

from __future__ import annotations

import asyncio
import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from rich.console import Console
from tritonclient.utils import InferenceServerException

from tests.helpers.server_settings import ROOT, free_ports
from tests.helpers.waiting import until
from trtllm_bls.errors import SetupError
from trtllm_bls.launcher import Listener, ServerFailed, TritonServer
from trtllm_bls.launcher.demo import ask
from trtllm_bls.settings import Override, ServeSettings

SHARED_MEMORY = Path("/dev/shm")

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "word" value { string_value: "tick" } }
"""

# Says its word ``count`` times, 20 ms apart; for a count of 0 it describes where it runs.
TICKER = """
import json, os, ssl, sys, threading
import numpy as np
import triton_python_backend_utils as pb
import trtllm_bls

class TritonPythonModel:
    def initialize(self, args):
        self.word = json.loads(args["model_config"])["parameters"]["word"]["string_value"]

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        count = int(pb.get_input_tensor_by_name(request, "count").as_numpy()[0])
        sender = request.get_response_sender()
        clock = threading.Event()
        for _ in range(count):
            self.say(sender, self.word)
            clock.wait(0.02)
        if count == 0:
            where = {"numpy": np.__version__, "prefix": sys.prefix, "env": dict(os.environ)}
            self.say(sender, json.dumps(where | {"package": trtllm_bls.__file__}))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def say(self, sender, text):
        said = pb.Tensor("said", np.array([text.encode()], dtype=object))
        sender.send(pb.InferenceResponse([said]))
"""

BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("the tokenizer is not where it should be")
"""


def write_model(repository: Path, name: str, code: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ticker") / "models"
    write_model(made, "ticker", TICKER)
    return made


def left_over(prefix: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(prefix + "*"))


@contextmanager
def stream(grpc_url: str, count: int) -> Iterator[Callable[[], str | None]]:
    """Ask the ticker; yields a function that gives its next word, ``None`` after the last."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        wanted = grpcclient.InferInput("count", [1], "INT32")
        wanted.set_data_from_numpy(np.array([count], np.int32))
        client.async_stream_infer("ticker", [wanted], enable_empty_final_response=True)

        ended = False

        def following() -> str | None:
            nonlocal ended
            answer = answers.get(timeout=30)
            if isinstance(answer, Exception):
                raise answer
            said = answer.as_numpy("said")
            ended = said is None
            return None if ended else str(said[0].decode())

        yield following
        # Cancelling what has ended can leak the request in the server, which then never drains.
        client.stop_stream(cancel_requests=not ended)


# --- from Python ----------------------------------------------------------------------------


def test_a_server_is_ready_serves_and_leaves_nothing(repository: Path) -> None:
    """All three addresses answer inside the block; no port, file or process remains after it."""
    with TritonServer(free_ports(model_repository=repository)) as server:
        for url in (f"{server.http_url}/v2/models/ticker/ready", server.metrics_url):
            assert urllib.request.urlopen(url, timeout=10).status == 200
        with stream(server.grpc_url, 3) as following:
            assert [following() for _ in range(4)] == ["tick", "tick", "tick", None]
        assert server.models == ("ticker",)
        prefix, pid = server.region_prefix, server.pid
        assert left_over(prefix)
        address = server.grpc_url.split(":")
    assert left_over(prefix) == []
    assert not psutil.pid_exists(pid or 0)
    with pytest.raises(OSError):
        socket.create_connection((address[0], int(address[1])))


def test_models_run_in_our_environment(repository: Path) -> None:
    """This environment's packages, this package, our variables, and parameters of --set."""
    settings = free_ports(
        model_repository=repository,
        model=repository,
        max_streams=5,
        overrides=(Override("ticker", "word", "tock"),),
    )
    with TritonServer(settings) as server:
        with stream(server.grpc_url, 1) as following:
            assert [following(), following()] == ["tock", None]
        with stream(server.grpc_url, 0) as following:
            where = json.loads(following() or "")
            assert following() is None
        env = where["env"]
        assert where["prefix"] == sys.prefix
        assert where["numpy"] == np.__version__
        assert Path(where["package"]).samefile(ROOT / "trtllm_bls" / "__init__.py")
        assert env["TRTLLM_BLS_GRPC_URL"] == server.grpc_url
        assert env["TRTLLM_BLS_MODEL_DIR"] == str(repository)
        assert env["TRTLLM_BLS_MAX_STREAMS"] == "5"
        scratch = Path(env["TMPDIR"])
        assert scratch.is_dir()
    assert not scratch.exists()


def test_a_model_that_does_not_load_is_named_with_its_reason(tmp_path: Path) -> None:
    """The start fails with one line; the place in the code comes under it."""
    write_model(tmp_path, "fine", TICKER)
    write_model(tmp_path, "broken", BROKEN)
    server = TritonServer(free_ports(model_repository=tmp_path))
    reason = "ValueError: the tokenizer is not where it should be"
    with pytest.raises(ServerFailed, match=f"^model broken did not load: {reason}$") as failed:
        server.start()
    assert any("model.py(4): initialize" in line for line in failed.value.log_lines)


def test_a_model_without_code_does_not_hang_the_start(tmp_path: Path) -> None:
    """Triton itself would wait for this one for ever."""
    write_model(tmp_path, "empty", "")
    (tmp_path / "empty" / "1" / "model.py").unlink()
    with pytest.raises(ServerFailed, match="model empty did not load: Python model file not found"):
        TritonServer(free_ports(model_repository=tmp_path)).start()


def test_a_killed_server_is_an_error_with_its_last_words(repository: Path) -> None:
    """Whoever waits learns how it ended; its shared memory does not stay."""
    server = TritonServer(free_ports(model_repository=repository))
    server.start()
    prefix = server.region_prefix
    os.kill(server.pid or 0, signal.SIGKILL)
    with pytest.raises(ServerFailed, match=r"ended by itself \(SIGKILL") as failed:
        server.wait()
    assert failed.value.log_lines
    assert left_over(prefix) == []
    server.stop()


def test_a_server_can_be_started_again(repository: Path) -> None:
    """Also after it was killed; the addresses are new."""
    server = TritonServer(free_ports(model_repository=repository))
    for _ in range(2):
        with server, stream(server.grpc_url, 1) as following:
            assert [following(), following()] == ["tick", None]


def good(url: str) -> dict[str, Any]:
    """A health endpoint's answer, once it is a good one: changes are told within moments."""

    def answer_when_good() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            error.close()
            return None

    found = until(answer_when_good)
    assert found is not None
    return found


class Snatcher(Listener):
    """Takes the server's gRPC port while its models load, the first time."""

    def __init__(self) -> None:
        self.server: TritonServer | None = None
        self.taken: list[socket.socket] = []

    def starting(self, models: tuple[str, ...]) -> None:
        assert self.server
        if not self.taken:
            host, _, port = self.server.grpc_url.partition(":")
            self.taken.append(socket.create_server((host, int(port))))


def test_a_port_taken_while_models_load_is_chosen_again(repository: Path) -> None:
    """The server binds a port seconds after it was found free; free ports are then chosen anew."""
    snatcher = Snatcher()
    snatcher.server = TritonServer(free_ports(model_repository=repository), snatcher)
    with snatcher.server, snatcher.taken[0], stream(snatcher.server.grpc_url, 1) as following:
        assert [following(), following()] == ["tick", None]


def test_waiting_for_models_has_an_end(tmp_path: Path) -> None:
    """The line names what was still loading and the option that allows more."""
    write_model(tmp_path, "sleepy", TICKER + "\nthreading.Event().wait()\n")
    with pytest.raises(ServerFailed, match=r"after 1 s, still loading: sleepy; .*--ready-timeout"):
        TritonServer(free_ports(model_repository=tmp_path, ready_timeout=1)).start()


def test_the_demo_streams_an_answer_to_every_prompt(server: TritonServer) -> None:
    """What is shown holds the prompts, the answers and a line of figures for each."""
    shown = io.StringIO()
    asked = ("Once upon a time", "Tell me a story")
    answers = asyncio.run(ask(server.grpc_url, asked, 12, Console(file=shown)))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.text.strip()
        assert f"{prompt}\n{answer.text}" in shown.getvalue()
        assert f"{prompt!r}: 12 tokens in " in shown.getvalue()


# --- from the command line ------------------------------------------------------------------


class Served:
    """``trtllm-bls serve`` as a process of its own, ready."""

    def __init__(self, repository: Path, *more: str) -> None:
        services = ("http", "grpc", "metrics", "health")
        ports = [word for name in (*services, "openai") for word in (f"--{name}-port", "0")]
        words = [
            "serve",
            *ports,
            "--model-repository",
            str(repository),
            "--exit-timeout",
            "20",
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
        assert self.process.stdout
        self.urls = dict(self.process.stdout.readline().split() for _ in services)
        self.process.stdout.readline()
        self.curl = self.process.stdout.readline()
        everything = psutil.Process(self.process.pid).children(recursive=True)
        self.guard = next(p for p in everything if any("guard.py" in w for w in p.cmdline()))
        self.stub = next(p for p in everything if p.name().startswith("triton_python"))
        self.prefix = self.stub.cmdline()[2].rsplit("_", 1)[0]

    def wait_for_line(self, word: str) -> str:
        """Read standard error up to the line that holds ``word``."""
        assert self.process.stderr
        return next(line for line in self.process.stderr if word in line)

    def end(self) -> tuple[int, str]:
        """Exit code and remaining standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def served(repository: Path) -> Iterator[Served]:
    running = Served(repository)
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
        request = urllib.request.Request(served.urls["HTTP"] + path, data=b"{}")
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
    answer = subprocess.run(served.curl, shell=True, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("HTTP/1.1 200")
    served.process.terminate()
    assert served.end()[0] == 0


def test_a_running_stream_is_drained(served: Served) -> None:
    """The first signal lets requests end; all their answers arrive, and the exit code is 0."""
    with stream(served.urls["gRPC"], 50) as following:
        words = [following()]
        served.process.terminate()
        served.wait_for_line("stopping: running requests have 20 s")
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
client.start_stream(lambda result, error: answers.put(error))
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
    refused = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stub_that_dies_or_stops_ends_every_request(served: Served, number: int) -> None:
    """Triton would keep its clients waiting; they get an end, and a server that works."""
    with stream(served.urls["gRPC"], 100_000) as following:
        following()
        served.stub.send_signal(number)
        with pytest.raises(InferenceServerException):
            while following():
                pass
    failed = served.wait_for_line("the process of model ticker is")
    assert ("dead" if number == signal.SIGKILL else "stopped") in failed
    served.wait_for_line("serving again")
    assert good(served.urls["health"])["restarts"] == 1
    with stream(served.urls["gRPC"], 1) as following:
        assert [following(), following()] == ["tick", None]
    served.process.terminate()
    assert served.end()[0] == 0


def test_a_limit_of_files_that_is_too_low_is_one_line(repository: Path) -> None:
    """A server without descriptors answers nobody; it is not started."""
    words = f"ulimit -n 300; exec {sys.executable} -m trtllm_bls.cli serve --model-repository"
    ran = subprocess.run(
        ["sh", "-c", f"{words} {repository}"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: only 300 files may be open (ulimit -Hn), --max-streams ")


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
