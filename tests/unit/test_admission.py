"""How many sequences run and wait at once, and what becomes of the others."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.virtual_time import (
    Clock,
    run_by_the_clock,
    settle,
    skipping_waits,
)
from trtllm_bls.errors import InvalidRequest, Overloaded, ShuttingDown
from trtllm_bls.orchestrator.orchestrator import Admission


async def hold(admission: Admission, seconds: float = 10, sequences: int = 1) -> None:
    async with admission.acquire(sequences):
        await asyncio.sleep(seconds)


def figures(admission: Admission) -> tuple[int, int]:
    return admission.running, admission.queued


def test_sequences_above_the_limit_wait_and_above_that_are_refused_at_once() -> None:
    """The refusal says how many run and wait, and when to come back."""

    async def scenario(clock: Clock) -> None:
        admission = Admission(2, 1, None)
        held = [asyncio.create_task(hold(admission)) for _ in range(3)]
        await settle()
        assert figures(admission) == (2, 1)
        with pytest.raises(Overloaded) as refused:
            await hold(admission)
        assert str(refused.value) == (
            "sequences running: 2, waiting: 1, as many as may (parameter max_queued_requests); "
            "try again in about 1 s"
        )
        clock.now = 10
        await asyncio.gather(*held[:2])
        assert figures(admission) == (1, 0)
        clock.now = 20
        await held[2]
        assert figures(admission) == (0, 0)

    run_by_the_clock(scenario)


@skipping_waits
async def test_room_is_what_may_still_run_or_wait() -> None:
    """Without any, a caller can be refused before its request is read."""
    admission = Admission(2, 1, None)
    admission.check_room()
    held = []
    for room in (2, 1, 0):
        held.append(asyncio.create_task(hold(admission)))
        await settle()
        assert admission.room == room
    with pytest.raises(Overloaded, match="waiting: 1, as many as may"):
        admission.check_room()
    await asyncio.gather(*held)
    assert admission.room == 3


@skipping_waits
async def test_a_refusal_tells_how_long_requests_take_here() -> None:
    """30 s, and a fifth of the 10 s more that a newer one took; one waits for two places."""
    admission = Admission(2, 1, None)
    await hold(admission, seconds=30)
    await hold(admission, seconds=40)
    waiting = [asyncio.create_task(hold(admission)) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="try again in about 32 s"):
        await hold(admission)
    await asyncio.gather(*waiting)


@skipping_waits
async def test_each_sequence_of_a_request_counts() -> None:
    """Three take three places; more than there are would wait for ever and are refused by name."""
    admission = Admission(4, 4, None)
    three = asyncio.create_task(hold(admission, sequences=3))
    two = asyncio.create_task(hold(admission, sequences=2))
    await settle()
    assert figures(admission) == (3, 2)
    with pytest.raises(InvalidRequest, match=r"^num_return_sequences: 5 .* at most 4"):
        await hold(admission, sequences=5)
    await asyncio.gather(three, two)


@skipping_waits
async def test_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits, so none waits for ever."""
    admission = Admission(2, 9, None)
    order: list[int] = []

    async def one(number: int, sequences: int) -> None:
        async with admission.acquire(sequences):
            order.append(number)
            await asyncio.sleep(1)

    sizes = [1, 2, 1, 2, 1]
    await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))
    assert order == [0, 1, 2, 3, 4]


@skipping_waits
async def test_those_behind_a_large_request_run_when_it_leaves() -> None:
    """At once, where there is room for them."""
    admission = Admission(2, 9, None)
    async with admission.acquire(1):
        large = asyncio.create_task(hold(admission, sequences=2))
        small = asyncio.create_task(hold(admission))
        await settle()
        assert figures(admission) == (1, 3)
        large.cancel()
        await settle()
        assert figures(admission) == (2, 0)
    await asyncio.wait({large, small})


@skipping_waits
async def test_waiting_too_long_is_refused() -> None:
    """After the queue's own limit, whatever time the request has left."""
    admission = Admission(1, 1, 5)
    running = asyncio.create_task(hold(admission, seconds=60))
    await settle()
    with pytest.raises(Overloaded, match=r"this one waited 5 s \(parameter max_queue_seconds\)"):
        await hold(admission)
    assert figures(admission) == (1, 0)
    await running


def test_who_is_admitted_in_the_moment_in_which_its_wait_is_over_runs() -> None:
    """The timer that would have refused it finds it admitted."""

    async def scenario(clock: Clock) -> None:
        admission = Admission(1, 1, 5)
        free = asyncio.Event()

        async def until_free() -> None:
            async with admission.acquire(1):
                await free.wait()

        first = asyncio.create_task(until_free())
        await settle()
        second = asyncio.create_task(until_free())
        await settle()
        free.set()
        clock.now = 5
        await asyncio.gather(first, second)
        assert figures(admission) == (0, 0)

    run_by_the_clock(scenario)


def test_a_caller_that_leaves_the_queue_frees_its_place() -> None:
    """Also one that leaves, or is refused, in the moment in which it is admitted."""

    async def scenario(clock: Clock) -> None:
        admission = Admission(1, 2, 5)
        async with admission.acquire(1):
            first, second = (asyncio.create_task(hold(admission)) for _ in range(2))
            await settle()
            first.cancel()
            await settle()
            assert figures(admission) == (1, 1)
        assert figures(admission) == (1, 0), "the second one has the place, and has not run yet"
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert figures(admission) == (0, 0)
        async with admission.acquire(1):
            third = asyncio.create_task(hold(admission))
            await settle()
            admission.refuse_waiting(ShuttingDown)
        with pytest.raises(Overloaded, match="ask another"):
            await third
        assert figures(admission) == (0, 0)

    run_by_the_clock(scenario)


@skipping_waits
async def test_a_request_of_several_sequences_waits_where_exactly_so_many_may() -> None:
    """One more is refused, though a smaller request would still fit."""
    admission = Admission(2, 3, None)
    held = [asyncio.create_task(hold(admission, sequences=2)) for _ in range(2)]
    await settle()
    assert figures(admission) == (2, 2)
    with pytest.raises(Overloaded):
        await hold(admission, sequences=2)
    held.append(asyncio.create_task(hold(admission)))
    await settle()
    assert figures(admission) == (2, 3)
    await asyncio.gather(*held)


def test_a_request_that_got_its_place_leaves_no_timer_behind() -> None:
    """The limit of its time in the queue would keep the request alive for as long."""

    async def scenario(clock: Clock) -> None:
        admission = Admission(1, 1, 1000.0)
        held = [asyncio.create_task(hold(admission)) for _ in range(2)]
        await settle()
        for clock.now in (10, 20):
            await settle()
        await asyncio.gather(*held)
        assert [timer for timer in clock._scheduled if not timer.cancelled()] == []

    run_by_the_clock(scenario)
