"""A process that is asked to drain: rounds become plain requests, new requests are refused."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.helpers.request_servers import ONE, number, opened
from tests.helpers.scripted_pairs import engine_request, hashed_pair, ids, read
from tests.helpers.waiting import join, until, with_room
from trtllm_bls.cli import main
from trtllm_bls.errors import EngineUnavailable, SettingsError, ShuttingDown
from trtllm_bls.openai.exchange import RunningRequests
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.orchestrator.lifecycle import Lifecycle
from trtllm_bls.orchestrator.orchestrator import Admission, Load
from trtllm_bls.orchestrator.status import ProcessStatus, StatusDirectory, common_problem, start_of
from trtllm_bls.pipeline.testing import SECONDS, FakeTriton
from trtllm_bls.triton.request_server import Call

# --- speculation ----------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("source", ["model", "ngram", "mixed"])
@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 8])
async def test_rounds_become_one_plain_request(
    streaming: bool, source: str, length: int | None, after: int
) -> None:
    """At whatever moment it comes: the text is the same, and one request brings all the rest."""
    engines = hashed_pair(rate=0.8)
    request = engine_request(max_tokens=60, streaming=streaming)
    expected = ids(await read(engines.target, request))
    engines.target.requests.clear()
    engine = engines.speculative(draft_source=source, num_draft_tokens=length)
    async with aclosing(engine.generate(request)) as stream:
        while len(engines.target.requests) < after and not engine.ended:
            await asyncio.sleep(0)
        asked = len(engines.target.requests)
        engine.drain()
        got = ids([chunk async for chunk in stream])
    assert got == expected
    later = [each.draft for each in engines.target.requests[asked:]]
    assert later in ([], [None])  # none where the last round was under way
    assert engine.handed_over


async def test_a_process_has_not_handed_over_while_rounds_run() -> None:
    """Only a request that asks for all the rest needs nothing more from a server that stops."""
    engines = hashed_pair(rate=0.8)
    engine = engines.speculative(num_draft_tokens=3)
    async with aclosing(engine.generate(engine_request(max_tokens=60, streaming=True))) as stream:
        await stream.wait()
        assert not engine.handed_over
        engine.drain()
        while not engine.handed_over:
            await asyncio.sleep(0)
        assert engine.shared.in_flight == 1  # still running: it settled before its end
        assert [chunk async for chunk in stream]


async def test_what_waits_for_a_place_is_refused() -> None:
    """It has no token yet, so another server can do it as well."""
    admission = Admission(max_running=1, max_queued=9, max_queue_s=None)

    async def wait() -> None:
        async with admission.acquire(1):
            raise AssertionError("it got a place")

    async with admission.acquire(1):
        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        while admission.queued < 3:
            await asyncio.sleep(0)
        admission.refuse_waiting(ShuttingDown)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [ShuttingDown] * 3
        assert (admission.running, admission.queued) == (1, 0)
    async with admission.acquire(1):
        pass


# --- the process ----------------------------------------------------------------------------


@pytest.fixture
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status is written at every tick. Once a second, as users have it, tests would wait for."""
    monkeypatch.setattr("trtllm_bls.orchestrator.lifecycle.WRITE_SECONDS", 0.0)


class StubbornEngine:
    """Settles when it is told to."""

    def __init__(self) -> None:
        self.handed_over = False
        self.drained = threading.Event()
        self.problem = ""
        self.load = lambda: Load(running=2, waiting=5, queued=3, tokens=0)

    async def engine_problems(self) -> dict[str, str]:
        return {"engine": self.problem}

    async def drain(self) -> None:
        self.drained.set()


def status_when(
    files: StatusDirectory, condition: Callable[[ProcessStatus], bool]
) -> ProcessStatus:
    """The process's status once it is so."""
    return until(lambda: list(filter(condition, files.read())))[0]


async def never_ends(call: Call) -> None:
    call.send(number(1))
    await asyncio.get_running_loop().create_future()


@pytest.mark.usefixtures("frequent")
def test_a_process_tells_what_it_does(tmp_path: Path) -> None:
    """Its requests by id, responses counted, the loop's last turn, what an engine says it has."""
    triton, engine = FakeTriton(), StubbornEngine()
    ask = triton.ask(ONE, "number", id="mine")
    with opened(triton, never_ends) as server:
        lifecycle = Lifecycle(server, engine, str(tmp_path / "status"))
        files = StatusDirectory(tmp_path / "status")
        assert status_when(files, lambda now: now.running == 0).pid == os.getpid()
        server.accept([ask])
        told = status_when(files, lambda now: now.running == now.responses == 1)
        assert told.requests[0].startswith("mine-") and not told.handed_over
        assert common_problem(told.engines) is None
        assert (told.prompts, told.waiting, told.queued) == (7, 5, 3)
        engine.problem = "it is not healthy"
        status_when(files, lambda now: common_problem(now.engines) == "it is not healthy")
        later = status_when(files, lambda now: now.loop_at > told.loop_at)
        assert later.written_at > told.written_at
        lifecycle.close()
    assert ask.error is not None  # the server was closed


@pytest.mark.usefixtures("frequent")
def test_a_stuck_event_loop_is_told_by_another_thread(tmp_path: Path) -> None:
    """Within seconds, since that thread has its turns; and it is well again afterwards."""
    stuck = threading.Event()
    with opened(FakeTriton(), never_ends) as server:
        lifecycle = Lifecycle(server, StubbornEngine(), str(tmp_path))
        files = StatusDirectory(tmp_path)
        server.loop.call_soon_threadsafe(stuck.wait, SECONDS)
        status_when(files, lambda now: now.missed_turns > 3)
        stuck.set()
        status_when(files, lambda now: now.missed_turns == 0)
        lifecycle.close()


def test_a_draining_process_refuses_what_is_new_and_ends_what_lasts_too_long(
    tmp_path: Path,
) -> None:
    """A clear refusal; a request that runs past the deadline ends with an error, not silently."""
    triton, engine = FakeTriton(), StubbornEngine()
    running, late = (triton.ask(ONE, "number", id=name) for name in ("running", "late"))
    with opened(triton, never_ends) as server:
        files = StatusDirectory(tmp_path)
        files.ask_to_drain(0.0)  # left there by a server that has ended
        lifecycle = Lifecycle(server, engine, str(tmp_path))
        server.accept([running])
        running.wait(responses=1)
        files.ask_to_drain(float("inf"))
        assert engine.drained.wait(SECONDS)
        server.accept([late])
        assert (refusal := late.wait().error) is not None
        assert (refusal.code(), "shutting down" in refusal.message()) == ("UNAVAILABLE", True)
        assert not status_when(files, lambda now: now.running == 1).handed_over
        engine.handed_over = True
        assert status_when(files, lambda now: now.handed_over).running == 1
        files.ask_to_drain(0.0)
        ended = running.wait().error
        assert ended is not None and ended.code() == EngineUnavailable.status
        lifecycle.close()


def test_what_runs_at_the_deadline_is_ended_once(tmp_path: Path) -> None:
    """Its last response may need longer than until the next look."""
    ended, looks = list[str](), set[float]()

    async def end_all() -> None:
        ended.append("all")

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server: Any = SimpleNamespace(loop=loop, running=["a"], responses=0, end_all=end_all)
    files = StatusDirectory(tmp_path)

    def look() -> bool:
        looks.add(files.read()[0].written_at)
        return len(looks) > 5

    with closing(Lifecycle(server, StubbornEngine(), str(tmp_path))):
        files.ask_to_drain(0.0)
        until(look)
    loop.call_soon_threadsafe(loop.stop)
    join(thread)
    loop.close()
    assert ended == ["all"]


def test_a_drain_can_be_asked_for_again_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another deadline: the file that was kept for it has been used by then."""

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    files = StatusDirectory(tmp_path)
    files.forget_drain()
    files.ask_to_drain(7.5)
    monkeypatch.setattr(StatusDirectory, "_create", full)
    files.ask_to_drain(9.5)
    assert files.drain_deadline() == 9.5


def test_a_drain_needs_no_room_on_the_disk(tmp_path: Path) -> None:
    """Processes hear of it, of its deadline, and are seen to hand over."""
    engine = StubbornEngine()
    with opened(FakeTriton(), never_ends) as server:
        lifecycle = Lifecycle(server, engine, str(tmp_path))
        files = StatusDirectory(tmp_path)
        room = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, room[1]))
        try:
            with pytest.raises(OSError, match="large"):
                (tmp_path / "more").write_text("more")
            files.ask_to_drain(7.5)
            assert files.drain_deadline() == 7.5
            assert engine.drained.wait(SECONDS)
            assert not files.handed_over
            engine.handed_over = True
            status_when(files, lambda now: now.handed_over)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, room)
            lifecycle.close()


@pytest.mark.usefixtures("frequent")
def test_the_command_waits_until_nothing_runs(tmp_path: Path) -> None:
    """As a preStop hook should; without --wait it returns at the hand-over."""
    triton, engine = FakeTriton(), StubbornEngine()
    engine.handed_over = True
    running = triton.ask(ONE, "number", id="running")
    words = ["drain", "--dir", str(tmp_path), "--timeout", str(SECONDS)]

    def attempt(deadline_s: float) -> bool | None:
        """``None`` if the request had not ended as late as the command waits."""
        begin = time.monotonic()
        told = CliRunner().invoke(main, [*words, "--deadline", str(deadline_s), "--wait"])
        assert told.exit_code == 0
        if "handed over, requests running: 0" in told.output:
            return True
        assert "handed over, requests running: 1" in told.output
        assert time.monotonic() > begin + deadline_s + 2
        return None

    with opened(triton, never_ends) as server:
        lifecycle = Lifecycle(server, engine, str(tmp_path))
        server.accept([running])
        running.wait(responses=1)
        told = CliRunner().invoke(main, words)
        assert (told.exit_code, "handed over, requests running: 1" in told.output) == (0, True)
        with_room(attempt, 0.1, 1.0, 10.0)
        lifecycle.close()


def test_a_link_among_the_regions_is_not_followed(tmp_path: Path) -> None:
    """Another user can put one there once a region has told the name that they begin with."""
    theirs, scratch = tmp_path / "theirs", Scratch()
    theirs.touch(0o644)
    planted = Path(f"{scratch.regions}planted")
    planted.symlink_to(theirs)
    scratch.hide_regions()
    assert theirs.stat().st_mode & 0o777 == 0o644
    scratch.remove()
    assert theirs.exists() and not os.path.lexists(planted)


def test_a_directory_without_a_server_is_no_drained_server(tmp_path: Path) -> None:
    """It may be another one than the server's."""
    told = CliRunner().invoke(main, ["drain", "--dir", str(tmp_path)])
    assert told.exit_code == 1
    assert "no process keeps a status there" in " ".join(told.output.split())


def test_what_an_earlier_server_left_is_removed(tmp_path: Path) -> None:
    """Process numbers come again, at the latest with the container's next start."""
    files = StatusDirectory(tmp_path)
    files.write(ProcessStatus(pid=os.getpid(), written_at=0, loop_at=0, responses=0, running=3))
    files.ask_to_drain(0.0)
    scratch = Scratch()
    scratch.keep_status(str(tmp_path))
    assert files.read() == [] and files.drain_deadline() is None
    scratch.remove()
    assert tmp_path.exists()  # it is not ours
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"status_dir .*/file/status: "):
        scratch.keep_status(str(tmp_path / "file" / "status"))


def test_a_full_disk_does_not_make_a_process_look_stuck(tmp_path: Path) -> None:
    """What it does is not known any more, but that it runs is."""
    files = StatusDirectory(tmp_path)
    first = ProcessStatus(pid=os.getpid(), written_at=1, loop_at=1.5, responses=7, running=3)
    files.write(first)
    assert files.read() == [first]
    (file,) = tmp_path.iterdir()
    file.with_suffix(".new").mkdir()  # cannot be written to
    with pytest.raises(OSError, match="directory"):
        files.write(replace(first, written_at=60, loop_at=61.5, responses=9))
    assert files.read() == [replace(first, loop_at=61.5)]


def test_a_dead_process_is_not_taken_for_another_one_of_its_number(tmp_path: Path) -> None:
    """Linux uses the numbers again: what a dead one left is removed, whoever has its number now."""
    files = StatusDirectory(tmp_path)
    first = ProcessStatus(pid=os.getpid(), written_at=1, loop_at=1.5, responses=7, running=3)
    files.write(first)
    (mine,) = tmp_path.iterdir()
    dead = mine.with_stem(f"{os.getpid()}-{start_of(os.getpid()) - 1}")
    ended = subprocess.Popen(["true"])
    until(lambda: start_of(ended.pid) is None)  # a zombie, whose number is still its own
    for each in (dead, mine.with_stem(f"{ended.pid}-1"), mine.with_stem("none-1")):
        each.write_text(mine.read_text())
    assert files.read() == [first]
    assert sorted(tmp_path.iterdir()) == sorted([mine, mine.with_stem("none-1")])
    ended.wait()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"pid": 1', "\0", "[1]", '{"more": 1}'])
def test_a_status_that_cannot_be_read_counts_as_absent(tmp_path: Path, text: str) -> None:
    """Whatever is in it."""
    files = StatusDirectory(tmp_path)
    files.write(ProcessStatus(os.getpid(), 1, 1, 0, 0))
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert files.read() == []


def test_no_link_in_the_directory_is_followed(tmp_path: Path) -> None:
    """Another user who may write there could have this process change any file of its own."""
    theirs, directory = tmp_path / "theirs", tmp_path / "status"
    theirs.write_text("as it was")
    os.utime(theirs, (5, 5))
    directory.mkdir()
    files, status = StatusDirectory(directory), ProcessStatus(os.getpid(), 1, 1, 0, 0)
    name = f"{os.getpid()}-{start_of(os.getpid())}"
    links = [*(f"{name}.{end}" for end in ("json", "new")), "drain.new", "drain", "leaving"]
    links += ["model.longest", "model.new"]
    acts: list[Callable[[], object]] = [
        files.read,
        lambda: files.write(status),
        lambda: files.write(replace(status, handed_over=True)),
        files.give_notice,
        lambda: files.ask_to_drain(7.0),
        lambda: files.tell_longest("model", 3),
        files.forget_drain,
        files.clear,
    ]
    for act in acts:
        for name in links:
            with suppress(FileExistsError):
                (directory / name).symlink_to(theirs)
        act()
        state = theirs.stat()
        assert (theirs.read_text(), state.st_mtime, state.st_mode & 0o777) == (
            "as it was",
            5,
            0o644,
        )


class Looked(RunningRequests):
    """Nothing runs; each look, of which every status has one, is counted."""

    looks = 0

    @property
    def running(self) -> list[str]:
        self.looks += 1
        return []

    def look_again(self) -> None:
        """Return when two more statuses have been tried."""
        wanted = self.looks + 3
        until(lambda: self.looks >= wanted)


@pytest.mark.usefixtures("frequent")
async def test_a_process_that_outlives_its_server_says_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory goes with the server; while nobody drains, that is a warning by name.

    It is renamed, at once: a file could be written into one that is just being emptied.
    """
    server, files = Looked(), tmp_path / "status"

    def live_on() -> None:
        with closing(Lifecycle(server, StubbornEngine(), str(files))):
            files.rename(tmp_path / "gone")
            server.look_again()
            assert f"status_dir {files}: No such file or directory" in caplog.text
            files.mkdir()
            StatusDirectory(files).ask_to_drain(float("inf"))
            status_when(StatusDirectory(files), lambda now: True)
            server.look_again()
            caplog.clear()
            files.rename(tmp_path / "gone too")
            server.look_again()
            assert "No such file" not in caplog.text

    server.loop = asyncio.get_running_loop()
    await asyncio.to_thread(live_on)


def test_a_shell_can_ask_too(tmp_path: Path) -> None:
    """An empty drain file has no deadline; what is no status is not read."""
    files = StatusDirectory(tmp_path)
    assert files.drain_deadline() is None
    (tmp_path / "drain").touch()
    assert files.drain_deadline() == float("inf")
    (tmp_path / "1.json").write_text("{}")
    assert files.read() == [] and files.handed_over


def test_a_process_that_has_ended_holds_nobody_up(tmp_path: Path) -> None:
    """It may have been killed in the middle of its requests."""
    files = StatusDirectory(tmp_path)
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    files.write(ProcessStatus(pid=gone, written_at=0, loop_at=0, responses=0, running=3))
    assert files.read() == [] and files.handed_over
