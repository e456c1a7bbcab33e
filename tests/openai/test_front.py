"""What stands in front of the workers: probes are answered there, all else is a worker's."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from trtllm_bls.openai.front import Front, SharedProofs, WorkerLoop

PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\nUser-Agent: probe\r\n\r\n"
CLOSING = b"GET /health HTTP/1.1\r\nhost: x\r\nConnection: close\r\n\r\n"
OTHER = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n"


class Bench:
    """A front, and the end at which its workers would take connections."""

    def __init__(self, stack: ExitStack, **options: float) -> None:
        self.healthy, self._stop = True, threading.Event()
        # Clients that a full backlog turns away try again only after a second.
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = listening.getsockname()
        pair = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours, theirs = map(stack.enter_context, pair)
        self.workers = stack.enter_context(theirs.dup())  # as a process of its own would have it
        stopping = self._stop.is_set
        self.front = Front(listening, (ours, theirs), lambda: self.healthy, stopping, **options)
        self.front.start()
        stack.callback(self.stop)

    def stop(self) -> None:
        self._stop.set()
        self.front.join()

    def client(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def taken(self) -> socket.socket:
        """The connection that a worker is given next."""
        select.select([self.workers], [], [], 60)
        _, fds, _, _ = socket.recv_fds(self.workers, 1, 1)
        found = socket.socket(fileno=fds[0])
        found.settimeout(60)
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def answered(client: socket.socket, request: bytes) -> bytes:
    client.sendall(request)
    read = b""
    while not read.endswith(b'{"status":"ok"}'):
        read += client.recv(4096)
    return read


def test_probes_are_answered_though_no_worker_reads(bench: Bench) -> None:
    """Several on one connection, and one that asks for its end."""
    with bench.client() as client:
        for _ in range(3):
            assert answered(client, PROBE).startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answered(client, CLOSING)
        assert client.recv(1) == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        OTHER,
        PROBE + PROBE,
        PROBE[:20],
        PROBE.replace(b"health", b"healthy"),
        PROBE.replace(b"User-Agent", b"Origin"),
        PROBE.replace(b"User-Agent", b"X-Request-Id"),
        PROBE.replace(b"GET", b"HEAD"),
        PROBE.replace(b"1.1", b"1.0"),
    ],
)
def test_what_is_no_plain_probe_is_a_workers(bench: Bench, request_bytes: bytes) -> None:
    """With nothing read of it."""
    with bench.client() as client:
        client.sendall(request_bytes)
        with bench.taken() as taken:
            assert taken.recv(4096) == request_bytes


def test_a_connection_goes_to_a_worker_after_its_probes(bench: Bench) -> None:
    """And stays there."""
    with bench.client() as client:
        answered(client, PROBE)
        client.sendall(OTHER)
        with bench.taken() as taken:
            assert taken.recv(4096) == OTHER


def test_without_a_proof_a_worker_is_asked(bench: Bench) -> None:
    """It asks the engine."""
    bench.healthy = False
    with bench.client() as client:
        client.sendall(PROBE)
        with bench.taken() as taken:
            assert taken.recv(4096) == PROBE


def test_connections_wait_for_workers_in_order(bench: Bench) -> None:
    """More than the socket to them holds; probes are answered meanwhile."""
    with ExitStack() as stack:
        clients = [stack.enter_context(bench.client()) for _ in range(600)]
        for number, client in enumerate(clients):
            client.sendall(b"%d" % number)
        with bench.client() as prober:
            answered(prober, PROBE)
        got = []
        for _ in clients:
            with bench.taken() as taken:
                got.append(int(taken.recv(16)))
    assert sorted(got) == list(range(600))


def test_a_stopped_front_refuses_connections(bench: Bench) -> None:
    """Its listening socket is closed."""
    bench.stop()
    with pytest.raises(ConnectionRefusedError):
        bench.client()


def test_what_no_worker_has_taken_is_closed_at_the_end(bench: Bench) -> None:
    """A client that came too late is not left to wait."""
    with bench.client() as client:
        client.sendall(OTHER)
        select.select([bench.workers], [], [], 60)
        bench.stop()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_connection_that_asks_nothing_is_closed() -> None:
    """It takes a file descriptor away from others."""
    with ExitStack() as stack:
        silent = stack.enter_context(Bench(stack, silent_s=0).client())
        assert silent.recv(1) == b""


def test_without_file_descriptors_the_oldest_silent_connection_goes(bench: Bench) -> None:
    """And the next is accepted."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        silent = [stack.enter_context(bench.client()) for _ in range(3)]
        prober = stack.enter_context(bench.client())
        answered(prober, PROBE)
        late = stack.enter_context(socket.socket())
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, before[1]))
        late.settimeout(60)
        late.connect(bench.address)
        assert answered(late, PROBE).startswith(b"HTTP/1.1 200 OK\r\n")
        assert silent[0].recv(1) == b""


def test_without_file_descriptors_who_cannot_be_taken_is_told_so(bench: Bench) -> None:
    """At once, where no connection is silent; the next one is a worker's again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        late, later = (stack.enter_context(socket.socket()) for _ in range(2))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (later.fileno() + 1, before[1]))
        late.settimeout(60)
        late.connect(bench.address)
        head, _, body = late.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        later.connect(bench.address)
        later.sendall(OTHER)
        with bench.taken() as taken:
            assert taken.recv(4096) == OTHER


def test_a_worker_serves_what_it_is_given(bench: Bench) -> None:
    """With any protocol, until its server is closed."""

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            self._transport.write(data)
            self._transport.close()

    async def run() -> bytes:
        server = await asyncio.get_running_loop().create_server(Echo, sock=bench.workers)
        reader, writer = await asyncio.open_connection(*bench.address)
        writer.write(OTHER)
        echoed = await reader.read()
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        return echoed

    loop = WorkerLoop()
    try:
        assert loop.run_until_complete(run()) == OTHER
    finally:
        loop.close()


def test_a_proof_holds_for_a_moment(tmp_path: Path) -> None:
    """Of whichever worker."""
    proofs = SharedProofs(tmp_path)
    assert not proofs.hold()
    proofs.renew()
    assert SharedProofs(tmp_path).hold()
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))
    assert not proofs.hold()


def test_no_directory_is_no_proof(tmp_path: Path) -> None:
    """It is gone while the server ends."""
    assert not SharedProofs(tmp_path / "gone").hold()
