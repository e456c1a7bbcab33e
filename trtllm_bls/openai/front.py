"""What accepts connections for the workers, and answers ``GET /health`` by itself.

A worker's event loop may have the tokens of a thousand streams to write before it comes to a probe.
So a thread of the process that supervises the workers, which has nothing else to do, accepts each
connection and looks at what it asks first. It gives it to a worker with nothing read from it,
unless it asks for ``/health`` in the plainest way and a worker has proven lately that it answers.

A connection goes as a message over a socket that all workers read: whichever is free takes it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

from trtllm_bls.openai.errors import ApiError

try:
    from uvloop import Loop
except ModuleNotFoundError:  # not for every interpreter
    from asyncio import SelectorEventLoop as Loop  # type: ignore[assignment]

_LOOK_S = 0.2  # between looks at whether to stop
RENEW_S = 0.5  # after which a worker renews its proof
_PROVEN_S = 2.5  # so long a proof holds; a loop with more to do than it can is late
_HEAD_BYTES = 2048
_HANDSHAKE_S = 10  # of TLS
_MOST_READ = 1 << 20  # of what is refused
_HARMLESS = rb"(?:host|user-agent|accept[a-z-]*|cache-control):[^\r\n]*\r\n"
_PROBE = re.compile(
    rb"GET /health HTTP/1\.1\r\n(?:%b|connection: *(?:(close)|keep-alive)\r\n)*\r\n" % _HARMLESS,
    re.I,
)
_BODY = b'{"status":"ok"}'
_FULL = ApiError(503, "no file descriptors are left; try again", code="overloaded").body
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
)
_REFUSAL += b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_FULL), _FULL)


class SharedProofs:
    """Which workers have proven that they can answer: a file of each in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / f"{os.getpid()}.proven"

    def renew(self) -> None:
        """This worker can answer."""
        self._own.touch()

    def hold(self) -> bool:
        """Whether some worker could answer a moment ago."""
        oldest = time.time() - _PROVEN_S
        with suppress(OSError), os.scandir(self._directory) as files:
            return any(f.name.endswith(".proven") and f.stat().st_mtime > oldest for f in files)
        return False


class Front(threading.Thread):
    """Accepts from ``listening``, which it closes at the end, until ``stopping``.

    ``workers``: a pair of SOCK_SEQPACKET sockets; connections go into the first, and the workers
    read the second. ``healthy``: whether to say so; ``None``: what is asked cannot be read here,
    nor an answer be written. ``silent_s``: after so many seconds in which it asks nothing a
    connection is closed.
    """

    def __init__(
        self,
        listening: socket.socket,
        workers: tuple[socket.socket, socket.socket],
        healthy: Callable[[], bool] | None,
        stopping: Callable[[], bool],
        silent_s: float = 75,
    ) -> None:
        super().__init__(name="front", daemon=True)
        self._listening, (self._workers, self._theirs) = listening, workers
        self._healthy, self._stopping, self._silent_s = healthy, stopping, silent_s
        # Nothing is known of their next request; and since when, the longest first.
        self._connections: dict[int, tuple[socket.socket, float]] = {}
        self._waiting: deque[socket.socket] = deque()  # for the workers to take earlier ones
        self._epoll = select.epoll()
        self._reserve = os.open(os.devnull, os.O_RDONLY)  # for want of another file descriptor
        for each in (listening, *workers):
            each.setblocking(False)
        self._epoll.register(listening, select.EPOLLIN)
        self._epoll.register(self._workers, 0)

    def run(self) -> None:
        while not self._stopping():
            for fd, _ in self._epoll.poll(_LOOK_S):
                if fd == self._listening.fileno():
                    self._accept()
                elif fd == self._workers.fileno():
                    self._send_waiting()
                elif fd in self._connections:
                    self._look_at(self._connections[fd][0])
            self._close_silent(time.monotonic() - self._silent_s)
        self._listening.close()
        os.close(self._reserve)
        for each in (*(pair[0] for pair in self._connections.values()), *self._waiting):
            each.close()
        self._workers.close()
        with suppress(BlockingIOError):  # what no worker takes any more
            while fds := socket.recv_fds(self._theirs, 1, 1)[1]:
                os.close(fds[0])

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # for want of file descriptors
                self._make_room()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = (connection, time.monotonic())
        self._epoll.register(connection, select.EPOLLIN)

    def _make_room(self) -> None:
        """Close the connection that has been silent for longest, or refuse the next."""
        if self._connections:
            self._close_silent(next(since for _, since in self._connections.values()))
            return
        os.close(self._reserve)
        with suppress(OSError):
            connection, _ = self._listening.accept()
            with connection:
                connection.setblocking(False)
                connection.send(_REFUSAL if self._healthy else b"")
                connection.shutdown(socket.SHUT_WR)
                connection.recv(_MOST_READ)  # what is left unread would take the answer back
        self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _close_silent(self, since: float) -> None:
        """Close connections that have asked nothing ``since`` then, a time of ``monotonic``."""
        while self._connections:
            connection, begun = next(iter(self._connections.values()))
            if begun > since:
                return
            self._forget(connection)
            connection.close()

    def _look_at(self, connection: socket.socket) -> None:
        try:
            head = connection.recv(_HEAD_BYTES, socket.MSG_PEEK)
            probe = _PROBE.fullmatch(head) if head and self._healthy else None
            if probe is not None and self._healthy and self._healthy():
                connection.send(_answer(closes=bool(probe[1])))
                connection.recv(len(head))
                head = b"" if probe[1] else head
                if head:  # it begins to be silent again
                    del self._connections[connection.fileno()]
                    self._connections[connection.fileno()] = (connection, time.monotonic())
            elif head:
                self._forget(connection)
                self._waiting.append(connection)
                self._send_waiting()
        except BlockingIOError:
            return
        except OSError:
            head = b""
        if not head:
            self._forget(connection)
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._epoll.unregister(connection)
        del self._connections[connection.fileno()]

    def _send_waiting(self) -> None:
        try:
            while self._waiting:
                socket.send_fds(self._workers, [b"."], [self._waiting[0].fileno()])
                self._waiting.popleft().close()
        except OSError:  # full, or no worker reads it at the moment
            pass
        self._epoll.modify(self._workers, select.EPOLLOUT if self._waiting else 0)


def _answer(closes: bool) -> bytes:
    fields = (
        "HTTP/1.1 200 OK",
        f"date: {formatdate(usegmt=True)}",
        "content-type: application/json",
        f"content-length: {len(_BODY)}",
        f"x-request-id: {os.urandom(16).hex()}",
        *(["connection: close"] if closes else []),
    )
    return "\r\n".join(fields).encode() + b"\r\n\r\n" + _BODY


class WorkerLoop(Loop):
    """A loop that serves what a ``Front`` gives where it is told to listen at its socket."""

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        """See ``asyncio``."""
        sock = options.get("sock")
        if sock is None or sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            return await super().create_server(protocol_factory, *args, **options)
        return _Given(self, protocol_factory, sock, options.get("ssl"))


class _Given:
    """As much of an ``asyncio.Server`` as uvicorn uses."""

    def __init__(self, loop: WorkerLoop, factory: Any, sock: socket.socket, tls: Any) -> None:
        self._loop, self._factory, self._sock = loop, factory, sock
        self._options = {"ssl": tls, "ssl_handshake_timeout": _HANDSHAKE_S} if tls else {}
        self._beginning: set[asyncio.Task[Any]] = set()
        sock.setblocking(False)
        loop.add_reader(sock, self._take)

    def _take(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        except BlockingIOError:  # another worker was faster
            return
        if not data:
            self.close()  # nobody is in front any more
        for fd in fds:
            connection = socket.socket(fileno=fd)
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it has left, or its handshake failed
            await self._loop.connect_accepted_socket(self._factory, connection, **self._options)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        pass
