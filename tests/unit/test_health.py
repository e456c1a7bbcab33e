"""When a server is ready, when it has failed, and how that is told."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.children import Child
from tests.helpers.waiting import until
from trtllm_bls.cli import main
from trtllm_bls.errors import SetupError
from trtllm_bls.operate import watch as watch_module
from trtllm_bls.operate.health import Observed, ServerProcesses, Verdict, evaluate, server_process
from trtllm_bls.operate.watch import HealthEndpoint, HealthState, ProblemLog, Watch, engine_load

SECONDS = 20
STALL_S = 10.0
GOOD = Observed(progress_at=99.0, loop_at=99.5, shared_memory=2**30)


# --- the verdict ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed", "reason", "failed"),
    [
        (GOOD, None, False),
        (Observed(), None, False),
        (Observed(progress_at=91.0), None, False),  # late, within the limit
        (Observed(canary_failures=1, canary_error="no"), None, False),  # perhaps an accident
        (Observed(canary_failures=2, canary_error="no"), "for one token fails: no", False),
        (Observed(processes=("x is dead",)), "x is dead", True),
        (Observed(descriptors=("x has used 9",)), "x has used 9", False),
        (Observed(descriptors=("x has used 9",), descriptors_at=81.0), "x has used 9", False),
        (Observed(descriptors=("x has used 9",), descriptors_at=79.0), "x has used 9", True),
        (Observed(models=("tensorrt_llm",)), "model tensorrt_llm is not ready", False),
        (Observed(progress_at=89.0), "no response has left for 11 s", False),
        (Observed(progress_at=79.0), "no response has left for 21 s", True),
        (Observed(loop_at=89.0), "has been stuck for 11 s", False),
        (Observed(loop_at=79.0), "has been stuck for 21 s", False),
        (Observed(loop_at=79.0, server_loop_at=81.0), "has been stuck for 21 s", False),
        (Observed(loop_at=79.0, server_loop_at=79.0), "has been stuck for 21 s", True),
        (Observed(loop_at=96.0, missed_turns=59), None, False),
        (Observed(loop_at=96.0, missed_turns=60), "has been stuck for 4 s", False),
        (Observed(shared_memory=4096), "/dev/shm is full: 4 KiB are free", False),
    ],
)
def test_what_observations_mean(observed: Observed, reason: str | None, failed: bool) -> None:
    """Dead and stopped processes count at once; what is late only when nothing moves at all."""
    verdict = evaluate(observed, 100.0, STALL_S)
    assert verdict.ready is (reason is None)
    assert verdict.failed is failed
    assert all(reason and reason in line for line in verdict.reasons)


def test_every_reason_is_told() -> None:
    """Somebody has to find out what happened."""
    observed = Observed(processes=("a", "b"), models=("c",), progress_at=0.0, loop_at=0.0)
    assert len(evaluate(observed, 100.0, STALL_S).reasons) == 5


# --- processes ------------------------------------------------------------------------------

# A server with two children: one is called like a stub of model x, one is anybody's.
SERVER = """
import subprocess, sys
wait = "import sys; sys.stdin.read()"
stub = ["triton_python_backend_stub", "-c", wait]
a = subprocess.Popen(stub, executable=sys.executable, stdin=subprocess.PIPE)
b = subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE)
print(a.pid, b.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def children() -> Iterator[tuple[psutil.Process, psutil.Process, psutil.Process]]:
    with Child([sys.executable, "-c", SERVER], stdin=subprocess.PIPE) as server:
        stub, other = map(psutil.Process, map(int, server.output.next().split()))
        yield psutil.Process(server.pid), stub, other
        for process in (stub, other):
            process.kill()


Tree = tuple[psutil.Process, psutil.Process, psutil.Process]


def test_a_dead_stub_is_noticed(children: Tree) -> None:
    """The server does not say so; other children may come and go."""
    server, stub, other = children
    looked_at = ServerProcesses(server)
    other.kill()
    assert looked_at.problems() == ()
    assert list(looked_at.running.values()) == [1, 1]
    stub.kill()
    until(lambda: stub.status() == psutil.STATUS_ZOMBIE)
    assert [line.endswith("is dead") for line in looked_at.problems()] == [True]
    assert list(looked_at.running.values()) == [1, 0]


def test_a_stopped_stub_is_noticed_at_the_second_look(children: Tree) -> None:
    """One look may fall into a moment that means nothing."""
    server, stub, _ = children
    looked_at = ServerProcesses(server)
    stub.suspend()
    until(lambda: stub.status() == psutil.STATUS_STOPPED)
    assert looked_at.problems() == ()
    assert [line.endswith("is stopped") for line in looked_at.problems()] == [True]
    stub.resume()
    until(lambda: stub.status() != psutil.STATUS_STOPPED)
    assert looked_at.problems() == ()


def test_no_server_is_found_where_none_listens() -> None:
    """A port of another program is not a server's."""
    assert server_process(1) is None


# --- the endpoint ---------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[tuple[HealthState, str]]:
    state = HealthState()
    running = HealthEndpoint("127.0.0.1", 0, state)
    yield state, f"http://127.0.0.1:{running.port}/health"
    running.close()


def get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def looking(verdict: Verdict, looked_at: float = float("inf")) -> Watch:
    running = {"tritonserver": 1, "tensorrt_llm": 2}
    watch = SimpleNamespace(verdict=verdict, looked_at=looked_at, draining=False, processes=running)
    watch.load, watch.engine_load = (2, 38), (2, 37)
    watch.engines = {"a": "", "b": "it is dead"}
    return cast(Watch, watch)


def test_startup_live_and_ready_are_kept_apart(endpoint: tuple[HealthState, str]) -> None:
    """A restart ends readiness alone: neither is the pod to be killed nor startup undone."""
    state, url = endpoint

    def become(*codes: int) -> None:
        """The codes of startup, live and ready; a change is told within moments."""
        parts = ("startup", "live", "ready")
        until(lambda: tuple(get(f"{url}/{each}")[0] for each in parts) == codes)

    become(503, 200, 503)
    with state.serving(looking(Verdict())):
        become(200, 200, 200)
    state.restarting("a stub is dead")
    become(200, 200, 503)
    answer = get(f"{url}/ready")[1]
    assert answer.pop("not_ready_seconds") in range(20)
    assert answer == {
        "ok": False,
        "reasons": ["restarting: a stub is dead"],
        "restarts": 1,
    }
    assert get(f"{url}/elsewhere")[0] == get(f"{url.removesuffix('/health')}/")[0] == 404


def test_clients_that_say_nothing_do_not_use_up_threads(
    endpoint: tuple[HealthState, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection has a thread of ``serve``: above a bound they are closed at once."""
    _, url = endpoint
    monkeypatch.setattr(watch_module, "_MAX_CONNECTIONS", threading.active_count() + 3)
    address = urlsplit(url)
    silent = [
        socket.create_connection((address.hostname, address.port), timeout=60) for _ in range(9)
    ]
    for one in silent:
        one.settimeout(SECONDS)
    assert [one.recv(1) for one in silent[3:]] == [b""] * 6
    for one in silent:
        one.close()
    until(lambda: threading.active_count() < watch_module._MAX_CONNECTIONS)
    assert get(f"{url}/live")[0] == 200


def test_the_reasons_are_told() -> None:
    """All of them, with what the watch has seen."""
    state = HealthState()
    with state.serving(looking(Verdict(("it is stuck",)))):
        assert state.problems()["ready"] == ["it is stuck"]
        state.draining = True
        assert state.problems()["ready"] == ["the server is draining", "it is stuck"]


def test_a_drain_asked_for_from_outside_ends_readiness() -> None:
    """Balancers look there, also while a preStop hook drains."""
    state = HealthState()
    watch = looking(Verdict())
    with state.serving(watch):
        assert state.problems()["ready"] == []
        watch.draining = True
        assert state.problems()["ready"] == ["the server is draining"]


def test_an_api_that_does_not_answer_ends_readiness() -> None:
    """Its clients are the server's."""
    state = HealthState()
    with state.serving(looking(Verdict())):
        state.api_problem = "the OpenAI API has ended (SIGKILL)"
        assert state.problems()["ready"] == ["the OpenAI API has ended (SIGKILL)"]
        state.api_problem = None
        assert state.problems()["ready"] == []


def test_a_new_start_forgets_the_problem_of_the_api_before() -> None:
    """The server's end ended that process, too, and another one answers."""
    state = HealthState()
    state.api_problem = "the OpenAI API has ended (SIGKILL)"
    state.restarting("the server ended by itself")
    with state.serving(looking(Verdict())):
        assert state.problems()["ready"] == []


def test_prometheus_reads_what_readiness_means(endpoint: tuple[HealthState, str]) -> None:
    """Ready or not, processes, restarts: as metrics on the same port."""
    state, url = endpoint

    def found() -> dict[str, float]:
        with urllib.request.urlopen(url.replace("/health", "/metrics"), timeout=20) as answer:
            text = answer.read().decode()
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    with state.serving(looking(Verdict())):
        state.api_restarts = 2
        expected = {
            "trtllm_bls_server_ready": 1.0,
            "trtllm_bls_server_processestritonserver": 1.0,
            "trtllm_bls_server_processestensorrt_llm": 2.0,
            "trtllm_bls_server_restarts_total": 0.0,
            "trtllm_bls_openai_restarts_total": 2.0,
            "trtllm_bls_server_num_requests_running": 2.0,
            "trtllm_bls_server_num_requests_waiting": 38.0,
            "trtllm_bls_engine_num_requests_running": 2.0,
            "trtllm_bls_engine_num_requests_waiting": 37.0,
            "trtllm_bls_engine_upa": 1.0,
            "trtllm_bls_engine_upb": 0.0,
        }
        until(lambda: found() == expected)
    state.restarting("a stub is dead")
    restarting = {"trtllm_bls_server_ready": 0.0, "trtllm_bls_server_restarts_total": 1.0}
    until(lambda: restarting.items() <= found().items())
    assert found()["trtllm_bls_server_processestensorrt_llm"] == 0.0


def test_ready_names_each_engine_and_says_how_long_it_is_not(
    endpoint: tuple[HealthState, str],
) -> None:
    """One engine of several that is out does not end readiness; the body tells of it."""
    state, url = endpoint
    told = {"a": "ok", "b": "it is dead"}
    watch = looking(Verdict())
    with state.serving(watch):
        until(lambda: get(f"{url}/ready")[0] == 200)
        answer = {"ok": True, "reasons": [], "restarts": 0, "engines": told}
        assert get(f"{url}/ready") == (200, answer)
        watch.verdict = Verdict(("it is stuck",))
        until(lambda: get(f"{url}/ready")[0] == 503)
        until(lambda: get(f"{url}/ready")[1]["not_ready_seconds"] >= 1)
        watch.verdict = Verdict()
        until(lambda: get(f"{url}/ready") == (200, answer))


def test_since_when_it_is_not_ready_is_known_though_nobody_asked(
    endpoint: tuple[HealthState, str],
) -> None:
    """A probe may come every minute only."""
    state, _ = endpoint
    watch = looking(Verdict())
    with state.serving(watch):
        until(lambda: state._not_ready_since is None)
        watch.verdict = Verdict(("it is stuck",))
        until(lambda: state._not_ready_since is not None)


REBOUND = {"Host": "rebound.example:8003"}
FOREIGN = {"Origin": "https://page.example"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8003"}, 200),
        ({"Host": "[::1]:8003", "Origin": "http://[::1]:8003"}, 200),
        (REBOUND, 421),
        (FOREIGN, 403),
        (FOREIGN | {"Origin": "null"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/health/live"])
def test_web_pages_cannot_read_the_port_of_this_machine(
    endpoint: tuple[HealthState, str], path: str, headers: dict[str, str], status: int
) -> None:
    """Neither a page of another server nor one whose name was made to mean this machine."""
    address = endpoint[1].removeprefix("http://").removesuffix("/health")
    with closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status == status
    assert (b'{"error"' in body) == (status != 200)


def test_names_and_pages_that_were_allowed_are_answered() -> None:
    """By the same two options as on the other ports."""
    allowed = (["rebound.example"], ["https://page.example"])
    with closing(HealthEndpoint("127.0.0.1", 0, HealthState(), *allowed)) as running:
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.port}/health/live", headers=REBOUND | FOREIGN
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200


def test_any_name_is_answered_where_other_machines_ask() -> None:
    """A pod is probed by its address, and scraped by a service's name."""
    with closing(HealthEndpoint("0.0.0.0", 0, HealthState())) as running:
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.port}/health/live", headers=REBOUND | FOREIGN
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200


def test_a_problem_is_said_when_it_begins_at_doubling_intervals_and_when_it_ends() -> None:
    """For as long as it takes, and with its latest cause."""
    said: list[str] = []
    log = ProblemLog(said.append)
    times = []
    for now in range(0, 1000):
        before = len(said)
        cause = "" if now < 100 or now >= 700 else "it is dead" if now < 200 else "NOT_OK"
        log.look({"not ready": cause, "engine b is out": ""}, now)
        times += [now] * (len(said) - before)
    assert times == [100, 160, 220, 340, 580, 700]
    assert said == [
        "not ready: it is dead",
        "not ready for 60 s: it is dead",
        "not ready for 120 s: NOT_OK",
        "not ready for 240 s: NOT_OK",
        "not ready for 480 s: NOT_OK",
        "ended after 600 s: not ready",
    ]


def test_the_engines_own_figures_are_read_from_triton() -> None:
    """Of every release of the C++ backend: those before 0.18 do not tell who waits."""
    row = 'nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="{}",version="1"}} {}\n'
    old = row.format("active", 40) + row.format("scheduled", 2) + row.format("max", 512)
    assert engine_load(old) == (2, 38)
    assert engine_load(old + row.format("waiting", 37)) == (2, 37)
    assert engine_load('nv_inference_count{model="m"} 3\n') is None
    draft = row.replace("tensorrt_llm", "tensorrt_llm_draft")
    both = old + draft.format("active", 7) + draft.format("scheduled", 4)
    assert engine_load(both) == (6, 41), "of several engines the sum"


def test_a_watch_that_is_stuck_is_not_live() -> None:
    """Then nobody looks after the server any more."""
    state = HealthState()
    with state.serving(looking(Verdict(), looked_at=float("-inf"))):
        assert state.problems()["live"]


def test_a_busy_health_port_names_its_option(endpoint: tuple[HealthState, str]) -> None:
    """As for the other ports."""
    port = int(endpoint[1].rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1: .*--health-port"):
        HealthEndpoint("127.0.0.1", port, HealthState())


# --- file descriptors -----------------------------------------------------------------------


def test_a_process_that_can_open_nothing_more_is_named() -> None:
    """By the limit that it has used up."""
    line = "the process of tritonserver has used its 20 file descriptors"
    for opens, lines in (("while True: os.dup(0)", (line,)), ("raise OSError", ())):
        script = "import os, resource, time\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        script += f"try:\n    {opens}\nexcept OSError: print(flush=True)\ntime.sleep(60)"
        with Child([sys.executable, "-c", script]) as process:
            process.output.next()
            found = ServerProcesses(psutil.Process(process.pid)).without_descriptors()
        assert found == lines


# --- the command ----------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_not_healthy() -> None:
    """Exit code 1 and a reason."""
    result = CliRunner().invoke(main, ["health", "--url", "127.0.0.1:1", "--timeout", "5"])
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.output
    result = CliRunner().invoke(main, ["health", "--url", "127.0.0.1:1", "--json"])
    assert json.loads(result.output)["ready"] is False


@pytest.mark.parametrize("url", ["nowhere:80x", "nowhere:65536"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """In one line."""
    result = CliRunner().invoke(main, ["health", "--url", url])
    assert result.exit_code == 1
    assert result.stderr == f"error: --url {url}: write host:port, where gRPC is served\n"
