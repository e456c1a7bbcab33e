"""Shares of what all clients have together: bytes of bodies, WebSockets, places.

Whoever asks first could take all of it and hold it. So it is counted whose a share is:

- A holder may hold all while nobody else asks, and half while others do.
- Where nothing is left, the largest holder's unfinished shares make room for a smaller holder.
- The last quarter is for small shares alone.

One event loop uses a ``Shares``; nothing here waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import Scope

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

TENANT = "tenant"  # of a scope: whose request it is, where clients have keys
_ASKING_S = 60.0  # for this long after its last request a holder counts as one that asks
_IPV6_PREFIX = 64  # one client has all addresses of such a network


class NoShare(Exception):
    """Nothing is left for this holder now."""


def holder_of(scope: Scope) -> str:
    """The key that a request came with, or else the address of its client."""
    if holder := scope.get(TENANT):
        return str(holder)
    client = scope.get("client")
    if not client:
        return ""
    with suppress(ValueError):
        address = ipaddress.ip_address(client[0])
        if address.version == 6:
            network = ipaddress.ip_network((address, _IPV6_PREFIX), strict=False)
            return str(network.network_address)
    return str(client[0])


def expire(limit: Any) -> None:
    """End the ``timeout`` that a task is in now."""
    now = asyncio.get_running_loop().time()
    if sys.version_info >= (3, 11):
        limit.reschedule(now)
    else:
        limit.update(now)


class Share:
    """What one request holds; ``release`` it.

    ``on_revoke``: ends the request where another holder needs the room; ``None`` while it must not.
    """

    def __init__(self, shares: Shares, holder: str) -> None:
        self.amount = 0
        self.on_revoke: Callable[[], None] | None = None
        self.holder = holder
        self._shares = shares

    def grow(self, amount: int) -> None:
        """Hold so much more. Raises ``NoShare``, and nothing is held more then."""
        self._shares._grow(self, amount)

    def release(self) -> None:
        """Hold nothing any more; without effect from the second time on."""
        self._shares._release(self)


class Shares:
    """A total that holders share. ``small``: up to this amount a share is small."""

    def __init__(self, total: int, small: int = 0) -> None:
        self.total = total
        self.held = 0
        self._small = small
        self._large_limit = total - total // 4 if small else total
        self._shares: dict[str, dict[Share, None]] = {}  # by holder, the oldest first
        self._held_by: dict[str, int] = {}
        # The last two holders that asked, and when. Nobody else has to be remembered to know of any
        # holder whether another one asks.
        self._last = ("", -_ASKING_S)
        self._last_other = ("", -_ASKING_S)

    def take(self, holder: str, amount: int = 0) -> Share:
        """Hold so much for ``holder``. Raises ``NoShare``."""
        share = Share(self, holder)
        share.grow(amount)
        return share

    def held_by(self, holder: str) -> int:
        """The amount that a holder holds."""
        return self._held_by.get(holder, 0)

    def _grow(self, share: Share, amount: int) -> None:
        holder = share.holder
        self.note(holder)
        before = self.held_by(holder)
        own = before + amount
        # One that holds nothing yet is let in, however large its first share is.
        if before and own > (self.total + 1) // 2 and self._others_ask(holder):
            raise NoShare
        limit = self.total if share.amount + amount <= self._small else self._large_limit
        if self.held + amount > limit:
            self._make_room(holder, own, self.held + amount - limit)
            if self.held + amount > limit:
                raise NoShare
        share.amount += amount
        self.held += amount
        self._held_by[holder] = own
        self._shares.setdefault(holder, {})[share] = None

    def _release(self, share: Share) -> None:
        share.on_revoke = None
        shares = self._shares.get(share.holder, {})
        if share not in shares:
            return
        del shares[share]
        self.held -= share.amount
        self._held_by[share.holder] -= share.amount
        share.amount = 0
        if not shares:
            del self._shares[share.holder]
            del self._held_by[share.holder]

    def note(self, holder: str) -> None:
        """Note that ``holder`` asks, although it may be refused before it takes a share."""
        now = time.monotonic()
        if holder != self._last[0]:
            self._last_other = self._last
        self._last = (holder, now)

    def _others_ask(self, holder: str) -> bool:
        if any(other != holder for other in self._shares):
            return True
        _, at = self._last_other if self._last[0] == holder else self._last
        return time.monotonic() - at < _ASKING_S

    def _make_room(self, holder: str, own: int, amount: int) -> None:
        """Revoke shares of the holder that holds most, if that is more than ``own``."""
        largest = max(self._held_by, key=self.held_by, default=holder)
        if largest == holder or self.held_by(largest) <= own:
            return
        until = self.held - amount
        for share in reversed(list(self._shares[largest])):
            if self.held <= until:
                return
            if share.on_revoke is not None:
                revoke = share.on_revoke
                self._release(share)
                revoke()


class PerMinute:
    """A limit on how often something may happen in a minute."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._since = 0.0
        self._count = 0

    def is_over(self) -> bool:
        """Count it; true from the time on that it happens too often."""
        now = time.monotonic()
        if now - self._since > 60:
            self._since = now
            self._count = 0
        self._count += 1
        return self._count > self._limit


__all__ = ["TENANT", "NoShare", "PerMinute", "Share", "Shares", "expire", "holder_of", "timeout"]
