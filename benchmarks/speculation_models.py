"""Speculation with real weights on the embedded engine, through the real tritonserver.

    python benchmarks/speculation_models.py [--pad-layers 90] [--tokens 128] [--prompts 4]
                                            [--in-process]

Runs the demo pair, and the demo pair whose target has extra layers that add zero: the same
function at several times the cost, as a large target would have it. Wall-clock ratios to plain
decoding in the same run, per kind of prompt and source of drafts. ``--in-process`` needs no
server: both engines are in this process, on the CPU or on CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from padded import demo_and_padded

from trtllm_bls.bundled import DEMO
from trtllm_bls.client import Client
from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import ServeSettings
from trtllm_bls.tokenizer import load_tokenizer
from trtllm_bls.types import EngineRequest, Sampling, SpeculationRequest

WAYS: dict[str, dict[str, Any]] = {
    "k=4": {"num_draft_tokens": 4},
    "model": {"draft_source": "model"},
    "ngram": {"draft_source": "ngram"},
    "mixed": {"draft_source": "mixed"},
}


@dataclass
class Answer:
    """What came, how many tokens that is, in how many seconds; drafts and how many were right."""

    content: object
    tokens: int
    seconds: float
    drafted: int
    accepted: int


# Asks a prompt for so many tokens, with what it wants of speculation.
Ask = Callable[..., Awaitable[Answer]]


@asynccontextmanager
async def through_triton(model: Path) -> AsyncIterator[Ask]:
    settings = ServeSettings(
        http_port=0, grpc_port=0, metrics_port=0, model=model, draft_model=DEMO / "draft"
    )
    with TritonServer(settings) as server:
        async with Client(server.grpc_url) as client:

            async def ask(prompt: str, tokens: int, **speculation: Any) -> Answer:
                result = await client.generate(
                    text_input=prompt,
                    max_tokens=tokens,
                    return_num_output_tokens=True,
                    **speculation,
                )
                last = result.events[-1]
                drafted, accepted = (
                    int(last.outputs[name].item()) if name in last.outputs else 0
                    for name in ("total_draft_tokens", "total_accepted_draft_tokens")
                )
                seconds = last.received_at - result.started_at
                return Answer(result.text, last.num_output_tokens or 0, seconds, drafted, accepted)

            yield ask


@asynccontextmanager
async def in_process(model: Path) -> AsyncIterator[Ask]:
    tokenizer = load_tokenizer(DEMO / "target")
    settings = EmbeddedSettings(max_batch=8, max_sequence_tokens=1024)
    engine = RoutingEngine(
        EmbeddedEngine(model, settings), EmbeddedEngine(DEMO / "draft", settings)
    )

    async def ask(prompt: str, tokens: int, **speculation: Any) -> Answer:
        asked = EngineRequest(
            request_id="r",
            input_ids=tokenizer.encode(prompt, add_special_tokens=True),
            max_tokens=tokens,
            end_id=2,
            sampling=Sampling(top_k=1),
            speculation=SpeculationRequest(**speculation),
        )
        begun, ids, counts = time.perf_counter(), [], None
        async with aclosing(engine.generate(asked)) as stream:
            async for chunk in stream:
                ids += chunk.token_ids
                counts = chunk.speculation
        drafted, accepted = (counts.drafted, counts.accepted) if counts else (0, 0)
        return Answer(ids, len(ids), time.perf_counter() - begun, drafted, accepted)

    yield ask
    await engine.close()


def speed(answers: list[Answer]) -> float:
    """Tokens per second over all of them."""
    return sum(each.tokens for each in answers) / sum(each.seconds for each in answers)


async def measure(name: str, ask: Ask, tokens: int, count: int) -> None:
    kinds = json.loads((DEMO / "prompts.json").read_text())
    for kind in ("easy", "hard", "copy"):
        prompts = kinds[kind][:count]
        await ask(prompts[0], 16)
        plain = [await ask(prompt, tokens) for prompt in prompts]
        line = f"{name:>8} {kind:>5}: plain {speed(plain):6.1f} tokens/s"
        for way, speculation in WAYS.items():
            await ask(prompts[0], 32, **speculation)
            drafted = [await ask(prompt, tokens, **speculation) for prompt in prompts]
            same = [each.content for each in plain] == [each.content for each in drafted]
            right = sum(each.accepted for each in drafted)
            share = right / max(1, sum(each.drafted for each in drafted))
            line += f" | {way} {speed(drafted) / speed(plain):.2f}x"
            line += f" (accepted {share:.0%}{'' if same else ', TEXT DIFFERS'})"
        print(line, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pad-layers", type=int, default=90)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--in-process", action="store_true")
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"Python {platform.python_version()}, {device}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}; "
        f"{given.tokens} tokens, {given.prompts} prompts a kind, greedy, one request at a time"
    )
    opened = in_process if given.in_process else through_triton
    for name, model in demo_and_padded(given.pad_layers):
        async with opened(model) as ask:
            await measure(name, ask, given.tokens, given.prompts)


if __name__ == "__main__":
    asyncio.run(main())
