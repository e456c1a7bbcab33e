"""Which threads a server of requests keeps on one core, and what it does where it may not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import pytest

from tests.helpers.request_servers import ONE
from trtllm_bls.pipeline.testing import SECONDS, FakeTriton
from trtllm_bls.triton import request_server
from trtllm_bls.triton.one_core import OneCore
from trtllm_bls.triton.request_server import Call, RequestServer


def test_a_server_keeps_its_threads_together_and_lets_workers_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the loop, the senders, the watcher and Triton; ``asyncio.to_thread``'s are free."""
    looked, freed = threading.Event(), []

    class Watched(OneCore):
        def __init__(self, threads: Iterable[int]) -> None:
            self.named = list(threads)

        def check(self) -> None:
            looked.set()

        def close(self) -> None:
            closed.append(self)

        def free_this_thread(self) -> None:
            freed.append(threading.get_native_id())

    async def handle(call: Call) -> None:
        ran.append(threading.get_native_id())
        worked.append(await asyncio.to_thread(threading.get_native_id))
        call.finish()

    ran: list[int] = []
    worked: list[int] = []
    closed: list[OneCore] = []
    monkeypatch.setattr(request_server, "OneCore", Watched)
    triton = FakeTriton()
    server = RequestServer(triton, handle, senders=2, one_core=True)
    ask = triton.ask(ONE, "number")
    server.accept([ask])
    ask.wait()
    assert looked.wait(SECONDS)
    watched = server._one_core
    assert isinstance(watched, Watched)
    server.close()
    assert closed == [watched]
    named = watched.named
    assert len(set(named)) == 5
    assert {*ran, threading.get_native_id()} < set(named)
    assert freed == worked
    assert not set(worked) & set(named)


@pytest.mark.parametrize("where", ["__init__", "check"])
def test_a_system_that_does_not_let_us_choose_is_told_and_left_alone(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a sandbox without /proc, or one that refuses the call."""
    caplog.set_level("INFO")
    told = threading.Event()

    def refused(*_: object) -> None:
        told.set()
        raise PermissionError(1, "Operation not permitted")

    async def handle(call: Call) -> None:
        call.finish()

    given_up: list[OneCore] = []
    monkeypatch.setattr(OneCore, "close", lambda self: given_up.append(self))
    monkeypatch.setattr(OneCore, where, refused)
    triton = FakeTriton()
    server = RequestServer(triton, handle, one_core=True)
    assert told.wait(SECONDS)
    ask = triton.ask(ONE, "number")
    server.accept([ask])
    ask.wait()
    server.close()
    assert caplog.messages == ["threads run on any core: [Errno 1] Operation not permitted"]
    assert len(given_up) == (where == "check")  # what was not made has no core
