"""The rows of one batch, each a task: all end together; and what one response cannot hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trtllm_bls.errors import CancelCause, Unsupported

_ONCE = "this deployment is not decoupled and answers once per request"


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


def check_one_response(*, sequences: int, **given: int) -> None:
    """Raises ``Unsupported`` where a model that is not decoupled would need several responses.

    Of ``given``, named as the caller sent them, the first says whether the request is to stream,
    the second how many rows it has.
    """
    (flag, streams), (prompt, rows) = given.items()
    if streams:
        raise Unsupported(flag, f"true: {_ONCE}; send false, or deploy it decoupled")
    if rows > 1:
        raise Unsupported(prompt, f"{rows} rows: {_ONCE}; send one row")
    if sequences > 1:
        raise Unsupported("num_return_sequences", f"above 1: {_ONCE}; send several requests")
