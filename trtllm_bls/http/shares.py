"""Shares of a total that all clients have together: bytes of bodies, WebSockets, places.

One client could take the whole total and hold it. So each share has a holder, which is a client:

- A holder may hold all while nobody else asks, and half while others do.
- Where the total is used up, the largest holder's unfinished shares make room for a smaller holder.
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

TENANT = "tenant"  # key of a scope: the client that sent the request, where clients have keys
_ASKING_S = 60.0  # for this long after its last request a holder counts as one that asks
_IPV6_PREFIX = 64  # one client has all addresses of such a network


class NoShare(Exception):
    """Nothing is left for this holder now."""


def holder_of(scope: Scope) -> str:
    """Return the key that a request came with, or else the address of its client."""
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
    """The amount that one request holds; ``release`` it.

    ``on_revoke`` ends the request where another holder needs the room; ``None`` while the request
    must not be ended.
    """

    def __init__(self, shares: Shares, holder: str) -> None:
        self.amount = 0
        self.on_revoke: Callable[[], None] | None = None
        self.holder = holder
        self._shares = shares

    def grow(self, amount: int) -> None:
        """Hold ``amount`` more. Raises ``NoShare``, and the share stays as it was then."""
        self._shares._grow(self, amount)

    def release(self) -> None:
        """Hold nothing any more; a further call has no effect."""
        self._shares._release(self)


class Shares:
    """A total that holders share. ``small``: up to this amount a share is small."""

    def __init__(self, total: int, small: int = 0) -> None:
        self.total = total
        self.held = 0
        self._small = small
        self._large_limit = total  # for shares that are not small
        if small:
            self._large_limit -= total // 4
        self._shares: dict[str, dict[Share, None]] = {}  # by holder, the oldest first
        self._held_by: dict[str, int] = {}
        # The last two holders that asked, and when. These two are enough to know of any holder
        # whether another one asks.
        self._latest = ("", -_ASKING_S)
        self._second_latest = ("", -_ASKING_S)

    def take(self, holder: str, amount: int = 0) -> Share:
        """Hold ``amount`` for ``holder``. Raises ``NoShare``."""
        share = Share(self, holder)
        share.grow(amount)
        return share

    def held_by(self, holder: str) -> int:
        """Return the amount that a holder holds."""
        return self._held_by.get(holder, 0)

    def _grow(self, share: Share, amount: int) -> None:
        holder = share.holder
        self.note(holder)
        held = self.held_by(holder)
        holding = held + amount
        # A holder that holds nothing yet is let in, however large its first share is.
        if held and holding > (self.total + 1) // 2 and self._others_ask(holder):
            raise NoShare
        limit = self._large_limit
        if share.amount + amount <= self._small:
            limit = self.total
        if self.held + amount > limit:
            self._make_room(holder, holding, self.held + amount - limit)
            if self.held + amount > limit:
                raise NoShare
        share.amount += amount
        self.held += amount
        self._held_by[holder] = holding
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
        if holder != self._latest[0]:
            self._second_latest = self._latest
        self._latest = (holder, now)

    def _others_ask(self, holder: str) -> bool:
        if any(key != holder for key in self._shares):
            return True
        name, asked_at = self._latest
        if name == holder:
            _, asked_at = self._second_latest
        return time.monotonic() - asked_at < _ASKING_S

    def _make_room(self, holder: str, holding: int, amount: int) -> None:
        """Revoke ``amount`` from the largest holder, if it holds more than ``holding``."""
        largest = max(self._held_by, key=self.held_by, default=holder)
        if largest == holder or self.held_by(largest) <= holding:
            return
        target = self.held - amount
        for share in reversed(list(self._shares[largest])):
            if self.held <= target:
                return
            if share.on_revoke is not None:
                revoke = share.on_revoke
                self._release(share)
                revoke()


class PerMinute:
    """A limit on the number of events in a minute."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._since = 0.0
        self._count = 0

    def is_over(self) -> bool:
        """Count one event; true where the last minute had more than the limit."""
        now = time.monotonic()
        if now - self._since > 60:
            self._since = now
            self._count = 0
        self._count += 1
        return self._count > self._limit


__all__ = ["TENANT", "NoShare", "PerMinute", "Share", "Shares", "expire", "holder_of", "timeout"]
