"""Requests that a web page of another server makes its visitor's browser send."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import urlsplit


def browser_problem(
    host: str, origin: str, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> tuple[int, str] | None:
    """Return the status and message that refuse a request; ``None`` if it may pass.

    For servers on this machine: any web page can make its visitor's browser send requests here. A
    page of another server has a foreign ``Origin``; one whose name was made to mean this machine
    (DNS rebinding) has a foreign ``Host``. ``host`` may be an IP address, ``localhost`` or one of
    ``hosts``. ``origin`` may be that of the host itself or one of ``origins``, where ``*`` stands
    for all. Both are empty where the header was not sent.
    """
    host = host.lower()
    origin = origin.lower()
    is_ours = not host
    with suppress(ValueError):
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        is_ours = (
            is_ours or name == "localhost" or name in hosts or bool(ipaddress.ip_address(name))
        )
    if not is_ours:
        return 421, f"this server does not answer as {host[:80]!r}"
    is_same_origin = not origin or origin.partition("://")[2] == host
    if not (is_same_origin or "*" in origins or origin in origins):
        return 403, f"pages of {origin[:80]!r} may not use this server"
    return None
