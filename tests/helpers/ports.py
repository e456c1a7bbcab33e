"""Ports for the servers of tests and benchmarks that cannot choose a port themselves.

A server that listens on port 0 and tells its port needs nothing of this. Others get ports below
those that Linux gives to port 0 and to outgoing connections, so that no connection takes a port
before its server listens, or while its server is started again. Several test processes may run on
one machine. Each owns whole blocks of ports: it listens on the first port of a block for as long as
it runs, which nobody else then can.
"""

from __future__ import annotations

import atexit
import random
import socket
from collections.abc import Iterator

_FIRST_PORT = 15_000
_LAST_PORT = 32_000
_BLOCK_SIZE = 50


class PortPool:
    """Ports that belong to this process until it ends."""

    def __init__(self, first: int = _FIRST_PORT, last: int = _LAST_PORT) -> None:
        self._starts = range(first, last - _BLOCK_SIZE, _BLOCK_SIZE)
        self._locks: list[socket.socket] = []
        self._ports: Iterator[int] = iter(())

    def take(self, count: int) -> list[int]:
        """Return ports that nobody listens on and that this process did not take before."""
        ports: list[int] = []
        while len(ports) < count:
            port = next(self._ports, None)
            if port is None:
                self._ports = iter(self._another_block())
            elif _is_free(port):
                ports.append(port)
        return ports

    def _another_block(self) -> range:
        for start in random.sample(self._starts, len(self._starts)):
            try:
                self._locks.append(socket.create_server(("127.0.0.1", start)))
            except OSError:
                continue
            return range(start + 1, start + _BLOCK_SIZE)
        raise RuntimeError(f"no free block of ports in {self._starts}")

    def close(self) -> None:
        """Let other processes have the ports."""
        for lock in self._locks:
            lock.close()


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


_pool = PortPool()
atexit.register(_pool.close)


def unused_ports(count: int) -> list[int]:
    """Return free ports of this machine that no other test gets while this process runs."""
    return _pool.take(count)


# Options for a `serve` that ends before it serves. It looks first whether its ports are free, and
# another test, or another program, may use those of the defaults.
ANY_PORTS = [
    *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    *("--health-port", "0", "--openai-port", "0"),
]


def serve_ports() -> list[str]:
    """Return the options of ``trtllm-bls serve`` for ports of its own, all but the OpenAI API's."""
    words: list[str] = []
    services = ("http", "grpc", "metrics", "health")
    for service, port in zip(services, unused_ports(len(services)), strict=True):
        words += [f"--{service}-port", str(port)]
    return words
