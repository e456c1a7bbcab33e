"""New connections go to the worker that has the fewest; nobody waits for a worker that is gone."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn

from tests.helpers.waiting import join, until
from trtllm_bls.http import accepting
from trtllm_bls.http.accepting import Acceptor, WorkerConnections, WorkerServer, backlog

FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside other threads
CALLERS = 24


class OwnTurns(WorkerConnections):
    """Turns that the test decides."""

    def __init__(self, is_own_turn: bool, others: int) -> None:
        super().__init__()
        self.is_own = is_own_turn
        self.num_others = others

    @property
    def is_own_turn(self) -> bool:
        return self.is_own

    @property
    def others(self) -> int:
        return self.num_others


class Accepted(asyncio.Protocol):
    """A connection that ends as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@contextmanager
def callers(number: int) -> Iterator[socket.socket]:
    """A listening socket, and so many clients that wait to be accepted."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=number))
        for _ in range(number):
            stack.enter_context(socket.create_connection(listening.getsockname(), timeout=60))
        yield listening


def acceptor_of(listening: socket.socket, turns: WorkerConnections) -> Acceptor:
    return Acceptor(listening, Accepted, None, turns, lambda: None)


@pytest.mark.parametrize(
    ("others", "left"),
    [
        (0, [0]),
        # A third of what waits, and a fourteenth where there are eight workers.
        (1, [15, 9, 5, 3, 1, 0]),
        (7, [22, 20, 18]),
    ],
)
async def test_a_worker_takes_less_than_its_share_at_once(others: int, left: list[int]) -> None:
    """So all workers are about even while they accept; who is alone takes all."""
    with callers(CALLERS) as listening:
        acceptor = acceptor_of(listening, OwnTurns(True, others))
        waiting = [CALLERS]
        while waiting[-1] > left[-1]:
            await asyncio.sleep(0)
            now = backlog(listening)
            if now < waiting[-1]:
                waiting.append(now)
        acceptor.close()
        await acceptor.wait_closed()
    assert waiting == [CALLERS, *left]


async def test_a_worker_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts nothing while another has fewer connections."""
    monkeypatch.setattr(accepting, "_PATIENCE_S", 60)
    turns = OwnTurns(False, 1)
    looks = 0

    def look(self: Acceptor) -> None:
        nonlocal looks
        looks += 1
        accept(self)

    accept = Acceptor._accept
    monkeypatch.setattr(Acceptor, "_accept", look)
    with callers(CALLERS) as listening:
        acceptor = acceptor_of(listening, turns)
        while looks < 10:
            await asyncio.sleep(0)
        assert backlog(listening) == CALLERS
        turns.is_own = True
        while backlog(listening):
            await asyncio.sleep(0)
        acceptor.close()
        await acceptor.wait_closed()


async def test_a_worker_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with fewer connections may hang, or be busy for longer than a client should wait."""
    monkeypatch.setattr(accepting, "_PATIENCE_S", 0)
    with callers(CALLERS) as listening:
        acceptor = acceptor_of(listening, OwnTurns(False, 1))
        while backlog(listening):
            await asyncio.sleep(0)
        acceptor.close()
        await acceptor.wait_closed()


@contextmanager
def worker(turns: WorkerConnections, *counts: Callable[[], None]) -> Iterator[Any]:
    """A process that has entered ``turns`` and done what ``counts`` say, and hangs."""
    done = FORK.Event()

    def run() -> None:
        turns.enter()
        for count in counts:
            count()
        done.set()
        signal.pause()

    process = FORK.Process(target=run, daemon=True)
    process.start()
    try:
        assert done.wait(60)
        yield process
    finally:
        process.kill()
        join(process)


def test_the_worker_with_the_fewest_connections_is_in_turn() -> None:
    """Of several with as few, each is."""
    turns = WorkerConnections()
    turns.enter()
    with worker(turns, lambda: turns.note(3)):
        assert turns.others == 1
        turns.note(4)
        assert not turns.is_own_turn
        turns.note(3)
        assert turns.is_own_turn


def test_nobody_waits_for_a_worker_that_accepts_no_more() -> None:
    """One that shuts down says so, although its connections end one by one."""
    turns = WorkerConnections()
    turns.enter()
    turns.note(4)
    with worker(turns, lambda: turns.note(3), turns.leave, lambda: turns.note(2)):
        assert turns.is_own_turn and not turns.others


def test_nobody_waits_for_a_worker_that_was_killed() -> None:
    """Its place is free for the worker that replaces it."""
    turns = WorkerConnections()
    turns.enter()
    turns.note(1)
    with worker(turns) as process:
        assert not turns.is_own_turn
        process.kill()
        join(process)
        until(lambda: turns.is_own_turn)
        assert not turns.others
    with worker(turns):
        assert not turns.is_own_turn
        assert turns.counts() == [1, 0]


def test_connections_are_spread_evenly_over_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is accepted by a worker that has the fewest; those that end make room again."""
    monkeypatch.setattr(accepting, "_PATIENCE_S", 60)
    turns = WorkerConnections()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", b"8")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"%8d" % os.getpid()})

    config = uvicorn.Config(app, lifespan="off", log_config=None, http="httptools")

    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def run() -> None:
            WorkerServer(turns, config).run([listening])

        workers = [FORK.Process(target=run, daemon=True) for _ in range(3)]
        for each in workers:
            each.start()
            stack.callback(join, each)
            stack.callback(each.terminate)
        until(lambda: turns.others == len(workers) - 1)

        def answered() -> tuple[socket.socket, int]:
            client = stack.enter_context(
                socket.create_connection(listening.getsockname(), timeout=60)
            )
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            head, body = b"", b""
            while len(body) < 8:
                part = client.recv(4096)
                assert part, "the server closed the connection"
                head += part
                body = head.partition(b"\r\n\r\n")[2]
            return client, int(body)

        open_clients = [answered() for _ in range(12)]
        spread = Counter(pid for _, pid in open_clients)
        assert sorted(spread.values()) == [4, 4, 4]
        emptied = open_clients[0][1]
        for client, pid in open_clients:
            if pid == emptied:
                client.close()
        until(lambda: sorted(turns.counts()) == [0, 4, 4])
        for _ in range(4):
            assert answered()[1] == emptied
