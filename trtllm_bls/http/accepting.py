"""Connections of HTTP workers: each new one goes to the worker that has the fewest.

The workers are forks of one process and listen on the same sockets. If whoever wakes first accepted
everything, one worker could have twice as many streams as another, and their first tokens would
wait for all of them. So each worker counts its connections in memory that all share
(``WorkerConnections``), and accepts (``Acceptor``) while no other has fewer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import socket
import ssl
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

_WORKER_PLACES = 256  # workers, including those that are being replaced
_COUNT_BYTES = 8
_NO_WORKER = 2**62  # the count of a place that no worker has, which is never the lowest
_ACCEPTED_AT_ONCE = 32  # connections in one turn of the event loop: more would hold up streams
_PAUSE_S = 0.001  # until a worker looks again whether it is its turn
_PATIENCE_S = 0.005  # for a worker with fewer connections, which may be busy or hang
_NO_DESCRIPTORS_S = 0.5  # until a process without free descriptors tries again
_TCP_INFO_BACKLOG = struct.Struct("=24xI")  # ``tcpi_unacked``: of a listening socket, its backlog

log = logging.getLogger(__name__)


class WorkerConnections:
    """The number of connections of each worker, in memory that they inherit from their parent.

    A worker locks its place. The kernel frees the lock of a worker that ends, however it ends.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("trtllm-bls-connections")
        os.ftruncate(self._file, _WORKER_PLACES * _COUNT_BYTES)
        self._counts = memoryview(mmap.mmap(self._file, 0)).cast("q")
        for place in range(_WORKER_PLACES):
            self._counts[place] = _NO_WORKER
        self._own_place: int | None = None

    def enter(self) -> None:
        """Count this process as a worker without connections."""
        for place in range(_WORKER_PLACES):
            if self._lock(place):
                self._own_place = place
                self.note(0)
                return
        log.warning("more than %d workers; this one accepts out of turn", _WORKER_PLACES)

    def note(self, count: int) -> None:
        """Tell the other workers how many connections this one has."""
        if self._own_place is not None:
            self._counts[self._own_place] = count

    def leave(self) -> None:
        """Tell the other workers that this one accepts no more."""
        self.note(_NO_WORKER)
        self._own_place = None

    def counts(self) -> list[int]:
        """Return the number of connections of each worker that accepts."""
        return [count for count in self._counts if count != _NO_WORKER]

    @property
    def others(self) -> int:
        """The number of other workers that accept."""
        return len(self.counts()) - 1

    @property
    def is_own_turn(self) -> bool:
        """True while no other worker has fewer connections."""
        if self._own_place is None:
            return True
        counts = list(self._counts)
        fewest = min(counts)
        if counts[self._own_place] <= fewest:
            return True
        place = counts.index(fewest)
        if self._lock(place):  # its worker was killed
            self._counts[place] = _NO_WORKER
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
        return False

    def _lock(self, place: int) -> bool:
        """Lock a place unless another process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            return False
        return True


class Acceptor:
    """Accepts from one listening socket on the running event loop, as an ``asyncio.Server`` does.

    ``on_change`` is called when the number of connections that are being opened changes.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        turns: WorkerConnections,
        on_change: Callable[[], None],
    ) -> None:
        # Tasks by the connection that they open, which may last while TLS is negotiated.
        self.opening: dict[asyncio.Protocol, asyncio.Task[None]] = {}
        self._listening = listening
        self._protocol = protocol
        self._tls = tls
        self._turns = turns
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._waits_until: float | None = None  # for a worker with fewer connections
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and give up connections that are being opened."""
        self._loop.remove_reader(self._listening)
        if self._pause is not None:
            self._pause.cancel()
        for task in self.opening.values():
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is being opened."""
        if self.opening:
            await asyncio.wait(self.opening.values())

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    def _pause_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        """Accept this worker's share of the connections that wait, if it is its turn."""
        if not self._turns.is_own_turn:
            now = self._loop.time()
            if self._waits_until is None:
                self._waits_until = now + _PATIENCE_S
            if now < self._waits_until:
                self._pause_for(_PAUSE_S)
                return
        self._waits_until = None
        # All workers may accept at once. Each takes half of an even share of the backlog, as small
        # shares keep the counts even. A single worker takes the whole backlog.
        share = 1 + backlog(self._listening) // (2 * self._turns.others + 1)
        for _ in range(min(share, _ACCEPTED_AT_ONCE)):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                self._pause_for(_NO_DESCRIPTORS_S)
                return
            connection.setblocking(False)
            protocol = self._protocol()
            task = self._loop.create_task(self._open(connection, protocol))
            self.opening[protocol] = task
            self._on_change()
            task.add_done_callback(partial(self._opened, connection, protocol))

    async def _open(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        except OSError as error:  # a client that leaves, or breaks off the TLS handshake
            log.debug("a connection was not opened: %s", error)

    def _opened(
        self, connection: socket.socket, protocol: asyncio.Protocol, task: asyncio.Task[None]
    ) -> None:
        del self.opening[protocol]
        self._on_change()
        if task.cancelled():
            connection.close()


def backlog(listening: socket.socket) -> int:
    """Return the number of connections that wait to be accepted."""
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BACKLOG.size)
    waiting: int = _TCP_INFO_BACKLOG.unpack(info)[0]
    return waiting


class WorkerServer(uvicorn.Server):
    """uvicorn's server of one worker, which accepts in turn with the other workers."""

    def __init__(self, turns: WorkerConnections, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._turns = turns
        self._acceptors: list[Acceptor] = []
        self.server_state.connections = _CountedSet(self._count)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept from ``sockets``."""
        await super().startup(sockets=[])
        if not self.started:
            return
        self._turns.enter()
        for listening in sockets or ():
            acceptor = Acceptor(
                listening, self._new_protocol, self.config.ssl, self._turns, self._count
            )
            self._acceptors.append(acceptor)
        self.servers = [*self._acceptors]  # type: ignore[list-item]  # uvicorn closes them

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave the turns to the other workers, then end as uvicorn's server does."""
        self._turns.leave()
        await super().shutdown(sockets)

    def _new_protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _count(self) -> None:
        connections = self.server_state.connections
        count = len(connections)
        for acceptor in self._acceptors:
            count += sum(protocol not in connections for protocol in acceptor.opening)
        self._turns.note(count)


class _CountedSet(set[Any]):
    """A set that tells when its size changes, as uvicorn's protocols change it."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._on_change = on_change

    def add(self, element: Any) -> None:
        super().add(element)
        self._on_change()

    def discard(self, element: Any) -> None:
        super().discard(element)
        self._on_change()

    def remove(self, element: Any) -> None:
        super().remove(element)
        self._on_change()
