"""Whether a port of this machine belongs to the server that this process is part of."""

from __future__ import annotations

import os


def listening_processes(url: str) -> set[int]:
    """The processes that listen at ``url`` (host:port); none where the host is another machine.

    Processes of other users cannot be seen.
    """
    host, _, port = url.rpartition(":")
    if host.strip("[]") not in ("localhost", "127.0.0.1", "::1") or not port.isdigit():
        return set()
    import psutil

    return {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
        and tuple(connection.laddr)[1:] == (int(port),)
        and connection.pid is not None
    }


def is_own(url: str) -> bool | None:
    """Whether the port belongs to a process that this one descends from.

    With host networking another Triton may own the default port. ``None``: nobody listens at the
    port, or its owner cannot be seen.
    """
    known = listening_processes(url)
    if not known:
        return None
    import psutil

    return not known.isdisjoint((os.getpid(), *(each.pid for each in psutil.Process().parents())))
