"""Servers of the standard library that serve in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

from tests.helpers.waiting import join

Server = TypeVar("Server", bound=BaseServer)


@contextmanager
def serving_in_a_thread(server: Server) -> Iterator[Server]:
    """Let a server serve until the end of the block, also if the block raises.

    A thread of a server that is closed and not shut down would spin for the rest of the process.
    """
    with server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            join(thread)
