"""Batches over requests: a stage of a pipeline that takes the items of several callers at once.

``batched`` makes such a stage of a method. One batch runs at a time; meanwhile items wait for the
next. A caller that is cancelled takes its items out of the batch. When no caller of a batch is
left, its call is cancelled. One bad item must not fail the answers of other callers: if a call
fails, the stage runs each half of the batch again, down to the item that makes it fail.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from trtllm_bls.errors import EngineError, Overloaded, SettingsError, TrtllmBlsError
from trtllm_bls.pipeline.language_model import CURRENT_REQUEST

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batched stage.

    ``max_size``: items of one call. ``max_wait_ms``: the time that an item waits for others.
    ``max_waiting``: items that wait at once; a caller with more of them is refused.
    """

    max_size: int
    max_wait_ms: float
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_size", "max_waiting"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SettingsError(f"batched: {name}: {value!r} is no number of items; write 1")
        wait = self.max_wait_ms
        if type(wait) not in (int, float) or not 0 <= wait < math.inf:
            raise SettingsError(f"batched: max_wait_ms: {wait!r} is no time; write 0 or more")


@dataclass(eq=False)
class _WaitingItem(Generic[Item, Result]):
    """An item, the time of its arrival on the event loop's clock, and its result to come."""

    value: Item
    arrived_at: float
    result: asyncio.Future[Result]


class BatchedStage(Generic[Item, Result]):
    """Runs ``stage`` on the items of all callers, in batches. It belongs to one event loop.

    ``stage`` returns one result for each item: a list, or an array of as many rows. An exception in
    the list is the failure of its item alone. ``name`` names the stage in errors.
    """

    def __init__(
        self, stage: Callable[[list[Item]], Awaitable[Any]], limits: BatchLimits, name: str
    ) -> None:
        self._stage = stage
        self._limits = limits
        self._name = name
        self._waiting: dict[_WaitingItem[Item, Result], None] = {}  # the oldest first
        self._running: set[_WaitingItem[Item, Result]] = set()
        self._call: asyncio.Task[list[Any] | _CallFailure] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._is_full = asyncio.Event()

    async def __call__(self, item: Item) -> Result:
        """Return the result of one item."""
        (result,) = await self.many([item])
        return result

    async def many(self, values: Sequence[Item]) -> list[Result]:
        """Return the results of several items, in order.

        Raises the failure of the first item that failed, and ``Overloaded`` if ``max_waiting``
        items wait.
        """
        if self._waiting and len(self._waiting) + len(values) > self._limits.max_waiting:
            problem = f"as many items wait for {self._name} as may"
            raise Overloaded.for_now(problem, 1, "max_waiting")
        loop = asyncio.get_running_loop()
        items: list[_WaitingItem[Item, Result]] = []
        for value in values:
            items.append(_WaitingItem(value, loop.time(), loop.create_future()))
        self._waiting.update(dict.fromkeys(items))
        if len(self._waiting) >= self._limits.max_size:
            self._is_full.set()
        if self._worker is None and items:
            self._worker = _worker_task(self._work)
        try:
            return [await item.result for item in items]
        finally:
            self._leave(items)

    def _leave(self, items: Sequence[_WaitingItem[Item, Result]]) -> None:
        """Take out the items of a caller that needs no further results."""
        for item in items:
            self._waiting.pop(item, None)
            self._running.discard(item)
            if item.result.done() and not item.result.cancelled():
                # ``many`` raises the first failure only. asyncio logs each exception that nobody
                # read, so read the others.
                item.result.exception()
            item.result.cancel()
        if len(self._waiting) < self._limits.max_size:
            self._is_full.clear()
        if self._call is not None and not self._running:
            self._call.cancel()

    async def _work(self) -> None:
        """Run batches as long as items wait."""
        try:
            while self._waiting:
                await self._fill()
                batch = list(self._waiting)[: self._limits.max_size]
                for item in batch:
                    del self._waiting[item]
                try:
                    await self._run(batch)
                finally:
                    self._fail(batch)
        finally:
            self._worker = None
            self._fail(list(self._waiting))

    def _fail(self, batch: list[_WaitingItem[Item, Result]]) -> None:
        """Fail the items that have no result yet, which happens only if the worker is ended."""
        for item in batch:
            if not item.result.done():
                item.result.set_exception(TrtllmBlsError(f"{self._name} ended without a result"))

    async def _fill(self) -> None:
        """Wait until a batch is full, or its oldest item has waited for ``max_wait_ms``."""
        oldest = next(iter(self._waiting))
        age = asyncio.get_running_loop().time() - oldest.arrived_at
        seconds = self._limits.max_wait_ms / 1000 - age
        if seconds > 0 and not self._is_full.is_set():
            full = asyncio.ensure_future(self._is_full.wait())
            await asyncio.wait({full}, timeout=seconds)
            full.cancel()

    async def _run(self, batch: list[_WaitingItem[Item, Result]]) -> None:
        """Run one batch, without the items whose callers have left."""
        batch = [item for item in batch if not item.result.done()]
        if not batch:
            return
        self._running = set(batch)
        call = asyncio.ensure_future(self._results([item.value for item in batch]))
        self._call = call
        await asyncio.wait({call})
        self._running = set()
        self._call = None
        if call.cancelled():  # all callers have left
            return
        results = call.result()
        if isinstance(results, _CallFailure):
            if len(batch) > 1:
                half = len(batch) // 2
                await self._run(batch[:half])
                await self._run(batch[half:])
                return
            results = [results.error]
        for item, result in zip(batch, results, strict=True):
            if item.result.done():
                continue
            if isinstance(result, BaseException):
                item.result.set_exception(result)
            else:
                item.result.set_result(result)

    async def _results(self, values: list[Item]) -> list[Any] | _CallFailure:
        """Return the result or the exception of each item, or the failure of the whole call."""
        try:
            results = await self._stage(list(values))
        except asyncio.CancelledError:
            if not self._running:
                raise
            return _CallFailure(RuntimeError(f"{self._name} cancelled itself"))
        except (EngineError, Overloaded) as error:
            return [error] * len(values)  # another model failed, as it would for each half
        except Exception as error:
            return _CallFailure(error)
        except BaseException as error:  # it would end the event loop
            return _CallFailure(RuntimeError(f"{self._name} raised {error!r}"))
        is_array = isinstance(results, np.ndarray) and results.ndim > 0
        if not is_array and not isinstance(results, (list, tuple)):
            problem = f"gave a {type(results).__name__}; give a list or an array"
            return _CallFailure(TrtllmBlsError(f"{self._name} {problem}"))
        if len(results) != len(values):
            problem = f"gave {len(results)} results for {len(values)} items; give one for each"
            return _CallFailure(TrtllmBlsError(f"{self._name} {problem}"))
        return list(results)


@dataclass(frozen=True)
class _CallFailure:
    """The failure of a call that one of its items may have caused."""

    error: BaseException = field(repr=False)


def _worker_task(work: Callable[[], Any]) -> asyncio.Task[None]:
    """Start a task that belongs to no request, since it works for several."""
    context = copy_context()
    context.run(CURRENT_REQUEST.set, None)
    loop = asyncio.get_running_loop()
    task: asyncio.Task[None] = context.run(lambda: loop.create_task(work()))
    return task


class BatchedMethod(Generic[Item, Result]):
    """A method that ``batched`` decorates. Read from an object, it is a ``BatchedStage``."""

    def __init__(
        self, method: Callable[[Any, list[Item]], Awaitable[Any]], limits: BatchLimits
    ) -> None:
        self.method = method
        self.limits = limits
        self.__doc__ = method.__doc__
        self._name = method.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> BatchedMethod[Item, Result]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> BatchedStage[Item, Result]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        stage: BatchedStage[Item, Result] = BatchedStage(
            partial(self.method, instance), self.limits, self._name
        )
        # Python looks in the object's ``__dict__`` first, so the object keeps this stage.
        instance.__dict__[self._name] = stage
        return stage


def batched(
    max_size: int, max_wait_ms: float, max_waiting: int = 4096
) -> Callable[
    [Callable[[Any, list[Item]], Awaitable[Sequence[Result]]]], BatchedMethod[Item, Result]
]:
    """Decorate a method of a list of items, so that callers pass one item: ``await
    self.classify(text)``, or several: ``await self.classify.many(texts)``.

    The method gets up to ``max_size`` items, which may come from several requests. While no other
    batch runs, an item waits for ``max_wait_ms`` at most. The method returns one result for each
    item: a list, or an array of as many rows. An exception in the list is the failure of its item
    alone. The method belongs to no request: it calls other models by ``self.deployment.infer``. If
    it raises anything but an ``EngineError``, it is called again with each half of its items.
    ``max_waiting``: items that may wait at once; a caller with more of them gets ``Overloaded``.
    """
    limits = BatchLimits(max_size, max_wait_ms, max_waiting)

    def decorate(
        method: Callable[[Any, list[Item]], Awaitable[Sequence[Result]]],
    ) -> BatchedMethod[Item, Result]:
        return BatchedMethod(cast("Callable[[Any, list[Item]], Awaitable[Any]]", method), limits)

    return decorate
