"""What a probe makes of a server's answers, and a watch of what it sees."""

from __future__ import annotations

import asyncio
import math
import operator
import os
import subprocess
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psutil
import pytest

from tests.helpers.fake_grpc_server import Abort, Fail, FakeGrpcServer, Hold, Step, Until, text
from tests.helpers.threaded_server import serving_in_a_thread
from tests.helpers.waiting import eventually, run_async
from trtllm_bls.errors import ConnectionFailed
from trtllm_bls.operate import watch as watch_module
from trtllm_bls.operate.health import Probe, ServerProcesses, look
from trtllm_bls.operate.serve import processes
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.operate.watch import HttpDoor, Pace, Watch
from trtllm_bls.orchestrator.status import ProcessStatus, StatusDirectory, start_of

SECONDS = 20
TOKEN = text("x", final=True)
BUSY = Fail(
    "UNAVAILABLE: sequences running: 256, waiting: 512, as many as may; try again in about 2 s"
    " [retry_after_s=2]"
)
LOST = Fail("UNAVAILABLE: trtllm://gpu:50051: it is not healthy: NOT_OK")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ([TOKEN], "answered"),
        ([Fail("INVALID_ARG: text_input: no")], "answered"),  # nobody but a working server says so
        ([BUSY], "full"),
        ([Fail("UNAVAILABLE: Exceeds maximum queue size")], "full"),
        ([LOST], "failed"),
        ([Hold()], "late"),
        ([Abort(grpc.StatusCode.UNAVAILABLE, "gone")], "late"),
        ([Fail("INTERNAL: CUDA error")], "failed"),
    ],
)
def test_what_became_of_a_canary(script: list[Step], outcome: str) -> None:
    """A refusal for want of room is no failure: load alone makes no server unready."""

    timeout = 1.0 if isinstance(script[0], Hold) else SECONDS

    async def ask() -> str:
        async with FakeGrpcServer(script) as server, Probe(server.url) as probe:
            return (await probe.canary(timeout)).outcome

    assert run_async(ask()) == outcome


async def test_models_that_are_not_ready_are_named() -> None:
    """A server that says nothing is another matter."""
    async with FakeGrpcServer([TOKEN]) as server:
        async with Probe(server.url) as probe:
            assert await probe.models_not_ready(["a", "b"], SECONDS) == ()
            server.loading = True
            assert await probe.models_not_ready(["a", "b"], SECONDS) == ("a", "b")
        verdict = await look(server.url, ("a",), SECONDS, canary=True)
        assert verdict.reasons == ("model a is not ready",)
    async with Probe(server.url) as probe:
        with pytest.raises(ConnectionFailed):
            await probe.models_not_ready(["a"], SECONDS)


def test_one_look_tells_whether_a_token_comes_out() -> None:
    """From anywhere: all that is needed is the gRPC port."""

    async def ask(*script: Step, timeout: float = SECONDS) -> tuple[str, ...]:
        async with FakeGrpcServer(script) as server:
            return (await look(server.url, ("a",), timeout, canary=True)).reasons

    assert run_async(ask(TOKEN)) == ()
    assert run_async(ask(BUSY)) == ()  # else Kubernetes would restart a server for its load
    assert run_async(ask(Fail("INTERNAL: no")))[0] == "a request for one token fails: no"
    assert "no complete answer within 1 s" in run_async(ask(Hold(), timeout=1.0))[0]


# --- the watch ------------------------------------------------------------------------------

# A canary is sent after every pause, also while a clock of the test's stands still.
QUICK = Pace(look_s=0.02, canary_s=0.02, answer_s=SECONDS, unload_s=0.2)
IMPATIENT = replace(QUICK, answer_s=0.1)  # where no answer is to come


class Clock:
    """The time of every watch, which the test alone moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._signs: tuple[float, ...] = ()

    def monotonic(self) -> float:
        return self.now

    def move(self, seconds: float, *signs: float) -> None:
        """Move on, unless one of the ``signs`` of the watch's work is as at the last move."""
        if not self._signs or all(map(operator.gt, signs, self._signs)):
            self._signs = signs
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of this test's watches; statuses tell its time, too."""
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    return clock


def watch(
    url: str,
    status: Path,
    stall_s: float,
    failed: list[str],
    engine_here: bool = True,
    metrics_url: str = "http://127.0.0.1:1/metrics",
    pace: Pace = QUICK,
    said: list[str] | None = None,
    http: HttpDoor | None = None,
    kind: type[SimpleNamespace] = SimpleNamespace,
    **more: Any,
) -> Watch:
    """Over a server whose processes are this one."""
    me = psutil.Process()
    server = kind(
        probe=lambda: Probe(url, "canary", local=True),
        status_dir=status,
        metrics_url=metrics_url,
        settings=SimpleNamespace(stall_timeout=stall_s),
        fail=failed.append,
        wake_guard=lambda: None,
        **{"process": me, "stop_requested": False, "unloaded": set()}
        | {"models": ("tensorrt_llm",) * engine_here + ("tensorrt_llm_bls",), **more},
    )
    warn = [].append if said is None else said.append
    return Watch(cast(TritonServer, server), warn, pace, http)


async def test_a_stalled_engine_is_noticed_and_so_is_its_recovery(
    tmp_path: Path, clock: Clock
) -> None:
    """Readiness goes and comes back; nothing is ended for a stall that passes."""
    stalled = asyncio.Event()
    steps: list[Step] = [TOKEN]
    async with FakeGrpcServer(lambda _: steps) as server:
        watching = watch(server.url, tmp_path, stall_s=1.0, failed=(failed := []))
        await eventually(lambda: len(server.asked) > 1)
        assert watching.verdict.ready
        steps[:] = [Until(stalled), TOKEN]
        canaries = len(server.asked)
        await eventually(lambda: len(server.asked) > canaries)
        clock.now += 1.1
        await eventually(lambda: not watching.verdict.ready)
        assert "no response has left for" in watching.verdict.reasons[0]
        steps[:] = [TOKEN]
        stalled.set()
        await eventually(lambda: watching.verdict.ready)
        await asyncio.to_thread(watching.close)
        assert failed == []


class Ending(SimpleNamespace):
    """A server whose process has ended when somebody asks a second time."""

    @property
    def process(self) -> psutil.Process | None:
        is_first = not self.looks
        self.looks += 1
        return psutil.Process() if is_first else None


def test_a_server_may_end_while_its_processes_are_listed(tmp_path: Path) -> None:
    """`serve` then starts it again; an exception would end `serve`."""
    (line,) = processes(cast(TritonServer, Ending(looks=0)), None)
    assert line == f"process  {os.getpid()} tritonserver"
    watching = watch("127.0.0.1:1", tmp_path, 60.0, [], kind=Ending, looks=0)
    assert [*watching.processes] == ["tritonserver"]
    watching.close()


class Metrics(BaseHTTPRequestHandler):
    """What Triton tells of an engine's steps: as many as it was asked, at most ``most``."""

    asked, most, more = 0, math.inf, ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        Metrics.asked += 1
        counter = 'nv_trt_llm_general_metrics{general_type="iteration_counter",model="m"}'
        body = f"# TYPE a gauge\na 1\n{counter} {min(Metrics.asked, Metrics.most)}\n".encode()
        body += Metrics.more.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


async def test_an_engine_that_makes_steps_is_not_stuck(tmp_path: Path, clock: Clock) -> None:
    """Nothing leaves while every place has an answer in one piece; a standstill is still seen."""
    Metrics.asked, Metrics.most = 0, math.inf
    with serving_in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Metrics)) as metrics:
        async with FakeGrpcServer([Hold()]) as server:
            now = clock.now
            busy = ProcessStatus(os.getpid(), now, now + 10**6, responses=0, running=256)
            StatusDirectory(tmp_path).write(busy)
            url = f"http://127.0.0.1:{metrics.server_port}/metrics"
            watching = watch(
                server.url, tmp_path, 1.5, failed := [], metrics_url=url, pace=IMPATIENT
            )

            def has_progress() -> bool:
                assert (watching.verdict.ready, failed) == (True, [])
                return watching._observed.progress_at == clock.now

            for _ in range(4):  # a server without steps has failed after the third
                clock.now += 1.4
                await eventually(has_progress)

            def has_failed() -> bool:
                clock.move(0.5, watching.looked_at)
                return bool(failed)

            Metrics.most = Metrics.asked
            await eventually(has_failed)
            assert "no response has left for" in failed[0]
            await asyncio.to_thread(watching.close)


@pytest.mark.parametrize("moving", ["responses", "tokens", "steps"])
async def test_traffic_of_the_openai_api_does_not_hide_a_stuck_tensorrt_llm_bls(
    tmp_path: Path, clock: Clock, moving: str
) -> None:
    """Its own canary waits, while the engine works for the other door and has an empty queue."""
    files, failed, moved = StatusDirectory(tmp_path), list[str](), 0
    Metrics.asked, Metrics.most = 0, math.inf if moving == "steps" else 0
    row = 'nv_trt_llm_request_metrics{{model="m",request_type="{}"}} {}\n'
    Metrics.more = row.format("scheduled", 2) + row.format("waiting", 0)
    with (
        subprocess.Popen(["sleep", "60"]) as worker,
        serving_in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Metrics)) as metrics,
    ):

        def progress() -> bool:
            nonlocal moved
            moved += 1
            now = clock.now
            files.write(ProcessStatus(os.getpid(), now, now, 0, running=1))
            other = ProcessStatus(worker.pid, now, now, 0, running=2)
            counts = {} if moving == "steps" else {moving: moved}
            files.write(replace(other, **counts))
            clock.move(0.3, watching.looked_at, len(server.asked), Metrics.asked)
            return bool(failed)

        try:
            async with FakeGrpcServer([Hold()]) as server:
                url = f"http://127.0.0.1:{metrics.server_port}/metrics"
                watching = watch(server.url, tmp_path, 1.0, failed, metrics_url=url, pace=IMPATIENT)
                await eventually(progress)
                await asyncio.to_thread(watching.close)
        finally:
            Metrics.more = ""
            worker.kill()
    assert "no response has left for" in failed[0]


class Door:
    """An HTTP program that answers when it is told to, and has been replaced so often."""

    def __init__(self, is_well: bool) -> None:
        self.is_well = is_well
        self.replaced: list[str] = []

    def answers(self, timeout: float) -> bool:
        return self.is_well

    def replace(self, why: str) -> None:
        self.replaced.append(why)


async def test_an_http_program_that_answers_nothing_ends_readiness_and_is_replaced(
    tmp_path: Path, clock: Clock
) -> None:
    """Requests to Triton do not hide it; the server goes on."""
    door = Door(is_well=True)
    async with FakeGrpcServer([TOKEN]) as server:
        watching = watch(server.url, tmp_path, 0.5, failed := [], http=door)
        await eventually(lambda: len(server.asked) > 1 and watching.verdict.ready)
        door.is_well = False

        silence = "the HTTP program has answered nothing for"

        def is_silent() -> bool:
            clock.move(0.2, watching.looked_at, len(server.asked))  # Triton answers meanwhile
            return silence in "; ".join(watching.verdict.reasons)

        await eventually(is_silent)

        def has_another() -> bool:
            clock.move(0.2, watching.looked_at, len(server.asked))
            return bool(door.replaced)

        await eventually(has_another)
        door.is_well = True
        await eventually(lambda: watching.verdict.ready)
        await asyncio.to_thread(watching.close)
    assert failed == []
    assert door.replaced[0].startswith("has answered nothing for")


async def test_responses_of_an_http_program_need_no_probe(tmp_path: Path, clock: Clock) -> None:
    """A program that is busy may answer a probe late."""
    files, door, moved = StatusDirectory(tmp_path), Door(is_well=False), 0
    with subprocess.Popen(["sleep", "60"]) as worker:

        def progress() -> bool:
            nonlocal moved
            moved += 1
            now = clock.now
            files.write(ProcessStatus(worker.pid, now, now, responses=moved, running=1))
            clock.move(0.2, watching.looked_at, len(server.asked))
            return now > enough

        try:
            async with FakeGrpcServer([TOKEN]) as server:
                enough = clock.now + 2.0  # four times the limit
                watching = watch(server.url, tmp_path, 0.5, [], http=door)
                await eventually(progress)
                assert watching.verdict.reasons == ()
                await asyncio.to_thread(watching.close)
        finally:
            worker.kill()
    assert door.replaced == []


async def test_a_proxy_does_not_come_between_serve_and_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says is for other addresses."""
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    Metrics.asked, Metrics.most = 0, math.inf
    with serving_in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Metrics)) as metrics:
        async with FakeGrpcServer([Hold()]) as server:
            url = f"http://127.0.0.1:{metrics.server_port}/metrics"
            watching = watch(server.url, tmp_path, SECONDS, failed := [], metrics_url=url)
            await eventually(lambda: server.asked and Metrics.asked)
            await asyncio.to_thread(watching.close)
        assert failed == []


async def test_an_engine_elsewhere_that_is_lost_ends_readiness_alone(tmp_path: Path) -> None:
    """At once, and for as long as it takes: another start of this server would mend nothing."""
    steps: list[Step] = [LOST]
    async with FakeGrpcServer(lambda _: steps) as server:
        failed: list[str] = []
        watching = watch(server.url, tmp_path, 0.2, failed, engine_here=False)
        await eventually(lambda: "it is not healthy: NOT_OK" in str(watching.verdict.reasons))
        assert not watching.verdict.ready
        enough = time.monotonic() + 1.0  # twice the limit and more
        await eventually(lambda: time.monotonic() > enough)
        assert failed == []
        steps[:] = [TOKEN]
        await eventually(lambda: watching.verdict.ready)
        await asyncio.to_thread(watching.close)


async def test_an_engine_that_says_it_is_not_well_ends_readiness(tmp_path: Path) -> None:
    """As soon as one process has heard so, before any request fails; and only as long."""
    files, failed = StatusDirectory(tmp_path), list[str]()
    ill = "trtllm://gpu:50051: it is not healthy: NOT_OK"
    now = time.monotonic()
    well = ProcessStatus(os.getpid(), now, now, 0, 0)
    async with FakeGrpcServer([TOKEN]) as server:
        watching = watch(
            server.url, tmp_path, SECONDS, failed, engine_here=False, said=(said := [])
        )
        files.write(replace(well, engines={"trtllm://gpu:50051": ill}))
        await eventually(lambda: watching.verdict.reasons == (ill,))
        files.write(well)
        await eventually(lambda: watching.verdict.ready)
        await asyncio.to_thread(watching.close)
        assert failed == []
        assert [line.partition(" after")[0] for line in said] == [
            f"the server is not ready: {ill}",
            "ended",
        ]


async def test_only_a_stuck_loop_of_its_own_ends_the_server(tmp_path: Path) -> None:
    """That of a worker of the HTTP program ends readiness; that worker alone is started again."""
    files, failed = StatusDirectory(tmp_path), list[str]()
    now = time.monotonic()
    mine = ProcessStatus(os.getpid(), now, now + SECONDS, 0, 0)
    with subprocess.Popen(["sleep", "60"]) as worker:
        files.write(mine)
        files.write(ProcessStatus(worker.pid, now, now - 2 * SECONDS - 1, 0, 0))
        try:
            async with FakeGrpcServer([TOKEN]) as server:
                watching = watch(server.url, tmp_path, SECONDS, failed)
                await eventually(lambda: "has been stuck" in "".join(watching.verdict.reasons))
                looked = watching.looked_at
                await eventually(lambda: watching.looked_at > looked)
                assert failed == []
                files.write(replace(mine, loop_at=now - 2 * SECONDS - 1))
                (tmp_path / f"{worker.pid}-{start_of(worker.pid)}.json").unlink()
                await eventually(lambda: bool(failed))
                await asyncio.to_thread(watching.close)
        finally:
            worker.kill()
    assert "has been stuck" in failed[0]


async def test_requests_of_all_processes_are_added_up(tmp_path: Path) -> None:
    """By their own figures where the engine tells none; else its queue and what is not there yet.

    Engines that are out are named, by whichever process has noticed.
    """
    files, now = StatusDirectory(tmp_path), time.monotonic()
    status = ProcessStatus(os.getpid(), now, now, 0, 0, prompts=40, waiting=38, queued=5)
    one, other_one = {"a": "", "b": "it is dead"}, {"a": "it is full", "b": ""}
    out = {"a": "it is full", "b": "it is dead"}
    Metrics.asked, Metrics.more = 0, ""
    async with FakeGrpcServer([TOKEN]) as server:
        with serving_in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Metrics)) as metrics:
            url = f"http://127.0.0.1:{metrics.server_port}/metrics"
            other = subprocess.Popen(["sleep", "60"])
            try:
                files.write(replace(status, engines=one))
                files.write(ProcessStatus(other.pid, now, now, 0, 0, prompts=2, engines=other_one))
                watching = watch(
                    server.url, tmp_path, SECONDS, [], metrics_url=url, said=(said := [])
                )
                await eventually(lambda: watching.load == (4, 38))
                assert watching.engine_load is None
                assert (watching.engines, watching.verdict.ready) == (out, True)
                assert sorted(said) == [f"engine {e} takes no requests: {out[e]}" for e in "ab"]
                row = 'nv_trt_llm_request_metrics{{model="m",request_type="{}"}} {}\n'
                Metrics.more = row.format("scheduled", 2) + row.format("waiting", 35)
                await eventually(lambda: watching.load == (2, 40))
                assert watching.engine_load == (2, 35)
                await asyncio.to_thread(watching.close)
            finally:
                other.kill()
                other.wait()
                Metrics.more = ""


@pytest.mark.parametrize(
    ("stop", "unloaded", "state", "ends"),
    [
        (True, {"tensorrt_llm"}, {}, True),
        (False, {"tensorrt_llm"}, {}, False),
        (True, set(), {}, False),
        (True, {"tensorrt_llm"}, {"running": 1}, False),
        (True, {"tensorrt_llm"}, {"handed_over": False}, False),
        (True, {"tensorrt_llm"}, {"loop_at": -9.0}, False),
        (True, {"tensorrt_llm"}, None, False),
    ],
)
async def test_a_stop_waits_for_requests_and_not_for_triton_to_forget_them(
    tmp_path: Path, stop: bool, unloaded: set[str], state: dict[str, Any] | None, ends: bool
) -> None:
    """Where all models but one are unloaded, and the processes of that one have nothing to do."""
    files, ended = StatusDirectory(tmp_path), threading.Event()

    def looked() -> bool:
        now = time.monotonic()
        if state is not None:
            idle = ProcessStatus(os.getpid(), now, now, 0, running=0, handed_over=True)
            files.write(replace(idle, **state))
        return ended.is_set() or now > enough

    async with FakeGrpcServer([LOST]) as server:
        more = {"stop_requested": stop, "unloaded": unloaded, "end_unloading": ended.set}
        enough = time.monotonic() + (SECONDS if ends else 0.5)
        watching = watch(server.url, tmp_path, SECONDS, [], **more)
        await eventually(looked)
        await asyncio.to_thread(watching.close)
    assert ended.is_set() == ends


async def test_failed_canaries_end_readiness_until_one_is_answered(tmp_path: Path) -> None:
    """Two in a row are no accident."""
    steps: list[Step] = [Fail("INTERNAL: CUDA error")]
    async with FakeGrpcServer(lambda _: steps) as server:
        watching = watch(server.url, tmp_path, SECONDS, failed := [])
        await eventually(lambda: "for one token fails: CUDA error" in str(watching.verdict.reasons))
        steps[:] = [TOKEN]
        await eventually(lambda: watching.verdict.ready)
        await asyncio.to_thread(watching.close)
    assert failed == []


class CountsTurns(FakeGrpcServer):
    """A server that counts how often a watch has asked for its models before it sent a canary."""

    turns = 0

    async def ModelReady(self, request: Any, context: Any) -> Any:
        self.turns += request.name == "tensorrt_llm_bls"
        return await super().ModelReady(request, context)


async def test_no_canary_is_sent_while_others_get_answers(tmp_path: Path, clock: Clock) -> None:
    """It would only take a slot of the engine's batch."""
    files, pace, moved = StatusDirectory(tmp_path), Pace(look_s=0.01, canary_s=0.05), 0

    def progress() -> bool:
        nonlocal moved
        moved += 1
        now = clock.now
        files.write(ProcessStatus(os.getpid(), now, now, moved, 1))
        clock.move(0.015, watching.looked_at)
        return now > enough and server.turns > 8

    async with CountsTurns([TOKEN]) as server:
        enough = clock.now + 8 * pace.canary_s  # time for eight canaries
        watching = watch(server.url, tmp_path, SECONDS, failed := [], pace=pace)
        await eventually(progress)
        assert server.asked == []
        await asyncio.to_thread(watching.close)
    assert failed == []


@pytest.mark.parametrize("stopping", [False, True])
async def test_a_dead_process_fails_a_server_unless_it_is_stopping(
    tmp_path: Path, stopping: bool
) -> None:
    """A server that stops ends its processes one by one; its own time limit holds then."""
    failed = list[str]()
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            dead = psutil.Process(process.pid)
            async with FakeGrpcServer([TOKEN]) as server:
                more = {"process": dead, "stop_requested": stopping}
                watching = watch(server.url, tmp_path, SECONDS, failed, **more)
                await eventually(lambda: watching.verdict.ready)
                process.kill()
                await eventually(lambda: watching.verdict.failed)
                looked_at = watching.looked_at
                if stopping:
                    await eventually(lambda: watching.looked_at > looked_at)
                else:
                    await eventually(lambda: failed)
                await asyncio.to_thread(watching.close)
        finally:
            process.kill()
    assert failed == ([] if stopping else ["the process of tritonserver is dead"])


@pytest.mark.parametrize("moving", ["responses", "tokens"])
async def test_load_alone_does_not_make_a_server_unready(
    tmp_path: Path, clock: Clock, moving: str
) -> None:
    """No canary gets through, but others get tokens, or their answers in one piece grow; when they
    no longer do, it has failed."""
    files, failed = StatusDirectory(tmp_path), list[str]()
    moved = 0

    def progress() -> None:
        nonlocal moved
        moved += 1
        now = clock.now
        status = ProcessStatus(os.getpid(), now, now, responses=0, running=256)
        files.write(replace(status, **{moving: moved}))

    async with FakeGrpcServer([BUSY]) as server:
        watching = watch(server.url, tmp_path, stall_s=1.0, failed=failed)
        enough = clock.now + 2.5  # more than twice the limit: without progress it would fail

        def kept_ready() -> bool:
            progress()
            clock.move(0.3, watching.looked_at)
            assert (watching.verdict.ready, failed) == (True, [])
            return clock.now > enough and len(server.asked) >= 5

        def has_failed() -> bool:
            clock.move(0.3, watching.looked_at)
            return bool(failed)

        await eventually(kept_ready)
        await eventually(has_failed)
        assert "no response has left for" in failed[0]
        await asyncio.to_thread(watching.close)


async def test_a_canary_that_failed_is_sent_again_however_many_others_get_answers(
    tmp_path: Path,
) -> None:
    """Nothing else would say that requests for a token work again."""
    files, moved = StatusDirectory(tmp_path), 0
    steps: list[Step] = [Fail("INTERNAL: CUDA error")]

    def ready_while_others_progress() -> bool:
        nonlocal moved
        moved += 1
        now = time.monotonic()
        files.write(ProcessStatus(os.getpid(), now, now, moved, 1))
        return watching.verdict.ready

    pace = Pace(look_s=0.01, canary_s=0.5, answer_s=5.0)
    async with FakeGrpcServer(lambda _: steps) as server:
        watching = watch(server.url, tmp_path, SECONDS, [], pace=pace)
        await eventually(lambda: not watching.verdict.ready)
        steps[:] = [TOKEN]
        await eventually(ready_while_others_progress)
        await asyncio.to_thread(watching.close)


async def test_a_server_without_file_descriptors_has_failed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """It accepts no connection; a moment without any is no failure."""
    line, failed = "the process of tritonserver has used its 9 file descriptors", list[str]()
    found = (line,)
    monkeypatch.setattr(ServerProcesses, "without_descriptors", lambda _: found)
    async with FakeGrpcServer([TOKEN]) as server:
        watching = watch(server.url, tmp_path, 1.0, failed)
        await eventually(lambda: watching.verdict.reasons == (line,))
        found = ()
        await eventually(lambda: watching.verdict.ready)
        assert failed == []
        found = (line,)

        def has_failed() -> bool:
            clock.move(0.3, watching.looked_at, len(server.asked))  # canaries are answered
            return bool(failed)

        await eventually(has_failed)
        await asyncio.to_thread(watching.close)
    assert failed == [line]


async def test_a_server_of_other_models_alone_is_never_without_progress(tmp_path: Path) -> None:
    """Nobody counts its responses, and no request for a token can be sent."""
    async with FakeGrpcServer([TOKEN]) as server:
        watching = watch(server.url, tmp_path, 0.1, failed := [], models=("theirs",))
        enough = time.monotonic() + 1.0  # many times the limit
        await eventually(lambda: time.monotonic() > enough)
        assert (watching.verdict.ready, failed, server.asked) == (True, [], [])
        await asyncio.to_thread(watching.close)
