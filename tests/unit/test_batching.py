"""``batched``: items of several callers in one call, each with its own result, failure and end."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.helpers.waiting import eventually
from trtllm_bls.errors import EngineError, Overloaded, SettingsError
from trtllm_bls.pipeline import batched

FOREVER_MS = 3_600_000


class Stage:
    """Doubles numbers; waits for ``go`` if there is one."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go: asyncio.Event | None = None
        self.cancelled = 0

    @batched(max_size=3, max_wait_ms=FOREVER_MS, max_waiting=4)
    async def full(self, items: list[int]) -> list[int]:
        return await self._double(items)

    @batched(max_size=3, max_wait_ms=0, max_waiting=4)
    async def soon(self, items: list[int]) -> list[int]:
        return await self._double(items)

    async def _double(self, items: list[int]) -> Any:
        self.batches.append(items)
        try:
            if self.go is not None:
                await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if 13 in items:
            raise ValueError("13 is not doubled")
        if 99 in items:
            raise EngineError("the other model is down")
        results = [2 * item for item in items]
        return [ValueError("7") if item == 14 else item for item in results]


async def test_items_of_several_callers_are_one_call() -> None:
    """A full batch waits for nobody, and each caller gets its own result."""
    stage = Stage()
    assert await asyncio.gather(stage.full(1), stage.full(2), stage.full(3)) == [2, 4, 6]
    assert stage.batches == [[1, 2, 3]]


async def test_many_items_of_one_caller_fill_several_batches() -> None:
    stage = Stage()
    assert await stage.soon.many([1, 2, 3, 4]) == [2, 4, 6, 8]
    assert stage.batches == [[1, 2, 3], [4]]


async def test_no_items_are_no_call() -> None:
    stage = Stage()
    assert await stage.full.many([]) == []
    assert stage.batches == []


async def test_items_wait_for_the_next_batch_while_one_runs() -> None:
    stage = Stage()
    stage.go = asyncio.Event()
    first = asyncio.ensure_future(stage.soon(1))
    await eventually(lambda: stage.batches == [[1]])
    others = [asyncio.ensure_future(stage.soon(item)) for item in (2, 3)]
    await asyncio.sleep(0)
    stage.go.set()
    assert await first == 2
    assert await asyncio.gather(*others) == [4, 6]
    assert stage.batches == [[1], [2, 3]]


async def test_an_item_that_makes_the_call_fail_fails_alone() -> None:
    """The halves of its batch are tried again."""
    stage = Stage()
    results = await asyncio.gather(
        stage.full(1), stage.full(13), stage.full(3), return_exceptions=True
    )
    assert results[::2] == [2, 6]
    assert str(results[1]) == "13 is not doubled"


async def test_an_exception_in_the_list_is_the_failure_of_its_item() -> None:
    """And the call is made once."""
    stage = Stage()
    results = await asyncio.gather(
        stage.full(1), stage.full(7), stage.full(3), return_exceptions=True
    )
    assert results[::2] == [2, 6] and isinstance(results[1], ValueError)
    assert len(stage.batches) == 1


async def test_the_failure_of_another_model_is_everybodys_at_once() -> None:
    stage = Stage()
    calls = [stage.full(1), stage.full(99), stage.full(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(result) for result in results] == ["the other model is down"] * 3
    assert len(stage.batches) == 1


async def test_a_cancelled_caller_leaves_the_batch_that_waits() -> None:
    stage = Stage()
    calls = [asyncio.ensure_future(stage.full(item)) for item in (1, 2)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.wait({calls[0]})
    assert await asyncio.gather(calls[1], stage.full(3), stage.full(4)) == [4, 6, 8]
    assert stage.batches == [[2, 3, 4]]


async def test_a_call_that_nobody_waits_for_is_cancelled() -> None:
    """While one caller still waits, it goes on."""
    stage = Stage()
    stage.go = asyncio.Event()
    calls = [asyncio.ensure_future(stage.full(item)) for item in (1, 2, 3)]
    await eventually(lambda: bool(stage.batches))
    for call in calls[:2]:
        call.cancel()
    await asyncio.wait(calls[:2])
    assert stage.cancelled == 0
    calls[2].cancel()
    await eventually(lambda: stage.cancelled == 1)
    stage.go.set()
    assert await asyncio.gather(stage.full(4), stage.full(5), stage.full(6)) == [8, 10, 12]


async def test_a_batch_that_is_tried_again_has_no_item_that_nobody_waits_for() -> None:
    """Its caller left while the batch ran that one bad item spoiled."""
    stage = Stage()
    stage.go = asyncio.Event()
    calls = [asyncio.ensure_future(stage.full(item)) for item in (13, 2, 3)]
    await eventually(lambda: bool(stage.batches))
    calls[1].cancel()
    stage.go.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert (str(results[0]), results[2]) == ("13 is not doubled", 6)
    assert all(2 not in batch for batch in stage.batches[1:])


async def test_items_that_wait_have_a_bound() -> None:
    """A caller beyond it is refused, and the others get their results."""
    stage = Stage()
    stage.go = asyncio.Event()
    calls = [asyncio.ensure_future(stage.full(item)) for item in range(3)]
    await eventually(lambda: bool(stage.batches))
    calls += [asyncio.ensure_future(stage.full(item)) for item in range(3, 7)]
    await asyncio.sleep(0)  # in which they begin to wait
    with pytest.raises(Overloaded, match="as many items wait for full as may"):
        await stage.full(7)
    for call in calls[6:]:
        call.cancel()
    stage.go.set()
    assert await asyncio.gather(*calls[:6]) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([1], "stage gave 1 results for 2 items; give one for each"),
        (np.zeros((3, 2)), "stage gave 3 results for 2 items; give one for each"),
        (np.float32(1), "stage gave a float32; give a list or an array"),
        (None, "stage gave a NoneType; give a list or an array"),
    ],
)
async def test_other_than_one_result_for_each_item_is_told(given: Any, problem: str) -> None:
    class Wrong:
        @batched(max_size=2, max_wait_ms=FOREVER_MS)
        async def stage(self, items: list[int]) -> Any:
            if len(items) == 1:
                raise ValueError(problem)
            return given

    wrong = Wrong()
    results = await asyncio.gather(wrong.stage(1), wrong.stage(2), return_exceptions=True)
    assert [str(result) for result in results] == [problem] * 2


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_a_stage_that_ends_the_loop_ends_its_callers_alone(ending: BaseException) -> None:
    class Wrong:
        @batched(max_size=1, max_wait_ms=0)
        async def stage(self, items: list[int]) -> Any:
            raise ending

    with pytest.raises(RuntimeError, match="stage "):
        await Wrong().stage(1)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_size": 0, "max_wait_ms": 1}, "max_size"),
        ({"max_size": 2.5, "max_wait_ms": 1}, "max_size"),
        ({"max_size": 1, "max_wait_ms": -1}, "max_wait_ms"),
        ({"max_size": 1, "max_wait_ms": float("nan")}, "max_wait_ms"),
        ({"max_size": 1, "max_wait_ms": 1, "max_waiting": 0}, "max_waiting"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(limits: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError, match=f"batched: {name}: "):
        batched(**limits)
