"""How long /health/ready takes while a server has more to do than it can, and whether it stays yes.

    python benchmarks/health_latency.py [--streams 128] [--probes 3000] [--burners 0]

Prints percentiles of the answer's time, beside those of Triton's own /v2/health/ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Process, get_context

from kill_table import answer, serving

STEP_MS = 5
SHARES = (0.5, 0.99, 0.999)


def probe(url: str, times: int) -> list[float]:
    """Milliseconds of each answer, sorted; all must be 200."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60) as reply:
            reply.read()
        took.append((time.perf_counter() - begun) * 1000)
    return sorted(took)


def burn() -> None:
    """Keep a core busy."""
    while True:
        pass


async def streaming(url: str) -> None:
    """One stream after the other, until cancelled."""
    while True:
        await answer(url, max_tokens=400)


async def measure(urls: dict[str, str], streams: int, probes: int) -> None:
    load = [asyncio.create_task(streaming(urls["gRPC"])) for _ in range(streams)]
    await asyncio.sleep(5)
    loop = asyncio.get_running_loop()
    # A process of its own: this one is busy reading streams.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        for url in (urls["health"], f"{urls['HTTP']}/v2/health/ready"):
            took = await loop.run_in_executor(other, probe, url, probes)
            cuts = {share: took[min(probes - 1, int(share * probes))] for share in SHARES}
            told = ", ".join(f"p{share * 100:g} {value:.1f} ms" for share, value in cuts.items())
            print(f"{url}: {told}", flush=True)
    for task in load:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--probes", type=int, default=3000)
    parser.add_argument("--burners", type=int, default=0, help="processes that do nothing else")
    given = parser.parse_args()
    for _ in range(given.burners):
        Process(target=burn, daemon=True).start()
    with serving(step_ms=STEP_MS) as server:
        asyncio.run(measure(server.urls, given.streams, given.probes))


if __name__ == "__main__":
    main()
