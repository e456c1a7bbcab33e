"""Tens of thousands of streams, many of them cancelled or failing: what stays behind.

    python -m tests.reliability.soak [--streams 50000] [--minutes 60] [--at-once 32]

Ends with whichever comes first. Prints what the processes held over time, and the slope of each
figure after the first fifth, per 10,000 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from tests.helpers.server_requests import metric
from tests.helpers.waiting import until
from tests.reliability.fuzz import serving
from tests.reliability.processes import held
from trtllm_bls.client import Client
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.operate.tritonserver import TritonServer

SAMPLE_S = 5.0
WORDS = [f"word{number}" for number in range(60)]
FAILS = 666001  # the seed that makes the scripted engine fail in mid-stream
GAUGES = ("trtllm_bls_num_requests_running", "echo_live_requests")


class Soak:
    """Streams at one server until enough of them are over."""

    def __init__(self, server: TritonServer, streams: int, seconds: float) -> None:
        self.outcomes: Counter[str] = Counter()
        self.samples: list[tuple[int, dict[str, float]]] = []
        self._server = server
        self._left = streams
        self._until = time.monotonic() + seconds
        self._random = random.Random(1)

    @property
    def done(self) -> int:
        return sum(self.outcomes.values())

    async def run(self, at_once: int) -> None:
        async with Client(self._server.grpc_url) as client:
            sampling = asyncio.create_task(self._sample())
            await asyncio.gather(*(self._streams(client) for _ in range(at_once)))
            sampling.cancel()
        until(lambda: not any(self._running().values()))  # the server tells once a second
        self._take_sample()

    async def _streams(self, client: Client) -> None:
        while self._left > 0 and time.monotonic() < self._until:
            self._left -= 1
            self.outcomes[await self._stream(client)] += 1

    async def _stream(self, client: Client) -> str:
        prompt = " ".join(self._random.sample(WORDS, self._random.randint(1, 12)))
        fields: dict[str, Any] = {"text_input": prompt, "max_tokens": 200}
        kind = self._random.choice(("whole", "whole", "whole", "left", "fails", "refused"))
        if kind == "fails":
            fields |= {"random_seed": FAILS, "top_k": 2}
        if kind == "refused":
            fields["temperature"] = -1.0
        said, events, leaves_after = "", 0, self._random.randint(0, 8)
        try:
            async with client.stream(**fields) as stream:
                async for event in stream:
                    said += event.text
                    events += 1
                    if kind == "left" and events > leaves_after:
                        return "left"
        except TrtllmBlsError as error:
            return kind if kind in ("fails", "refused") else f"error: {error}"
        return "whole" if said == prompt else f"wrong: {said!r} for {prompt!r}"

    async def _sample(self) -> None:
        while True:
            self._take_sample()
            await asyncio.sleep(SAMPLE_S)

    def _take_sample(self) -> None:
        self.samples.append((self.done, held(self._server) | self._running()))

    def _running(self) -> dict[str, float]:
        return {name: metric(self._server.metrics_url, name) for name in GAUGES}

    def slopes(self) -> dict[str, float]:
        """Of each figure, per 10,000 streams, once the first fifth is over."""
        later = [(done, held) for done, held in self.samples if done >= self.done / 5]
        counts = np.array([done for done, _ in later]) / 10_000
        return {
            name: float(np.polyfit(counts, [held[name] for _, held in later], 1)[0])
            for name in self.samples[-1][1]
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=50_000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--at-once", type=int, default=32)
    given = parser.parse_args()
    began = time.monotonic()
    with serving() as server:
        soak = Soak(server, given.streams, given.minutes * 60)
        asyncio.run(soak.run(given.at_once))
    print(f"{soak.done} streams in {(time.monotonic() - began) / 60:.1f} minutes:", end=" ")
    print(dict(soak.outcomes.most_common(8)))
    print(f"{'':36}{'after a fifth':>14}{'at the end':>12}{'per 10,000 streams':>20}")
    first = next(held for done, held in soak.samples if done >= soak.done / 5)
    for name, slope in soak.slopes().items():
        last = soak.samples[-1][1][name]
        print(f"{name:36}{first[name]:14.1f}{last:12.1f}{slope:+20.2f}")
    sys.exit(1 if any(name.startswith(("error", "wrong")) for name in soak.outcomes) else 0)


if __name__ == "__main__":
    main()
