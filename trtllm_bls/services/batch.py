"""The rows of one batch, each a task: all end together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trtllm_bls.types import CancelCause


async def run_rows(rows: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all rows. If one fails, cancel the others and wait until they have ended.

    ``gather`` alone does not wait: once a row has failed, it forgets the others.
    """
    try:
        await asyncio.gather(*rows)
    finally:
        for row in rows:
            row.cancel(CancelCause.BATCH.value)
        await asyncio.wait(rows)
