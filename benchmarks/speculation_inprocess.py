"""Speculation with real weights on two embedded engines in this process: no server, CPU or CUDA.

    python benchmarks/speculation_inprocess.py [--pad-layers 60] [--tokens 128] [--prompts 4]

For machines without tritonserver, such as a bare GPU host. The same loop and the same weights as
``speculation_models.py``; wall-clock ratios to plain decoding in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from contextlib import aclosing
from pathlib import Path

import torch
from padded import demo_and_padded

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.messages import EngineRequest, Sampling
from trtllm_bls.speculative import DraftSource, SpeculationOptions, SpeculationStats
from trtllm_bls.tokenizer import load_tokenizer

DEMO = Path(__file__).parents[1] / "assets" / "demo"
WAYS = {
    "k=4": SpeculationOptions(num_draft_tokens=4),
    "model": SpeculationOptions(),
    "ngram": SpeculationOptions(draft_source=DraftSource.NGRAM),
    "mixed": SpeculationOptions(draft_source=DraftSource.MIXED),
}


def request(number: int, ids: tuple[int, ...], tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        input_ids=ids,
        max_tokens=tokens,
        end_id=2,
        sampling=Sampling(top_k=1),
    )


async def tokens_of(engine: Engine, asked: EngineRequest) -> tuple[int, ...]:
    async with aclosing(engine.generate(asked)) as stream:
        return tuple([token async for chunk in stream for token in chunk.token_ids])


async def measure(
    name: str, target: EmbeddedEngine, draft: EmbeddedEngine, given: argparse.Namespace
) -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    prompts = json.loads((DEMO / "prompts.json").read_text())
    for kind in ("easy", "hard", "copy"):
        asked = [
            request(number, tokenizer.encode(prompt, add_special_tokens=True), given.tokens)
            for number, prompt in enumerate(prompts[kind][: given.prompts])
        ]
        await tokens_of(target, asked[0])
        begun = time.perf_counter()
        plain = [await tokens_of(target, one) for one in asked]
        base = time.perf_counter() - begun
        line = f"{name:>8} {kind:>5}: plain {sum(map(len, plain)) / base:6.1f} tokens/s"
        for way, options in WAYS.items():
            ended: list[SpeculationStats] = []
            engine = RoutingEngine(target, draft, options, by_default=True, on_end=ended.append)
            await tokens_of(engine, asked[0])
            begun = time.perf_counter()
            drafted = [await tokens_of(engine, one) for one in asked]
            took = time.perf_counter() - begun
            differs = "" if drafted == plain else ", TOKENS DIFFER"
            rate = sum(one.accepted for one in ended) / max(1, sum(one.drafted for one in ended))
            line += f" | {way} {base / took:.2f}x (accepted {rate:.0%}{differs})"
        print(line, flush=True)


def run(name: str, model: Path, given: argparse.Namespace) -> None:
    settings = EmbeddedSettings(max_batch=8, max_sequence_tokens=1024)
    with EmbeddedEngine(model, settings) as target, EmbeddedEngine(DEMO / "draft", settings) as d:
        asyncio.run(measure(name, target, d, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pad-layers", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}; {given.tokens} tokens, {given.prompts} prompts a kind"
    )
    for name, model in demo_and_padded(given.pad_layers):
        run(name, model, given)


if __name__ == "__main__":
    main()
