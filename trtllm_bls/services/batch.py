"""The rows of one batch: each a task, and together one answer with one end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from trtllm_bls.messages import Array
from trtllm_bls.python_backend import Call


async def run_rows(rows: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all rows. Where one fails, the others are cancelled, and have ended on return.

    ``gather`` alone does not: once a row has failed, it forgets the others.
    """
    try:
        await asyncio.gather(*rows)
    finally:
        for row in rows:
            row.cancel()
        await asyncio.wait(rows)


class BatchCall:
    """A call whose answer has so many ``sequences``: the last one to end carries the final flag."""

    def __init__(self, call: Call, sequences: int) -> None:
        self._call = call
        self._left = sequences

    async def ready(self) -> None:
        """Return once everything sent so far has left."""
        await self._call.ready()

    def send(self, arrays: Mapping[str, Array], *, ended: bool) -> None:
        """Send one response; ``ended``: it is the last of its sequence."""
        self._left -= ended
        self._call.send(arrays, final=self._left == 0)
