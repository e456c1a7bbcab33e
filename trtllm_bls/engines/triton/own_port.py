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


def is_foreign(url: str) -> bool:
    """Whether the port belongs to a process that this one does not descend from.

    With host networking another Triton may own the default port. A port that nobody listens at, or
    whose owner cannot be seen, is not foreign.
    """
    known = listening_processes(url)
    if not known:
        return False
    import psutil

    ancestors = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return not known & ancestors
