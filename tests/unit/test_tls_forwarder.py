"""TLS in front of a port that knows none."""

from __future__ import annotations

import resource
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import trustme

from tests.helpers.waiting import until
from trtllm_bls.launcher.tls_forwarder import TlsForwarder

SECONDS = 60
LONG = bytes(range(256)) * 20_000


class Bench:
    """A forwarder that asks for certificates, and the port behind it."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.authority, self.told = trustme.CA(), list[str]()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("localhost").configure_cert(context)
        self.authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        listening = socket.create_server(("127.0.0.1", 0))
        self.behind = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.behind.settimeout(SECONDS)
        self.forwarder = TlsForwarder(listening, context, self.told.append, **options)
        self.forwarder.upstream = self.behind.getsockname()
        stack.callback(self.forwarder.close)
        self._stack = stack

    def raw(self) -> socket.socket:
        address = ("127.0.0.1", self.forwarder.port)
        return self._stack.enter_context(socket.create_connection(address, timeout=SECONDS))

    def client(self, authority: trustme.CA | None = None) -> ssl.SSLSocket:
        """Shows a certificate of ``authority``, the right one if not another."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        (authority or self.authority).issue_cert("client").configure_cert(context)
        return self._stack.enter_context(
            context.wrap_socket(self.raw(), server_hostname="localhost")
        )

    def pair(self) -> tuple[ssl.SSLSocket, socket.socket]:
        """Both ends of a connection."""
        client = self.client()
        there = self._stack.enter_context(self.behind.accept()[0])
        there.settimeout(SECONDS)
        return client, there


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def test_no_more_connections_than_the_limit_of_open_files_allows() -> None:
    """Each takes two, beside 256 of the process's own."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256 + 2 * 2, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        bench = Bench(stack)
        pairs = [bench.pair() for _ in range(2)]
        assert closed(bench.raw())
        until(lambda: bench.told)
        assert "2 connections are open" in bench.told[0]
        for pair in pairs:
            pair[0].close()


def received(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        data = connection.recv(min(65536, size - len(got)))
        assert data
        got += data
    return got


def closed(connection: socket.socket) -> bool:
    """Once the other side is gone, in whatever way."""
    with suppress(ConnectionResetError, BrokenPipeError):
        return connection.recv(1) == b""
    return True


def test_bytes_pass_both_ways_and_the_end_comes_after_them(bench: Bench) -> None:
    """Whatever they are; the server's end is a proper one of TLS, which nobody else can make."""
    client, there = bench.pair()
    client.sendall(LONG)
    assert received(there, len(LONG)) == LONG
    there.sendall(LONG)
    there.close()
    assert received(client, len(LONG)) == LONG
    assert client.recv(1) == b""  # Python raises SSLEOFError where it is cut off


@pytest.mark.parametrize("properly", [True, False])
def test_a_client_that_leaves_is_gone_behind_too(bench: Bench, properly: bool) -> None:
    """At once, also while the server says nothing, or more than the client reads."""
    for talks in (False, True):
        client, there = bench.pair()
        if talks:
            there.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    there.send(LONG)
            there.setblocking(True)
            there.settimeout(SECONDS)
        if properly:
            client.setblocking(False)
            with suppress(ssl.SSLError):  # it waits for no answer
                client.unwrap()
        client.close()
        assert closed(there)


def test_a_client_that_reads_nothing_holds_the_server_up(bench: Bench) -> None:
    """Rather than fill memory; it gets all in the end."""
    client, there = bench.pair()
    there.settimeout(1)
    with pytest.raises(TimeoutError):
        there.sendall(bytes(2**28))
    assert received(client, 2**20) == bytes(2**20)


def test_who_shows_no_certificate_or_anothers_is_told_so(bench: Bench) -> None:
    """By TLS itself, and the log says it; the server never sees a connection."""
    context = ssl.create_default_context()
    bench.authority.configure_trust(context)
    without = context.wrap_socket(bench.raw(), server_hostname="localhost")
    with without, pytest.raises(ssl.SSLError, match="certificate required"):
        without.recv(1)
    with pytest.raises(ssl.SSLError, match="unknown ca"):
        bench.client(trustme.CA()).recv(1)
    bench.raw().sendall(b"GET / HTTP/1.1\r\n\r\n")
    reasons = ("peer did not return a certificate", "certificate verify failed", "http request")
    until(lambda: len(bench.told) == len(reasons))
    for line, reason in zip(bench.told, reasons, strict=True):
        assert line == f"HTTPS: 127.0.0.1 was refused: {reason}"
    assert select.select([bench.behind], [], [], 0)[0] == []


def test_while_there_is_no_server_connections_are_closed_at_once(bench: Bench) -> None:
    """Whether it is known to be gone or does not listen yet; and it is found where it is then."""
    bench.forwarder.upstream = None
    assert closed(bench.raw())
    bench.forwarder.upstream = ("127.0.0.1", 1)
    assert closed(bench.client())
    assert "the server is not running" in bench.told[0]
    assert "Triton's HTTP port: " in bench.told[1]
    bench.forwarder.upstream = bench.behind.getsockname()
    client, there = bench.pair()
    there.sendall(b"here")
    assert received(client, 4) == b"here"


def test_connections_and_handshakes_are_bounded() -> None:
    """One more than there may be, and one that says nothing, are closed; the others stay."""
    with ExitStack() as stack:
        bench = Bench(stack, connections=1)
        client, there = bench.pair()
        assert closed(bench.raw())
        assert "1 connections are open" in bench.told[0]
        there.sendall(b"on")
        assert received(client, 2) == b"on"
    with ExitStack() as stack:
        bench = Bench(stack, handshake_s=0.01)
        assert closed(bench.raw())
        assert "no TLS handshake within 0.01 s" in bench.told[0]


def test_the_end_lets_clients_have_what_was_said(bench: Bench) -> None:
    """And nobody can connect any more."""
    client, there = bench.pair()
    there.sendall(LONG[:20_000])
    there.close()
    bench.forwarder.close()
    assert received(client, 20_000) == LONG[:20_000]
    assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        bench.raw()
    bench.forwarder.close()


def test_refusals_do_not_fill_the_log(bench: Bench) -> None:
    """A scanner may come a thousand times."""
    bench.forwarder.upstream = None
    for _ in range(30):
        assert closed(bench.raw())
    assert 5 <= len(bench.told) < 20
