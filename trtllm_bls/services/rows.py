"""The rows of one batch, each a task; together they end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


async def end_all(rows: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the rows that still run and wait until every one has ended.

    ``gather`` alone does not: once a row has failed, it forgets the others.
    """
    for row in rows:
        row.cancel()
    await asyncio.wait(rows)
