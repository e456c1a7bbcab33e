"""An engine that goes wrong: every fault alone, then all of them at once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.reliability.chaos import Chaos, Tally
from tests.reliability.conftest import on
from tests.reliability.faulty_engine import FAULTS, Seen, Step
from tests.reliability.world import TEXTS, World, world
from trtllm_bls.errors import TrtllmBlsError

PROMPT, TEXT = next(iter(TEXTS.items()))
OUT_OF_TIME = ("silence", "no_end")  # the engine never says that it failed


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_engine_never_makes_a_whole_answer_of_half_a_one(
    parts: World, loop: asyncio.AbstractEventLoop, fault: str, stream: bool
) -> None:
    """An error, or the end of the request's time, after a beginning of the right text."""

    async def scenario() -> tuple[str, list[str | None], Exception | None]:
        def plan(seen: Seen, steps: list[Step]) -> list[Step]:
            return FAULTS[fault](steps, len(steps) // 2, random.Random(1))

        parts.engine.plan = plan
        said, reasons, error = "", [], None
        fields: dict[str, Any] = {"stream": stream, "draft_source": "off"}
        fields["timeout_ms"] = 1500 if fault in OUT_OF_TIME else 60_000
        asked = parts.client.stream(text_input=PROMPT, max_tokens=100, deadline_s=60, **fields)
        try:
            async for event in asked:
                said += event.text
                reasons += [event.finish_reason] if event.finish_reason else []
        except TrtllmBlsError as raised:
            error = raised
        await parts.engine.until(lambda: not parts.engine.running)
        return said, reasons, error

    said, reasons, error = on(loop, scenario())
    assert TEXT.startswith(said)
    if fault == "slow":
        assert (said, reasons, error) == (TEXT, ["end_id"], None)
    elif fault in OUT_OF_TIME:
        assert (reasons, error) == (["timeout"], None)
    else:
        assert error is not None
        assert reasons == (["error"] if stream else [])


def test_chaos_leaves_nobody_waiting_and_nothing_wrong(loop: asyncio.AbstractEventLoop) -> None:
    """Faults, resets, callers that leave, short deadlines, with and without drafts.

    Triton may abort itself as callers leave (docs/reliability.md); then another server is tried.
    """

    async def scenario() -> Tally:
        for _ in range(2):
            async with world(1, draft_deadline_seconds="60") as parts:
                tally = await Chaos(parts, seed=7).run(300, 24)
            if "SIGABRT" not in tally.server_end:
                break
        return tally

    tally = on(loop, scenario())
    assert (tally.server_end, tally.stuck, tally.wrong, tally.left_running) == ("", [], [], 0)
    assert tally.outcomes["end_id"] and tally.outcomes["stop"] and tally.outcomes["error"]
