"""Which requests a server on this machine refuses, because a web page may have made them.

Any web page can make its visitor's browser send requests here. A page of another server has a
foreign ``Origin``; one whose name was made to mean this machine (DNS rebinding) has a foreign
``Host``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def browser_problem(
    host: str, origin: str, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> tuple[int, str] | None:
    """The status and message that refuse a request with these headers; ``None`` if it may pass.

    Hosts that may be named: IP addresses, ``localhost`` and ``hosts``. Origins: that of the host
    itself and ``origins``, where ``*`` stands for all. A header that was not sent is empty.
    """
    host, origin = host.lower(), origin.lower()
    if host and not _is_ours(host, hosts):
        return 421, f"this server does not answer as {host[:80]!r}"
    is_own = not origin or origin.partition("://")[2] == host
    if not (is_own or "*" in origins or origin in origins):
        return 403, f"pages of {origin[:80]!r} may not use this server"
    return None


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name == "localhost" or name in hosts or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
