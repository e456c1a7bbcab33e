"""What speculation gains and costs, on scripted engines: no model, no GPU, no server.

    python benchmarks/speculation.py [--tokens 600] [--only formula,overhead,idle,...]

The target takes 20 ms for a step, the draft 2 ms, and the draft guesses right in a set share of
contexts. Time is real (asyncio), so orchestration is paid for; every ratio is of two runs in this
process. Prints one line per measurement, with what is asked of it and whether it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import product

from openai_api import into_sink

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import agreeing, hashed
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.types import (
    EngineChunk,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    SpeculationStats,
)

VOCAB = 1000
TARGET_S, DRAFT_S = 0.020, 0.002
RATES = (0.6, 0.8, 0.9)
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12)
TEXTS = 4
RULE = hashed(VOCAB)


@dataclass(frozen=True)
class Pair:
    """A target and a draft that agree in a share of contexts."""

    target: ScriptedEngine
    draft: ScriptedEngine

    @classmethod
    def of(cls, rate: float, step: float = 1.0) -> Pair:
        target = Script(vocab_size=VOCAB, step_seconds=TARGET_S * step)
        draft = Script(vocab_size=VOCAB, step_seconds=DRAFT_S * step)
        return cls(ScriptedEngine(RULE, target), ScriptedEngine(agreeing(RULE, rate, VOCAB), draft))


class Speculating(RoutingEngine):
    """Speculates on every request; ``stats`` are those of the last one that has ended."""

    def __init__(
        self,
        pair: Pair,
        options: SpeculationOptions | None = None,
        shared: SpeculationShared | None = None,
    ) -> None:
        super().__init__(
            pair.target, pair.draft, options, by_default=True, on_end=self._keep, shared=shared
        )
        self.stats = SpeculationStats()

    def _keep(self, stats: SpeculationStats) -> None:
        self.stats = stats


def request(number: int, tokens: int) -> EngineRequest:
    prompt = tuple((number * 31 + place * 7) % VOCAB for place in range(32))
    return EngineRequest(
        request_id=f"r{number}", input_ids=prompt, max_tokens=tokens, sampling=Sampling(top_k=1)
    )


async def seconds(engine: Engine, asked: EngineRequest) -> float:
    begun = time.perf_counter()
    async with aclosing(engine.generate(asked)) as stream:
        async for _ in stream:
            pass
    return time.perf_counter() - begun


async def speculate(
    pair: Pair, options: SpeculationOptions, tokens: int, shared: SpeculationShared
) -> tuple[float, Speculating]:
    engine = Speculating(pair, options, shared)
    return await seconds(engine, request(1, tokens)), engine


def expected(rate: float, length: int) -> float:
    """Speed-up by the formula, without overhead: v = 1, h = 0."""
    return (1 - rate ** (length + 1)) / (1 - rate) / (length * DRAFT_S / TARGET_S + 1)


def report(what: str, value: str, asked: str, holds: bool) -> None:
    print(f"{'ok  ' if holds else 'MISS'}  {what:<58} {value:<34} asked: {asked}", flush=True)


async def of_texts(
    pair: Pair, options: SpeculationOptions, tokens: int
) -> tuple[float, list[Speculating]]:
    """Seconds of several texts side by side, summed: one text alone may favour a length by luck."""
    engines = [Speculating(pair, options) for _ in range(TEXTS)]
    took = await asyncio.gather(
        *(seconds(engine, request(number, tokens)) for number, engine in enumerate(engines))
    )
    return sum(took), engines


async def formula(tokens: int) -> None:
    """Fixed lengths against the formula, and adaptive against the best fixed length."""
    for rate in RATES:
        pair = Pair.of(rate)
        plain = TEXTS * await seconds(pair.target, request(1, tokens))
        gains, drawn = {}, {}
        for length in LENGTHS:
            took, engines = await of_texts(
                pair, SpeculationOptions(num_draft_tokens=length), tokens
            )
            gains[length] = plain / took
            rates = [engine.stats.acceptance_rate or 0.0 for engine in engines]
            drawn[length] = statistics.mean(rates)
        best = max(LENGTHS, key=lambda k: expected(rate, k))
        share = gains[best] / expected(rate, best)
        value = f"{gains[best]:.2f}x of {expected(rate, best):.2f}x = {share:.0%}"
        print(f"      a={rate}: " + " ".join(f"k{k}:{gain:.2f}" for k, gain in gains.items()))
        report(
            f"formula, a={rate}, k={best} (accepted {drawn[best]:.2f})",
            value,
            ">= 90 %",
            share >= 0.9,
        )
        took, _ = await of_texts(pair, SpeculationOptions(), tokens)
        versus = plain / took / max(gains.values())
        value = f"{plain / took:.2f}x, best fixed {max(gains.values()):.2f}x = {versus:.0%}"
        report(f"adaptive from cold, a={rate}", value, ">= 95 % of best fixed", versus >= 0.95)


async def summary(rate: float = 0.8, tokens: int = 200) -> str:
    """One line: the speed-up of drafts by the draft model."""
    pair = Pair.of(rate)
    plain = await seconds(pair.target, request(1, tokens))
    took, _ = await speculate(pair, SpeculationOptions(), tokens, SpeculationShared())
    return (
        f"Drafts of which {rate:.0%} are right: {plain / took:.1f} times the tokens/s, with "
        f"engines of {TARGET_S * 1e3:g} and {DRAFT_S * 1e3:g} ms a step."
    )


async def mixed(tokens: int) -> None:
    """Requests of several acceptance rates one after another: one setting for all of them."""
    pairs = [Pair.of(rate) for rate in (0.1, 0.9, 0.6, 0.95, 0.3, 0.8)]
    plain = sum([await seconds(pair.target, request(1, tokens)) for pair in pairs])
    gains: dict[str, float] = {}
    for length in (*LENGTHS, None):
        options, shared = SpeculationOptions(num_draft_tokens=length), SpeculationShared()
        took = sum([(await speculate(pair, options, tokens, shared))[0] for pair in pairs])
        gains["adaptive" if length is None else f"k{length}"] = plain / took
    adaptive = gains.pop("adaptive")
    name, best = max(gains.items(), key=lambda item: item[1])
    value = f"{adaptive:.2f}x, best fixed {name} {best:.2f}x"
    report("mixed workload, adaptive", value, "above any fixed", adaptive > best)


class Hop(ScriptedEngine):
    """Each request takes as long again as a call through Triton before its first step."""

    SECONDS = 0.0015

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        await asyncio.sleep(self.SECONDS)
        async with aclosing(super()._chunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk


def misleading(context: Sequence[int]) -> int:
    """Each id has stood there before, as a rule, and something else after it."""
    return RULE([*context, len(context)])


async def unpaid(tokens: int) -> None:
    """Switched on by default, and useless: drafts that are never right, or load that forbids them.

    Off and on by turns; a first answer of each, from which speculation learns, is not counted.
    """
    wrong = agreeing(RULE, 0.0, VOCAB)
    for streams, source in product((2, 128), ("model", "ngram", "mixed", "prediction")):
        rule = RULE if source in ("model", "prediction") else misleading
        prediction = tuple(range(VOCAB)) if source == "prediction" else ()
        target = Hop(rule, Script(vocab_size=VOCAB, step_seconds=TARGET_S))
        draft = Hop(wrong, Script(vocab_size=VOCAB, step_seconds=DRAFT_S))
        options = SpeculationOptions(draft_source=DraftSource(source))
        engine = RoutingEngine(target, draft, options, by_default=True)

        async def all_of(engine: Engine, asked: SpeculationRequest) -> tuple[float, float]:
            requests = [replace(request(n, tokens), speculation=asked) for n in range(streams)]  # noqa: B023
            cpu = time.process_time()
            took = await asyncio.gather(*(seconds(engine, one) for one in requests))
            return statistics.mean(took), (time.process_time() - cpu) / tokens / streams  # noqa: B023

        asked = SpeculationRequest(prediction=prediction)
        await all_of(engine, asked)
        slower, dearer = [], []
        for _ in range(3):
            (plain, plain_cpu), (took, cpu) = (
                await all_of(target, asked),
                await all_of(engine, asked),
            )
            slower.append(took / plain - 1)
            dearer.append((cpu - plain_cpu) * 1e6)
        cost = statistics.median(slower)
        value = f"{cost:+.2%} per token, {statistics.median(dearer):+.0f} us of CPU"
        report(f"useless {source}, {streams} streams", value, "<= +1 %", cost <= 0.01)


async def overlap(tokens: int) -> None:
    """Drafting on while the target verifies: two engines that do not share a device."""
    for rate in RATES:
        pair = Pair.of(rate)
        took = {}
        for on in (False, True):
            took[on], engine = await speculate(
                pair, SpeculationOptions(overlap=on), tokens, SpeculationShared()
            )
        stats, steps = engine.stats, len(pair.draft.requests)
        value = f"{took[False] / took[True]:.2f}x; used {stats.overlap_used}"
        value += f", wasted {stats.overlap_wasted}"
        report(f"overlap, a={rate}", value, "reported only", steps > 0)


async def overhead(tokens: int) -> None:
    """CPU of a round: engines of zero seconds, less what they cost when asked alone."""
    for length in (1, 4, 8):
        own, whole = [], []
        for _ in range(20):
            pair = Pair.of(0.8, step=0.0)
            options = SpeculationOptions(num_draft_tokens=length)
            begun = time.process_time()
            _, engine = await speculate(pair, options, tokens, SpeculationShared())
            took = time.process_time() - begun
            for scripted in (pair.target, pair.draft):
                for asked in list(scripted.requests):
                    await seconds(scripted, asked)
            alone = time.process_time() - begun - took
            whole.append(took / engine.stats.rounds * 1e6)
            own.append((took - alone) / engine.stats.rounds * 1e6)
        p50 = statistics.median(own)
        value = f"{p50:.0f} us of CPU ({statistics.median(whole):.0f} with engines)"
        report(f"a round, draft model, k={length}", value, "<= 500 us", p50 <= 500)


async def idle(tokens: int) -> None:
    """Configured, and forbidden by the load: CPU of engine and orchestrator, by turns."""
    streams, turns = 64, 15
    for source in ("ngram", "model", "mixed"):
        options = SpeculationOptions(draft_source=DraftSource(source))

        def plain(engine: Engine) -> Engine:
            return RoutingEngine(engine)

        def speculating(engine: Engine) -> Engine:
            return RoutingEngine(engine, engine, options, by_default=True)  # noqa: B023

        found: dict[Callable[[Engine], Engine], list[float]] = {plain: [], speculating: []}
        for _ in range(turns):
            for over, cpu in found.items():
                cpu.append(await asyncio.to_thread(into_sink, 0.01, streams, tokens // 6, over))
        without, beside = (statistics.median(cpu) for cpu in found.values())
        value = f"{without:.1f} us per token, {beside - without:+.1f}, {beside / without - 1:+.1%}"
        report(f"idle {source}, {streams} streams", value, "<= +1 %", beside <= 1.01 * without)


PARTS: dict[str, Callable[[int], Awaitable[None]]] = {
    part.__name__: part for part in (formula, mixed, unpaid, idle, overlap, overhead)
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=600, help="per request")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas")
    chosen = parser.parse_args()
    print(
        f"target {TARGET_S * 1e3:g} ms a step, draft {DRAFT_S * 1e3:g} ms, {chosen.tokens} tokens "
        f"a request, greedy, vocabulary {VOCAB}; Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for name in chosen.only.split(","):
        await PARTS[name](chosen.tokens)


if __name__ == "__main__":
    asyncio.run(main())
