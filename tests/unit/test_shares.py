"""What one holder may take of a total that several share, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trtllm_bls.http import shares
from trtllm_bls.http.shares import NoShare, PerMinute, Shares


def test_all_of_a_total_can_be_held() -> None:
    """And nothing beyond it, by whoever it may be."""
    room = Shares(100)
    room.take("a", 50)
    room.take("b", 50)
    assert room.held == 100
    with pytest.raises(NoShare):
        room.take("c", 1)
    assert room.held == 100


def test_the_last_quarter_is_for_small_shares() -> None:
    """A share that grows beyond the small size is a large one from then on."""
    room = Shares(100, small=10)
    room.take("a", 75)
    room.take("b", 10)
    with pytest.raises(NoShare):
        room.take("c", 11)
    growing = room.take("c", 6)
    with pytest.raises(NoShare):
        growing.grow(5)
    assert room.held == 91
    growing.grow(4)
    assert room.held == 95


def test_what_is_released_is_free_for_others() -> None:
    """Once, however often it is released."""
    room = Shares(10)
    first = room.take("a", 10)
    first.release()
    first.release()
    assert (room.held, room.held_by("a")) == (0, 0)
    room.take("b", 10)


def test_the_largest_holder_gives_way_to_a_smaller_one() -> None:
    """Its latest shares that may be revoked go, and no more than are needed."""
    room = Shares(100)
    revoked: list[int] = []
    for number in range(4):
        share = room.take("a", 25)
        share.on_revoke = lambda number=number: revoked.append(number)
    room.take("b", 50)
    assert revoked == [3, 2]
    assert (room.held_by("a"), room.held_by("b")) == (50, 50)


def test_a_minute_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happened in the minute before does not count."""
    now = [1000.0]
    monkeypatch.setattr(shares, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = PerMinute(2)
    assert [limit.is_over() for _ in range(3)] == [False, False, True]
    now[0] += 60
    assert limit.is_over()
    now[0] += 1
    assert not limit.is_over()
