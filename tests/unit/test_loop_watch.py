"""A blocked event loop is named with its line, and work that takes long has a thread."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import in_pieces, join, until
from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor, testing
from trtllm_bls.pipeline.testing import LoadedModel, serving
from trtllm_bls.triton.loop_watch import LoopWatch

BLOCKS = """
import statistics
import threading

from trtllm_bls.pipeline import StreamingModel, Tensor

gate = threading.Lock()

class TritonPythonModel(StreamingModel):
    outputs = (Tensor("said", "STRING"),)
    gate = gate

    async def answer(self, request, response):
        if request.client_id == "library":
            statistics.mean(wait() for _ in range(1))
        elif request.client_id:
            gate.acquire(timeout=60)  # the line
        await response.send({"said": "done"})

def wait():
    gate.acquire(timeout=60)
    return 1
"""


def told(model: LoadedModel, words: str) -> list[str]:
    """Lines of its log."""
    return [line for _, line in model.triton.lines if words in line]


NAME: ContextVar[str] = ContextVar("name", default="")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sleep", "model.py:17 (answer): gate.acquire(timeout=60) # the line; use await"),
        ("library", "model.py:21 (wait): gate.acquire(timeout=60); use await"),
    ],
)
def test_a_blocked_loop_is_named_with_its_line_and_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """Once each time. A thread of the machine's may stand still elsewhere, which is told too."""
    file = tmp_path / "model.py"
    file.write_text(BLOCKS)
    look = LoopWatch.look
    found: list[int] = []  # lines after each look
    with serving(testing.load(file)) as model:

        def blocked() -> list[str]:
            return [line for line in told(model, "is blocked") if place in line]

        def counted(watch: LoopWatch) -> None:
            look(watch)
            found.append(len(blocked()))

        monkeypatch.setattr(LoopWatch, "look", counted)
        running: Any = model.model
        running.gate.acquire()
        for count in (1, 2):
            ask = model.ask(id=name)
            # The look that tells it, and one that has nothing to add.
            until(lambda count=count: sum(lines >= count for lines in found) >= 2)
            running.gate.release()
            ask.wait()
            in_pieces(lambda: told(model, "runs again; it was blocked for "), count - 1)
        lines = blocked()
    assert len(lines) == 2
    assert re.match(rf"\[model\] {name}-\d+: the event loop is blocked for \d", lines[0])


def test_a_loop_that_only_waits_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    """As where its process got no processor, or was stopped."""
    times = iter((0.0, 1.0, 2.0, 3.0))
    started = threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    loop.call_soon(started.set)
    thread.start()
    assert started.wait(60)
    until(lambda: waits_for_events(thread))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", lambda callback: None)
        watch = LoopWatch(loop, thread, clock=lambda: next(times))
        for _ in range(3):
            watch.look()
    loop.call_soon_threadsafe(loop.stop)
    join(thread)
    loop.close()
    assert caplog.messages == []


def waits_for_events(thread: threading.Thread) -> bool:
    """True where it is in the call that it makes while it has nothing to run."""
    frame = sys._current_frames()[thread.ident or 0]
    return frame.f_code.co_filename.endswith("selectors.py")


class Works(StreamingModel):
    """Works in threads."""

    inputs = (Tensor("way", "STRING", required=True),)
    outputs = (Tensor("said", "STRING"),)
    release = threading.Event()

    async def answer(self, request: Request, response: Response) -> None:
        NAME.set(request.id)

        def work(way: str, *, end: str) -> str:
            if way == "fails":
                raise ValueError(way)
            if way == "stops":
                raise StopIteration
            if way == "exits":
                raise SystemExit(3)
            if way == "waits":
                assert self.release.wait(60)
            is_daemon = threading.current_thread().daemon
            return f"{NAME.get() == request.id} {is_daemon}{end}"

        said = await self.run_in_thread(work, request.text("way"), end=".")
        await response.send({"said": said})


@pytest.fixture
def working() -> Iterator[Any]:
    Works.release.clear()
    with serving(Works) as model:
        yield model
    Works.release.set()


def test_work_in_a_thread_knows_its_request_and_holds_up_no_other(working: Any) -> None:
    waits = working.ask(way="waits")
    assert working.ask(way="works").wait().said("said") == [[b"True True."]]
    Works.release.set()
    assert waits.wait().error is None


@pytest.mark.parametrize(
    ("way", "kind"), [("fails", "ValueError"), ("stops", "RuntimeError"), ("exits", "RuntimeError")]
)
def test_what_work_in_a_thread_raises_is_raised_in_answer(
    working: Any, way: str, kind: str
) -> None:
    error = working.ask(way=way).wait().error
    assert error is not None and f"unexpected {kind}" in error.message()


def test_a_caller_that_leaves_does_not_wait_for_work_in_a_thread(working: Any) -> None:
    """Nor does the end of the server, which the fixture is."""
    ask = working.ask(way="waits")
    until(lambda: any(each.name == "of-a-request" for each in threading.enumerate()))
    ask.leave()
    ask.wait()
    assert not Works.release.is_set()
