"""Thousands of requests to a real server whose engine, connection and callers all go wrong.

    python -m tests.reliability.chaos [--requests 10000] [--seed 1] [--at-once 32]

Every answer that calls itself complete must be exactly the right text, every other must say so,
none may be without an end, and in the end the engine must have nothing left to do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.reliability.faulty_engine import FAULTS, TARGET, Seen, Step
from tests.reliability.world import TEXTS, World, world
from trtllm_bls.errors import DeadlineExceeded, TrtllmBlsError
from trtllm_bls.operate.tritonserver import ServerFailed

TIME_LIMIT_MS = 2_000  # of each request; how long a silent engine is waited for
STUCK_S = 60.0
END_S = 10.0  # the longest wait for the end of a server that fails; it may write a core file
FORGIVEN_S = 1.0  # after a reset; until then a request may be sent into the void
FAULTY = 0.3  # of the engine's requests
RESET_EVERY = 400


@dataclass
class Tally:
    """The outcomes of all requests; ``wrong``, ``stuck`` and ``server_end`` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    server_end: str = ""  # how the server ended, if it did by itself
    left_running: int = 0
    longest_s: float = 0.0  # of one request


class Chaos:
    """Requests to one world, reproducible but for their timing."""

    def __init__(self, parts: World, seed: int) -> None:
        self.tally = Tally()
        self._world = parts
        self._random = random.Random(seed)
        self._faults: dict[str, set[str]] = {}  # by request
        self._reset_at = 0.0
        self._lost = 0  # requests that the latest reset accounts for
        parts.engine.random = random.Random(seed)
        parts.engine.plan = self._plan

    async def run(self, requests: int, at_once: int) -> Tally:
        places = asyncio.Semaphore(at_once)

        async def one(number: int) -> None:
            async with places:
                if number % RESET_EVERY == RESET_EVERY - 1:
                    self._reset_at = time.monotonic()
                    self._lost = 0
                    self._world.proxy.reset()
                await self._one(number, 2 * at_once)

        await asyncio.gather(*(one(number) for number in range(requests)))
        self.tally.server_end = await self._server_end()
        engine = self._world.engine
        try:
            await engine.until(lambda: not engine.running)
        except asyncio.TimeoutError:
            self.tally.left_running = len(engine.running)
        return self.tally

    async def _server_end(self) -> str:
        """Tell how the server ended; "" if it runs. After failures one that is ending has time."""
        server = self._world.server
        deadline = time.monotonic()
        if self.tally.wrong:
            deadline += END_S
        while server.running and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if server.running:
            return ""
        try:
            server.wait()
        except ServerFailed as error:
            return str(error)
        return "the server was stopped"

    def _plan(self, seen: Seen, steps: list[Step]) -> list[Step]:
        if self._random.random() > FAULTY:
            return steps
        fault = self._random.choice(sorted(FAULTS))
        caller = seen.id.partition("-")[0]  # the server adds numbers
        self._faults.setdefault(caller, set()).add(fault if seen.model == TARGET else "")
        return FAULTS[fault](steps, self._random.randrange(len(steps)), self._random)

    async def _one(self, number: int, most_lost: int) -> None:
        id, rng = f"chaos{number}", random.Random(self._random.random())
        prompt, text = rng.choice(list(TEXTS.items()))
        fields: dict[str, Any] = {"text_input": prompt, "max_tokens": 200}
        fields["timeout_ms"] = TIME_LIMIT_MS
        fields["stream"] = rng.random() < 0.8
        fields["draft_source"] = rng.choice(("off", "off", "model", "ngram"))
        if rng.random() < 0.3:
            stop = text[(cut := rng.randrange(3, len(text) - 4)) : cut + 3]
            fields["stop_words"], text = [stop], text[: text.index(stop)]
        leaves_after = rng.randrange(12) if rng.random() < 0.15 else None
        deadline_s = rng.random() * 0.3 if rng.random() < 0.1 else STUCK_S
        began = time.monotonic()
        said, outcome = await self._ask(id, fields, leaves_after, deadline_s)
        self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - began)
        self.tally.outcomes[outcome.partition(":")[0]] += 1
        faults = self._faults.pop(id, set())
        if outcome == "no end" and deadline_s == STUCK_S:
            self.tally.stuck.append(f"{id} {faults}")
        is_lost = outcome.startswith("error") and not faults - {"", "slow"}
        if is_lost and self._reset_at > began - FORGIVEN_S:
            self._lost += 1
            is_lost = self._lost > most_lost
        problem = _problem(outcome, said, (TEXTS[prompt], text), is_lost)
        if problem:
            self.tally.wrong.append(f"{id} {fields} {faults}: {problem}: {said!r}, {outcome}")

    async def _ask(
        self, id: str, fields: dict[str, Any], leaves_after: int | None, deadline_s: float
    ) -> tuple[str, str]:
        """The text and how it ended."""
        said, outcome, count = "", "silent end", 0
        stream = self._world.client.stream(request_id=id, deadline_s=deadline_s, **fields)
        try:
            async with stream:
                async for event in stream:
                    if count == leaves_after:
                        return said, "left"
                    count += 1
                    said += event.text
                    outcome = event.finish_reason or outcome
        except DeadlineExceeded:
            return said, "no end"
        except TrtllmBlsError as error:
            return said, f"error: {error}"
        return said, outcome


def _problem(outcome: str, said: str, texts: tuple[str, str], is_lost: bool) -> str | None:
    """Why an outcome is not what was promised.

    ``texts``: without and with the stop word. ``is_lost``: it is an error that no fault explains.
    """
    whole, text = texts
    if outcome in ("end_id", "stop"):
        return None if said == text else f"complete, but {text!r} is right"
    if not whole.startswith(said.rstrip("\ufffd")):  # cut in the middle of a character
        return f"no beginning of {whole!r}"
    if outcome in ("silent end", "length", "cancelled"):
        return "an ending that nothing accounts for"
    if is_lost:
        return "an error that neither a fault of the engine nor a reset explains"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=32)
    given = parser.parse_args()

    async def run() -> Tally:
        async with world() as parts:
            return await Chaos(parts, given.seed).run(given.requests, given.at_once)

    tally = asyncio.run(run())
    print(f"{given.requests} requests:", dict(tally.outcomes.most_common()))
    print(f"stuck: {len(tally.stuck)}, wrong: {len(tally.wrong)}, ", end="")
    print(f"left running in the engine: {tally.left_running}; longest {tally.longest_s:.1f} s")
    problems = [*filter(None, [tally.server_end]), *tally.stuck, *tally.wrong]
    for line in problems[:20]:
        print(line)
    sys.exit(1 if problems or tally.left_running else 0)


if __name__ == "__main__":
    main()
