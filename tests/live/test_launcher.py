"""The launcher and real servers with tiny models: ready, stopped, killed, and nothing left over."""

from __future__ import annotations

import io
import json
import socket
import stat
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.helpers.server_settings import ROOT, free_ports
from tests.helpers.ticking_models import BROKEN, TICKER, left_over, stream, write_model
from tests.helpers.waiting import run_async
from tests.helpers.watched import end_of
from trtllm_bls.errors import SetupError
from trtllm_bls.operate.serve import ask
from trtllm_bls.operate.tritonserver import Listener, ServerFailed, TritonServer
from trtllm_bls.settings.command_options import Override

# --- from Python ----------------------------------------------------------------------------


def test_a_server_is_ready_serves_and_leaves_nothing(repository: Path) -> None:
    """All three addresses answer inside the block; no port, file or process remains after it."""
    with TritonServer(free_ports(model_repository=repository)) as server:
        for url in (f"{server.http_url}/v2/models/ticker/ready", server.metrics_url):
            assert urllib.request.urlopen(url, timeout=10).status == 200
        with stream(server.grpc_url, 3) as following:
            assert [following() for _ in range(4)] == ["tick", "tick", "tick", None]
        assert server.models == ("ticker",)
        prefix, process = server.region_prefix, server.process
        assert {stat.S_IMODE(region.stat().st_mode) for region in left_over(prefix)} == {0o600}
        address = server.grpc_url.split(":")
    assert left_over(prefix) == []
    assert process and not process.is_running()
    with pytest.raises(OSError):
        socket.create_connection((address[0], int(address[1])), timeout=60)


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


NEVER_READY = """
import time
import triton_python_backend_utils as pb_utils
from trtllm_bls.orchestrator.log_lines import log_to_triton

class TritonPythonModel:
    def initialize(self, args):
        log_to_triton(pb_utils, args["model_name"])
        time.sleep(1000)
"""


def test_a_model_that_is_never_ready_is_named_with_its_place_in_the_code(tmp_path: Path) -> None:
    """Those that have loaded are not named."""
    write_model(tmp_path, "fine", TICKER)
    write_model(tmp_path, "slow", NEVER_READY)
    for seconds in (5, 30, 200):  # a busy machine needs longer to come to that line
        server = TritonServer(free_ports(model_repository=tmp_path, ready_timeout=seconds))
        with pytest.raises(ServerFailed, match="not ready after") as failed:
            server.start()
        if any("model.py" in line for line in failed.value.log_lines):
            break
    assert f"not ready after {seconds} s, still loading: slow;" in str(failed.value)
    assert any('model.py", line 9 in initialize' in line for line in failed.value.log_lines)


def test_a_model_without_code_does_not_hang_the_start(tmp_path: Path) -> None:
    """Triton itself would wait for this one for ever."""
    write_model(tmp_path, "empty", "")
    (tmp_path / "empty" / "1" / "model.py").unlink()
    with pytest.raises(
        SetupError, match=r"empty did not load: Python model file not found in .*; copy"
    ):
        TritonServer(free_ports(model_repository=tmp_path)).start()


def test_a_killed_server_is_an_error_with_its_last_words(repository: Path) -> None:
    """Whoever waits learns how it ended; its shared memory does not stay."""
    server = TritonServer(free_ports(model_repository=repository))
    server.start()
    prefix = server.region_prefix
    assert server.process
    server.process.kill()
    with pytest.raises(ServerFailed, match=r"ended by itself \(SIGKILL") as failed:
        end_of(server)
    assert failed.value.log_lines
    assert left_over(prefix) == []
    server.stop()


def test_a_server_can_be_started_again(repository: Path) -> None:
    """Also after it was killed."""
    server = TritonServer(free_ports(model_repository=repository))
    for _ in range(2):
        with server, stream(server.grpc_url, 1) as following:
            assert [following(), following()] == ["tick", None]


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
    settings = free_ports(model_repository=repository, grpc_port=0)
    snatcher.server = TritonServer(settings, snatcher)
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
    answers = run_async(ask(server.grpc_url, asked, 12, Console(file=shown)))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.text.strip()
        assert f"{prompt}\n{answer.text}" in shown.getvalue()
        assert f"{prompt!r}: 12 tokens in " in shown.getvalue()
