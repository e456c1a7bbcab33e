"""``TritonServer`` and ``serve`` around a server that is a script: starts, files, what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import trustme
from click.testing import CliRunner

from tests.helpers.children import Child
from tests.helpers.fake_tritonserver import HANGS, LOCKED, installation, starts
from tests.helpers.ports import ANY_PORTS, serve_ports, unused_ports
from tests.helpers.served import Served, good
from tests.helpers.server_settings import DEMO, free_ports
from tests.helpers.tiers import pairs
from tests.helpers.waiting import until, until_ended
from tests.helpers.watched import end_of
from trtllm_bls.cli import main
from trtllm_bls.operate.health import ServerProcesses
from trtllm_bls.operate.logs import LogBook
from trtllm_bls.operate.ports import Ports
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.operate.tritonserver import (
    GuardedProcess,
    Listener,
    ServerFailed,
    TritonServer,
    is_ready,
)
from trtllm_bls.orchestrator.status import ProcessStatus, StatusDirectory
from trtllm_bls.settings.command_options import ServeSettings


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("class TritonPythonModel: pass\n")
    (version.parent / "config.pbtxt").write_text('backend: "python"\n')
    return tmp_path / "models"


class Told(Listener):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def test_a_start_that_loses_a_race_for_shared_memory_is_tried_again(
    tmp_path: Path, repository: Path
) -> None:
    """Triton's Python backend dies of it now and then, whatever the models are."""
    root = installation(tmp_path / "triton", f"if starts > 1:\n    serve()\n{LOCKED}")
    told = Told()
    with TritonServer(free_ports(server=root, model_repository=repository), told):
        assert starts(root) == 2
    (line,) = [line for line in told.warnings if "starting again" in line]
    assert "lock_exception" in line


def test_a_start_that_loses_the_race_three_times_has_failed(
    tmp_path: Path, repository: Path
) -> None:
    """Then it is no accident."""
    root = installation(tmp_path / "triton", LOCKED)
    server = TritonServer(free_ports(server=root, model_repository=repository))
    with pytest.raises(ServerFailed, match="lock_exception") as failed:
        server.start()
    assert starts(root) == 3
    assert any("terminate called" in line for line in failed.value.log_lines)


@pytest.mark.parametrize(
    ("wait", "times"),
    [("stub.wait()", 2), ("time.sleep(1.5)", 1)],
    ids=["given up", "slow"],
)
def test_a_model_that_triton_has_given_up_is_not_waited_for(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, wait: str, times: int
) -> None:
    """Triton 24.10 would wait for ever where a model's process got no core for a second."""
    monkeypatch.setattr("trtllm_bls.operate.tritonserver._WAITS_LOOK_S", 0.5)
    program = f"stub = start_stub()\nif starts == 1:\n    {wait}\nserve()"
    root = installation(tmp_path / "triton", program)
    told = Told()
    with TritonServer(free_ports(server=root, model_repository=repository), told):
        assert starts(root) == times
    again = [line for line in told.warnings if "starting again" in line]
    assert len(again) == times - 1
    assert all("which got no core for a second" in line for line in again)


def test_a_process_that_is_just_ending_is_not_given_up(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look finds it, and the next one does not."""
    looks: list[bool] = []
    go_on = tmp_path / "go on"

    def waits(processes: ServerProcesses) -> set[str]:
        looks.append(True)
        if len(looks) == 4:
            go_on.touch()
        return {"model a"} if len(looks) % 2 else set()

    monkeypatch.setattr("trtllm_bls.operate.tritonserver._WAITS_LOOK_S", 0.1)
    monkeypatch.setattr(ServerProcesses, "waits", waits)
    program = f"while not os.path.exists({str(go_on)!r}):\n    time.sleep(0.01)\nserve()"
    root = installation(tmp_path / "triton", program)
    with TritonServer(free_ports(server=root, model_repository=repository)):
        assert starts(root) == 1


def test_a_death_by_a_lock_is_told_with_its_usual_cause(tmp_path: Path, repository: Path) -> None:
    """Triton 24.10 aborts by itself if a model's process is killed while it holds a lock."""
    end = f"def end(*_):\n{indent(LOCKED, '    ')}\nsignal.signal(signal.SIGUSR1, end)\nserve()"
    root = installation(tmp_path / "triton", end)
    with TritonServer(free_ports(server=root, model_repository=repository)) as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGUSR1)
        with pytest.raises(
            ServerFailed, match=r"itself \(SIGABRT; boost's lock_exception, as when"
        ):
            end_of(server)


def test_an_orphan_of_the_server_is_not_the_server(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard adopts it when the server has ended, and may still have it when the watch says that
    the server is dead. What is told is the signal."""
    root = installation(tmp_path / "triton", "stub = start_stub()\nserve()")
    with TritonServer(free_ports(server=root, model_repository=repository)) as server:
        assert server.process is not None
        (orphan,) = server.process.children()
        monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [orphan])
        server.process.kill()
        until(lambda: server.process is None)
        server.fail("the process of tritonserver is dead")
        with pytest.raises(ServerFailed, match=r"itself \(SIGKILL, perhaps out of memory"):
            end_of(server)


def test_any_other_death_is_not_tried_again(tmp_path: Path, repository: Path) -> None:
    """It would die the same way."""
    root = installation(tmp_path / "triton", "os.abort()")
    with pytest.raises(ServerFailed, match="did not start"):
        TritonServer(free_ports(server=root, model_repository=repository)).start()
    assert starts(root) == 1


# Triton's Python backend sets the mode of a region itself, whatever the umask.
PRIVATE_FILES = """
prefix = [word for word in sys.argv if "shm-region-prefix-name" in word][0].rpartition("=")[2]
for file in ("/dev/shm/" + prefix + "region", os.environ["TMPDIR"] + "/scratch"):
    os.close(os.open(file, os.O_CREAT, 0o666))
os.chmod("/dev/shm/" + prefix + "region", 0o644)
serve()
"""


def test_only_their_owner_reads_the_servers_files(tmp_path: Path, repository: Path) -> None:
    """Prompts and answers pass through shared memory."""
    root = installation(tmp_path / "triton", PRIVATE_FILES)
    with TritonServer(free_ports(server=root, model_repository=repository)) as server:
        directory = Path(server.environment["TRTLLM_BLS_STATUS_DIR"]).parent
        for file in (Path(f"/dev/shm/{server.region_prefix}region"), directory / "scratch"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("closed", ["http", "grpc", "metrics"])
def test_a_server_is_ready_when_all_three_ports_answer(
    tmp_path: Path, repository: Path, closed: str
) -> None:
    """The others may be open already, and whoever reads "ready" uses all of them."""
    root = installation(tmp_path / "triton")
    with TritonServer(free_ports(server=root, model_repository=repository)) as server:
        host, port = server.grpc_url.split(":")
        numbers = {
            "http": int(server.http_url.rpartition(":")[2]),
            "grpc": int(port),
            "metrics": int(server.metrics_url.split(":")[2].partition("/")[0]),
        }
        assert is_ready(Ports(host, host, host, **numbers), list(server.models))
        (numbers[closed],) = unused_ports(1)
        assert not is_ready(Ports(host, host, host, **numbers), list(server.models))


def test_the_port_with_tls_stays_where_a_server_failed_to_start_again(
    tmp_path: Path, repository: Path
) -> None:
    """Clients look for it there; any free port is chosen only once."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    issued.cert_chain_pems[0].write_to_path(str(files["tls_cert"]))
    issued.private_key_pem.write_to_path(str(files["tls_key"]))
    root = installation(tmp_path / "triton", "serve() if starts != 2 else os.abort()")
    server = TritonServer(
        free_ports(server=root, model_repository=repository, http_port=0, **files)
    )
    server.start()
    try:
        server.keep_ports()
        url, grpc_url = server.http_url, server.grpc_url
        server.discard()
        with pytest.raises(ServerFailed):
            server.start()
        server.start()
        assert (server.http_url, server.grpc_url) == (url, grpc_url)
    finally:
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


def test_waiting_for_models_has_an_end_and_says_how_to_move_it(
    tmp_path: Path, repository: Path
) -> None:
    """A server that runs and never answers."""
    root = installation(tmp_path / "triton", "time.sleep(1000)")
    settings = free_ports(server=root, model_repository=repository, ready_timeout=1)
    with pytest.raises(ServerFailed, match=r"not ready after 1 s, still loading: m; .*--ready-tim"):
        TritonServer(settings).start()


TAKEN = """
if starts == 1:
    print("failed to start HTTP service: port already in use", flush=True)
    time.sleep(1000)
serve()
"""


@pytest.mark.parametrize("free", [True, False])
def test_a_port_that_was_taken_meanwhile_is_chosen_again(
    tmp_path: Path, repository: Path, free: bool
) -> None:
    """Unless all were asked for: the user has to choose others."""
    root = installation(tmp_path / "triton", TAKEN)
    settings = free_ports(server=root, model_repository=repository)
    if free:
        settings = replace(settings, http_port=0)
    server = TritonServer(settings)
    if free:
        with server:
            assert starts(root) == 2
    else:
        with pytest.raises(ServerFailed, match="the HTTP port was taken meanwhile"):
            server.start()
        assert starts(root) == 1


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_model_that_does_not_unload_is_no_request_that_was_cut_off(
    tmp_path: Path, repository: Path, requests: int, in_flight: int
) -> None:
    """Triton says whether anything ran; who signals twice is told that requests were cut off."""
    line = f"Found {in_flight} model versions that have in-flight inferences"
    root = installation(tmp_path / "triton", f"print({line!r}, flush=True)\n{HANGS}")
    told = Told()
    server = TritonServer(free_ports(server=root, model_repository=repository), told)
    server.start()
    for _ in range(requests):
        server.request_stop()
    server.end_unloading()
    cut_off = bool(in_flight) or requests == 2
    assert end_of(server) is cut_off
    assert any("did not unload in time" in line for line in told.warnings) is not cut_off
    server.stop()


def test_a_crash_at_the_end_is_told_as_one(tmp_path: Path, repository: Path) -> None:
    """Nobody waited for a model, and no request was lost."""
    crashes = "signal.signal(signal.SIGTERM, lambda *_: os.abort())\nserve()"
    line = "Found 0 model versions that have in-flight inferences"
    root = installation(tmp_path / "triton", f"print({line!r}, flush=True)\n{crashes}")
    told = Told()
    server = TritonServer(free_ports(server=root, model_repository=repository), told)
    server.start()
    server.request_stop()
    assert end_of(server) is False
    assert told.warnings == ["all requests had ended; tritonserver crashed as it ended (SIGABRT)"]
    server.stop()


# --- serve: signals, restarts, exit codes -----------------------------------------------------


@contextmanager
def serving(root: Path, repository: Path, *more: str) -> Iterator[Served]:
    served = Served(repository, "--server", str(root), *more)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.end()
        served.guard.wait(60)


def reasons(served: Served) -> list[str]:
    """Why it is not ready."""
    try:
        return list(good(served.urls["health"])["reasons"])
    except urllib.error.HTTPError as refused:
        with refused:
            return list(json.load(refused)["reasons"])


# Waits for a file that the test makes.
WAIT_FOR = """
def wait_for(name):
    file = Path(__file__).with_name(name)
    while not file.exists():
        time.sleep(0.01)
"""


FLOODS = """
def flood():
    for number in range(30_000):
        print("x" * 100, flush=True)
    Path(__file__).with_name("flooded").touch()

threading.Thread(target=flood).start()
stub = start_stub()
serve()
"""


def test_output_that_nobody_reads_holds_up_neither_the_server_nor_its_end(
    tmp_path: Path, repository: Path
) -> None:
    """As in a terminal after Ctrl-S, or with a log driver that is stuck. What it cost is told."""
    root = installation(tmp_path / "triton", FLOODS)
    names = ("http", "grpc", "metrics", "health")
    ports = dict(zip(names, unused_ports(len(names)), strict=True))
    words = ["serve", "--server", str(root), "--model-repository", str(repository)]
    words += ["--openai-port", "0"]
    for name, port in ports.items():
        words += [f"--{name}-port", str(port)]
    health = f"http://127.0.0.1:{ports['health']}"
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "trtllm_bls.cli", *words], stdout=writing, stderr=writing
    ) as served:
        try:
            os.close(writing)
            until((root / "bin" / "flooded").exists)
            until(lambda: answers(f"{health}/health/ready"))
            # The guard takes all lines of the server, and the launcher may read them later.
            until(lambda: dropped_lines(health) > 10_000)
            served.terminate()
            assert served.wait(60) == 0
        finally:
            served.kill()
            os.close(reading)


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=20) as answer:
        return bool(answer.status == 200)
    return False


def dropped_lines(health: str) -> int:
    """Return the lines that ``serve`` did not get rid of on standard error, by its metric."""
    with urllib.request.urlopen(f"{health}/metrics", timeout=20) as answer:
        metrics = answer.read().decode()
    (lines,) = re.findall(r'dropped_lines_total{output="stderr"} (\d+)', metrics)
    return int(lines)


def test_the_first_signal_drains(tmp_path: Path, repository: Path) -> None:
    """Balancers are told at once; the exit code says that nothing was cut off."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (wait_for('may end'), os._exit(0)))"
    program = f"{WAIT_FOR}\nstub = start_stub()\n{handler}\nserve()"
    root = installation(tmp_path / "triton", program)
    with serving(root, repository, "--exit-timeout", "40") as served:
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_line("stopping: running requests have 40 s")
        assert until(lambda: "the server is draining" in reasons(served))
        (root / "bin" / "may end").touch()
        assert served.end()[0] == 0


def test_a_signal_during_the_start_speaks_of_no_requests(tmp_path: Path, repository: Path) -> None:
    """Nobody can have sent one; the exit code is the signal's."""
    root = installation(tmp_path / "triton", "while True:\n    time.sleep(1)")
    words = ["serve", "--server", str(root), "--model-repository", str(repository)]
    words += [*serve_ports(), "--openai-port", "0"]
    with Child([sys.executable, "-m", "trtllm_bls.cli", *words], name="serve") as child:
        until((root / "bin" / "starts").exists)
        child.process.send_signal(signal.SIGINT)
        assert child.end() == 128 + signal.SIGINT
        errors = child.errors.rest()
    assert "stopping before the server is ready" in errors
    assert "requests" not in errors


def test_the_second_signal_kills(tmp_path: Path, repository: Path) -> None:
    """Whatever runs; the exit code is the signal's."""
    with serving(installation(tmp_path / "triton", HANGS), repository) as served:
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_line("stopping")
        served.process.send_signal(signal.SIGINT)
        code, errors = served.end()
        assert code == 128 + signal.SIGINT
        assert "running requests were cut off" in errors


def test_a_server_that_dies_comes_back_on_its_ports(tmp_path: Path, repository: Path) -> None:
    """Also where the next start fails; probes learn how often."""
    program = "if starts == 2:\n    os.abort()\nstub = start_stub()\nserve()"
    root = installation(tmp_path / "triton", program)
    with serving(root, repository) as served:
        served.server.kill()
        served.wait_for_line("starting again in 1 s")
        served.wait_for_line("starting again in 2 s")
        served.wait_for_line("serving again")
        assert good(served.urls["health"])["restarts"] == 2
        assert starts(root) == 3
        with urllib.request.urlopen(
            f"{served.urls['HTTP']}/v2/models/m/ready", timeout=20
        ) as answer:
            assert answer.status == 200
        served.process.terminate()
        code, errors = served.end()
        assert code == 0, errors


def test_a_failure_can_end_serve(tmp_path: Path, repository: Path) -> None:
    """For those whose supervisor starts it again."""
    root = installation(tmp_path / "triton", "stub = start_stub()\nserve()")
    with serving(root, repository, "--on-failure", "exit") as served:
        served.server.kill()
        code, errors = served.end()
        assert code == 1
        assert "error: the server ended by itself (SIGKILL, perhaps out of memory)" in errors
        assert starts(root) == 1


def test_a_server_that_never_was_ready_is_not_started_again(
    tmp_path: Path, repository: Path
) -> None:
    """Nothing would change."""
    root = installation(tmp_path / "triton", "print('no such device', flush=True)\nsys.exit(3)")
    words = ["serve", "--server", str(root), "--model-repository", str(repository), *ANY_PORTS]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "error: the server did not start (exit code 3)" in result.stderr
    assert result.stderr.count("no such device") == 1
    assert starts(root) == 1


@pytest.mark.parametrize(
    ("behind_http", "own_port", "kept"),
    [(False, None, (71, None)), (True, None, (8000, None)), (True, 0, (8000, 71))],
)
def test_a_server_that_is_started_again_has_its_ports_of_before(
    behind_http: bool, own_port: int | None, kept: tuple[int, int | None]
) -> None:
    """Triton's own HTTP port is not opened to others by being kept."""
    server = TritonServer(ServeSettings(triton_http_port=own_port), behind_http=behind_http)
    server.ports = Ports("127.0.0.1", "127.0.0.1", "127.0.0.1", http=71, grpc=72, metrics=73)
    server.keep_ports()
    found = server.settings
    assert (found.http_port, found.triton_http_port) == kept
    assert (found.grpc_port, found.metrics_port) == (72, 73)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (psutil.STATUS_SLEEPING, "no response has left"),
        (psutil.STATUS_ZOMBIE, "the server ended by itself (SIGSEGV)"),
        (psutil.STATUS_DEAD, "the server ended by itself (SIGSEGV)"),
    ],
)
def test_a_server_that_has_died_meanwhile_did_not_fail_for_its_silence(
    state: str, told: str
) -> None:
    """The watch sees both at once, and the death is the cause."""
    killed: list[bool] = []
    process: Any = SimpleNamespace(
        server=SimpleNamespace(status=lambda: state),
        kill=lambda: killed.append(True),
        wait=lambda: 128 + (signal.SIGKILL if killed else signal.SIGSEGV),
    )
    server = TritonServer(ServeSettings())
    server._process, server._book = process, LogBook()
    server.fail("no response has left")
    with pytest.raises(ServerFailed) as failed:
        server.wait()
    assert str(failed.value) == told


# Takes a moment for its start, and another for its end, as soon as the test allows them.
SLOW = f"""{WAIT_FOR}
def end(*_):
    wait_for("may end")
    time.sleep(3)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
stub = start_stub()
wait_for("may start")
time.sleep(3)
serve()
"""
VICTIMS = {
    "serve": "trtllm_bls.cli serve",
    "the guard": "guard.py",
    "tritonserver": "bin/tritonserver",
    "the HTTP program": "trtllm_bls.cli --exit-with-parent",
}


# The HTTP program waits for the server, so it has no start of its own.
KILLS = pairs(list(VICTIMS), ["serves", "drains", "starts"])
KILLS = [kill for kill in KILLS if kill != ("the HTTP program", "starts")]


@pytest.mark.parametrize(("victim", "moment"), KILLS)
def test_no_process_outlives_its_parent_whatever_was_killed_and_when(
    tmp_path: Path, repository: Path, victim: str, moment: str
) -> None:
    """Each is killed at each moment; then ``serve`` is told to end, if it still runs."""
    root = installation(tmp_path / "triton", SLOW)
    words = ["serve", "--server", str(root), "--model-repository", str(repository)]
    words += [*serve_ports(), "--openai-port", "0"]
    words += ["--exit-timeout", "40" if moment == "drains" else "10"]
    binaries = root / "bin"
    if moment != "starts":
        (binaries / "may start").touch()
    with Child([sys.executable, "-m", "trtllm_bls.cli", *words], "serve") as served:
        own = psutil.Process(served.pid)
        if moment != "starts":
            served.output.next()  # It has an address.
        if moment == "drains":
            served.process.terminate()
            served.errors.wait_for("stopping")
        if moment == "starts" and victim == "tritonserver":
            until((binaries / "starts").exists)  # not the one that only names its libraries
        place = VICTIMS[victim]
        process = until(lambda: next(with_words(family(own), place), None))
        seen = family(own)
        process.kill()
        for name in ("may start", "may end"):
            (binaries / name).touch()
        until_ended([process])
        if own.is_running() and own.status() != psutil.STATUS_ZOMBIE:
            seen += family(own)
            served.process.terminate()
        served.end()
    until_ended(seen)


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and all below it."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def with_words(processes: list[psutil.Process], words: str) -> Iterator[psutil.Process]:
    """Those whose command line has ``words``."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if words in " ".join(process.cmdline()):
                yield process


# --- stopped and killed ---------------------------------------------------------------------


def test_a_guard_that_is_stopped_is_continued() -> None:
    """The server's output goes through it."""
    process = GuardedProcess(Scratch(), 30, lambda _: None)
    process.run(["sleep", "1000"], os.environ)
    guard = until(lambda: process.server).parent()
    assert guard
    guard.suspend()
    until(lambda: guard.status() == psutil.STATUS_STOPPED)
    process.wake()
    until(lambda: guard.status() != psutil.STATUS_STOPPED)
    process.kill()
    assert process.wait(20) == 128 + signal.SIGKILL
    process.close()


def test_a_guard_that_is_stopped_can_be_told_to_kill() -> None:
    """It would not hear it otherwise."""
    process = GuardedProcess(Scratch(), 30, lambda _: None)
    process.run(["sleep", "1000"], os.environ)
    server = until(lambda: process.server)
    guard = server.parent()
    assert guard
    guard.suspend()
    until(lambda: guard.status() == psutil.STATUS_STOPPED)
    process.kill()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert not server.is_running()
    process.close()


def test_models_that_do_not_hand_over_have_half_of_the_time() -> None:
    """The server is then told to end, with time left to do so in order."""
    scratch = Scratch()
    scratch.keep_status("")
    now = time.monotonic()
    StatusDirectory(scratch.status).write(ProcessStatus(os.getpid(), now, now, 0, 0))
    process = GuardedProcess(scratch, 2, lambda _: None)
    process.run(["sleep", "1000"], os.environ)
    until(lambda: process.server)
    stopped_at = time.monotonic()
    process.stop()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - stopped_at >= 1
    process.close()


LAUNCHER = """
import os, sys, time
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.operate.tritonserver import GuardedProcess
process = GuardedProcess(Scratch(), 1, lambda line: None)
process.run(["sleep", "1000"], os.environ)
while process.server is None:
    time.sleep(0.01)
print(process.server.ppid(), process.server.pid, flush=True)
time.sleep(1000)
"""


def test_a_guard_that_is_stopped_sees_the_launchers_death() -> None:
    """The kernel wakes it."""
    with Child([sys.executable, "-c", LAUNCHER]) as launcher:
        guard, server = map(psutil.Process, map(int, launcher.output.next().split()))
        guard.suspend()
        until(lambda: guard.status() == psutil.STATUS_STOPPED)
        launcher.kill()
        until_ended([guard, server], 20)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """``serve`` with two OpenAI workers; the engine is elsewhere, and not there."""
    root = installation(
        tmp_path / "triton",
        "stub = start_stub()\nserve()",
    )
    (port,) = unused_ports(1)
    running = Served(
        None,
        *("--server", str(root), "--engine", "trtllm://127.0.0.1:1"),
        *("--model", str(DEMO / "target"), "--openai-port", str(port), "--openai-workers", "2"),
        *("--exit-timeout", "1", "--log-file", str(tmp_path / "log")),
    )
    everything = running.everything()
    yield running
    running.process.kill()
    until_ended(everything)
    running.end()


def workers(served: Served) -> list[psutil.Process]:
    (api,) = served.children(served.process.pid, "openai")
    return api.children()


def test_a_stopped_worker_of_the_api_is_replaced(served: Served) -> None:
    """Its clients see their connection end, and the next ones are answered, in seconds."""
    port = int(served.urls["OpenAI"].rpartition(":")[2].removesuffix("/v1"))
    before = until(lambda: len(found := workers(served)) == 2 and found)
    with ExitStack() as stack:
        clients = {}
        for _ in range(4):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                b"content-type: application/json\r\ncontent-length: 9\r\n\r\n"
            )
            clients[client.getsockname()[1]] = client

        def with_clients() -> tuple[psutil.Process, list[int]] | None:
            """A worker, and the ports of the clients that it serves."""
            for worker in before:
                peers = {each.raddr.port for each in worker.net_connections("tcp") if each.raddr}
                if served_here := list(peers & clients.keys()):
                    return worker, served_here
            return None

        worker, ports = until(with_clients)
        worker.suspend()
        line = served.wait_for_line("was stopped")
        assert f"process {worker.pid} of the HTTP program was stopped" in line
        for each in ports:
            with suppress(ConnectionResetError):
                assert clients[each].recv(1) == b""
    until(lambda: len(found := workers(served)) == 2 and worker not in found)


def test_nothing_outlives_a_killed_serve(served: Served, tmp_path: Path) -> None:
    """Neither what runs nor what is stopped, and no file of the run."""
    everything = served.everything()
    scratch = Path(psutil.Process(served.guard.pid).environ()["TMPDIR"])
    names = [" ".join(each.cmdline()) for each in everything]
    for part in ("tritonserver", "triton_python_backend_stub", "openai"):
        assert any(part in name for name in names), part
    first, second = workers(served)
    assert {first, second} < set(everything)
    first.suspend()
    served.process.kill()
    until_ended(everything, 20)
    until(lambda: not scratch.exists())
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
